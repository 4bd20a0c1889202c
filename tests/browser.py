"""A headless Chromium, driven by its DevTools protocol through two pipes, without any package."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Page", "browser", "find"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KEYS = {"Tab": 9, "Enter": 13, "Home": 36, "End": 35, "ArrowLeft": 37, "ArrowUp": 38,
        "ArrowRight": 39, "ArrowDown": 40}  # fmt: skip


def find() -> str | None:
    """Path of a browser, if this machine has one. $BROWSER_PATH comes first."""
    paths = filter(None, [os.environ.get("BROWSER_PATH"), *map(shutil.which, NAMES)])
    return next(iter(paths), None)


class Page:
    """One page without network."""

    def __init__(self, to: Any, back: Any) -> None:
        self._to, self._back, self._number, self._session = to, back, 0, None
        self.problems: list[str] = []
        """Errors and messages in the page's console, and attempts to use the network"""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0,
                  downloadThroughput=0, uploadThroughput=0)  # fmt: skip

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def wait(self, event: str) -> None:
        while self._next().get("method") != event:
            pass

    def _next(self) -> dict[str, Any]:
        raw = bytearray()
        while (byte := self._back.read(1)) != b"\0":
            assert byte, "the browser has closed the pipe"
            raw += byte
        message = json.loads(raw)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(message["params"]))
        if message.get("method") == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self.problems.append(f"asks for {url}")
        return message

    def open(self, path: Path, width: int = 1280, height: int = 900, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=2 if phone else 1, mobile=phone)  # fmt: skip
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("Page.loadEventFired")

    def run(self, expression: str) -> Any:
        """Evaluate a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        for key in keys:
            code = KEYS.get(key) or ord(key.upper())
            text = "\r" if key == "Enter" else key if len(key) == 1 else None
            say = {"key": key, "windowsVirtualKeyCode": code, "code": key}
            down = say | ({"text": text} if text else {})
            self.call("Input.dispatchKeyEvent", type="keyDown", **down)
            self.call("Input.dispatchKeyEvent", type="keyUp", **say)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser that keeps its files in a folder. Yields a page; the browser ends with the
    block."""
    path = find()
    assert path, f"none of {NAMES} was found"
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    # The browser reads commands from descriptor 3 and answers on 4.
    command = f'exec "$0" "$@" 3<&{to_read} 4>&{back_write}'
    with subprocess.Popen(
        ["bash", "-c", command, path, "--headless=new", "--no-sandbox", "--disable-gpu",
         "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
         "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(to_read, back_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        os.close(to_read)
        os.close(back_write)
        with os.fdopen(to_write, "wb") as to, os.fdopen(back_read, "rb") as back:
            try:
                yield Page(to, back)
            finally:
                process.kill()
