"""What a node, a reader and a mirror show over HTTP: the page, JSON, metrics and health."""

from .chart_samples import ChartSamples
from .http import connection_handler
from .http_thread import HttpFigures, HttpOptions, HttpThread
from .node import keep_samples, node_service

__all__ = [
    "ChartSamples",
    "HttpFigures",
    "HttpOptions",
    "HttpThread",
    "connection_handler",
    "keep_samples",
    "node_service",
]
