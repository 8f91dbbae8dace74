"""A `tailrace serve` that writes down its long turns; `bench/fairness.py` starts its node with it.

    python bench/turns.py FILE serve ...

A turn is one callback of the event loop: nobody else is served meanwhile. Each turn of `LONG_S` or more by
the clock gives a line in FILE: when it ended (by the monotonic clock that all processes share), how long it
took by the clock and how much of that the loop's thread computed, in milliseconds, how much the garbage
collector took of it, and what it was. The time by the clock includes what other threads and processes took,
so on a busy machine the computed time is what counts.

A pass is one round of the loop: the turns of all that is ready. A request waits for the current pass and for
its own. A line for each pass of `PASS_S` or more has what this process computed meanwhile, in all of its
threads: on a quiet machine it takes no longer, even if they never release Python's lock.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

LONG_S = 0.005
PASS_S = 0.001


def name_of(callback: Any) -> str:
    while isinstance(callback, partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"task {owner.get_coro()!r}".split(" at 0x")[0]
    return str(getattr(callback, "__qualname__", type(callback).__name__))


def watch(path: Path) -> None:
    """Watch the turns of this process from now on."""
    out = path.open("w", buffering=1)
    collected_s = began_collecting = 0.0
    run = asyncio.Handle._run

    def on_collection(phase: str, _: dict[str, int]) -> None:
        nonlocal collected_s, began_collecting
        if phase == "start":
            began_collecting = time.perf_counter()
        else:
            collected_s += time.perf_counter() - began_collecting

    def timed(handle: asyncio.Handle) -> None:
        collected_before = collected_s
        callback: Any = getattr(handle, "_callback", None)
        began, computed = time.perf_counter(), time.thread_time()
        run(handle)
        ended = time.perf_counter()
        if ended - began >= LONG_S:
            turn = {
                "at": time.monotonic(),
                "ms": round((ended - began) * 1e3, 1),
                "computed_ms": round((time.thread_time() - computed) * 1e3, 1),
                "gc_ms": round((collected_s - collected_before) * 1e3, 1),
                "what": name_of(callback),
            }
            out.write(json.dumps(turn) + "\n")

    run_once: Any = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def timed_pass(loop: Any) -> None:
        computed = time.process_time()
        run_once(loop)
        pass_s = time.process_time() - computed
        if pass_s >= PASS_S:
            out.write(json.dumps({"at": time.monotonic(), "pass_ms": round(pass_s * 1e3, 1)}) + "\n")

    setattr(asyncio.BaseEventLoop, "_run_once", timed_pass)  # noqa: B010 - typeshed has it otherwise
    gc.callbacks.append(on_collection)
    setattr(asyncio.Handle, "_run", timed)  # noqa: B010 - typeshed has it otherwise


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
    from tailrace.cli.main import main

    sys.argv[1:] = sys.argv[2:]
    sys.exit(main())
