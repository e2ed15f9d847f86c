"""Drives headless Chromium over the DevTools protocol: navigation, trusted input, evaluation, screenshots."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

LIMIT_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--hide-scrollbars",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--force-color-profile=srgb",
    "--lang=en-US",
)

KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, " ": 32}


def find_chromium() -> str | None:
    """Return the path of Chromium: MSTAR_CHROMIUM, or the first known name on the path."""
    given = os.environ.get("MSTAR_CHROMIUM")
    return given or next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def chromium(binary: str, folder: Path, microphone: Path | None = None) -> Iterator[str]:
    """Run Chromium with a fresh profile. Yields the address of its DevTools socket.

    microphone: WAV file that its microphone repeats; None for short tones.
    """
    profile = folder / "profile"
    flags = [*FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    flags += [] if microphone is None else [f"--use-file-for-fake-audio-capture={microphone}"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen([binary, *flags, "about:blank"], stdout=log, stderr=log)
        try:
            yield _address(process, profile / "DevToolsActivePort", folder / "chromium.log")
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], file: Path, log: Path) -> str:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise RuntimeError(f"Chromium did not start:\n{log.read_text()[-2000:]}")


class Tab:
    """One page of the browser. requests: URLs that it fetched. problems: console errors and uncaught exceptions."""

    def __init__(self, address: str, width: int, height: int = 900, *, is_dark: bool = False) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._ids = itertools.count(1)
        self._stack = ExitStack()
        limits = {"open_timeout": LIMIT_S, "ping_timeout": None}
        opened = connect(address, max_size=1 << 28, compression=None, proxy=None, **limits)
        self._socket: ClientConnection = self._stack.enter_context(opened)
        self._session: str | None = None
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._target = target
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def close(self) -> None:
        """Close the page and the connection."""
        self.call("Page.close")
        self._stack.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises RuntimeError."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            found = json.loads(self._socket.recv(timeout=LIMIT_S))
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result
            self._note(found)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str([arg.get("value") for arg in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def before_load(self, script: str) -> None:
        """Run a script in each new document, before its own."""
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of an expression; a promise is awaited. Raises RuntimeError for an exception."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", "failed"))
        return found["result"].get("value")

    def until(self, expression: str, limit_s: float = LIMIT_S) -> Any:
        """Wait until an expression is true and return its value. Raises TimeoutError."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            found = self.value(f"(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()")
            if found:
                return found
            time.sleep(0.05)
        raise TimeoutError(f"{expression}; console: {self.problems}; page: {self.value('document.body.innerText')}")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key as a user would."""
        text = {"Enter": "\r", " ": " "}.get(key)
        given = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def type(self, text: str) -> None:
        """Type text into the focused control."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click the middle of an element as a user would."""
        box = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def upload(self, selector: str, *files: Path) -> None:
        """Choose files in an input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def picture(self, path: Path) -> None:
        """Write a screenshot of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
