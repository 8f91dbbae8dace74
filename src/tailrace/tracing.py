"""OpenTelemetry traces: the rounds of a mirror and the slow commands of a node. They are optional: without
``pip install "tailrace[otel]"``, or if traces are not asked for, nothing here does anything.

In a program that has set up OpenTelemetry, spans go to the program's own provider. The command line sets it
up from the usual variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_EXPORTER``,
``OTEL_SERVICE_NAME``, …).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["add_span", "configure_tracing", "span"]

_NAME = "tailrace"
_WANTED_BY = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def configure_tracing() -> str:
    """Set up OpenTelemetry from the environment; returns a message if something is wrong, else ""."""
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    is_off = exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or not any(os.environ.get(name) for name in _WANTED_BY):
        return ""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

        made: SpanExporter
        if exporter == "console":
            made = ConsoleSpanExporter(out=sys.stderr)
        elif exporter == "otlp":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            made = OTLPSpanExporter()
        else:
            return f"OTEL_TRACES_EXPORTER {exporter!r} is not known: otlp, console or none"
    except ImportError:
        return 'traces are wanted (OTEL_…) but not installed: pip install "tailrace[otel]"'
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": _NAME}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return ""


def _tracer() -> Any:
    """The tracer; None if OpenTelemetry is not imported, since then nobody asks for traces."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    return trace.get_tracer(_NAME)


@contextlib.contextmanager
def span(name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
    """A span around the block; spans inside are its children. What the block puts into the dictionary becomes
    attributes.
    """
    more: dict[str, Any] = {}
    tracer = _tracer()
    if tracer is None:
        yield more
        return
    with tracer.start_as_current_span(name, attributes=_named(attributes)) as current:
        yield more
        current.set_attributes(_named(more))


def add_span(name: str, began_ns: int, ended_ns: int, **attributes: Any) -> None:
    """Add a span that is over; both times are nanoseconds since 1970."""
    tracer = _tracer()
    if tracer is not None:
        tracer.start_span(name, start_time=began_ns, attributes=_named(attributes)).end(end_time=ended_ns)


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"tailrace.{name}": value for name, value in attributes.items()}
