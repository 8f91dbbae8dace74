"""A real Chromium that does what a person does: it points, types and presses keys. It is driven through its
own debugging pipe, so nothing but Debian's package is needed.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Browser", "browsing"]

_PATIENCE_S = 120.0
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "ArrowUp": (38, ""), "ArrowDown": (40, ""), "Space": (32, " ")}


class Browser:
    """A browser with one page."""

    def __init__(self, into: int, out: int) -> None:
        self._into = into
        self._out = out
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        self._call("Page.enable")

    def _call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            line, end, rest = self._unread.partition(b"\0")
            if not end:
                more = os.read(self._out, 1 << 20)
                assert more, "the browser has ended"
                self._unread += more
                continue
            self._unread = rest
            answer = json.loads(line)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        """Make the page as wide as a phone, or a desktop."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def prefer(self, scheme: str) -> None:
        """Prefer the colour scheme `dark` or `light`."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def go(self, url: str) -> None:
        """Open a page."""
        self._call("Page.navigate", url=url)

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression holds."""
        ends = time.monotonic() + _PATIENCE_S
        while not self.ask(f"!!({script})"):
            assert time.monotonic() < ends, f"{script}: {self.ask('document.body.innerText')}"
            time.sleep(0.05)

    def point_at(self, selector: str, across: float = 0.5) -> None:
        """Move the mouse there."""
        x, y = self._place(selector, across)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Click with the mouse."""
        x, y = self._place(selector, 0.5)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _place(self, selector: str, across: float) -> tuple[float, float]:
        script = (
            f"(e => {{ e.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            " const r = e.getBoundingClientRect();"
            " return [r.x, r.y, r.width, r.height]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        x, y, width, height = self.ask(script)
        return x + across * width, y + height / 2

    def press(self, key: str) -> None:
        """Press a key."""
        code, text = _KEYS[key]
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            name = " " if key == "Space" else key
            self._call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **typed)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def keep(self, path: Path, *, whole: bool = True) -> None:
        """Save a picture of the page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing(program: str, folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
    words = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    words += [f"--user-data-dir={folder}", "--no-first-run", "about:blank"]
    command = [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), *words]
    with subprocess.Popen(
        command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_in, ours_out)
        finally:
            os.close(ours_in)
            os.close(ours_out)
            process.terminate()
            process.wait(_PATIENCE_S)
