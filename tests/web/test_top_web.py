"""`mstarctl top --web` in headless Chromium: keys work, nothing foreign is fetched, and no key writes a file."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fakes.ports import free_port
from tests.web.conftest import OpenTab
from tests.web.devtools import Tab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        importlib.util.find_spec("textual_serve") is None,
        reason="runs where the extra `web` is installed: textual-serve",
    ),
]

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests" / "top" / "recordings" / "orpheus.mstar.gz"
START_S = 200.0

LISTEN = """
window.received = '';
const Plain = WebSocket;
window.WebSocket = class extends Plain {
  constructor(...given) {
    super(...given);
    this.addEventListener('message', async ({ data }) => {
      if (data.arrayBuffer) data = await data.arrayBuffer();
      received += typeof data === 'string' ? data : new TextDecoder().decode(data);
    });
  }
};
"""
"""Keeps what the terminal receives: it draws on a canvas, which has no text."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a served replay, and the folder that its `top` would write files into."""
    folder = tmp_path_factory.mktemp("top")
    port = free_port()
    command = [sys.executable, "-m", "mstarctl", "top", "--replay", str(RECORDING), "--web", str(port)]
    known = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (folder.parent / "top.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": known})
        try:
            _wait(f"http://127.0.0.1:{port}/", process)
            yield f"http://127.0.0.1:{port}", folder
        finally:
            process.terminate()
            process.wait(START_S)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            httpx.get(url, timeout=START_S)
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"top --web ended with {process.poll()}")


def key(tab: Tab, letter: str) -> None:
    """Press a printable key."""
    code = ord(letter.upper())
    tab.call("Input.dispatchKeyEvent", type="keyDown", key=letter, text=letter, windowsVirtualKeyCode=code)
    tab.call("Input.dispatchKeyEvent", type="keyUp", key=letter, windowsVirtualKeyCode=code)


def test_keys_change_the_screen_and_write_no_files(served: tuple[str, Path], tab: OpenTab, tmp_path: Path) -> None:
    url, folder = served
    page = tab(1280)
    page.before_load(LISTEN)
    page.open(url.replace("127.0.0.1", "localhost") + "/")
    page.until("document.body.classList.contains('-first-byte') && received.includes('snac_decoder')")
    page.until("document.querySelector('#terminal canvas') !== null")
    first = tmp_path / "first.png"
    page.picture(first)
    page.until("document.activeElement.className.includes('xterm-helper')")
    for letter in "erp":
        key(page, letter)
    page.value("received = ''")
    key(page, "2")
    page.until("received.includes('at a time')")
    key(page, "?")
    page.until("received.includes('active keys')")
    page.until("received.includes('the graph screen')")
    assert page.value("received.includes('write the table') || received.includes('stop a recording')") is False
    second = tmp_path / "second.png"
    page.picture(second)
    assert first.read_bytes() != second.read_bytes()
    assert list(folder.iterdir()) == []
    fetched = {urlsplit(each).netloc for each in page.requests if not each.startswith(("data:", "blob:"))}
    assert fetched <= {urlsplit(url).netloc, urlsplit(url).netloc.replace("127.0.0.1", "localhost")}, fetched
    assert [each for each in page.problems if "WebGL" not in each] == []  # without a GPU Chromium warns of its own


def test_the_policy_permits_only_the_pages_own_scripts(served: tuple[str, Path], tab: OpenTab) -> None:
    url, _ = served
    policy = httpx.get(f"{url}/", timeout=START_S).headers["content-security-policy"]
    scripts = policy.partition("script-src")[2].partition(";")[0]
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in scripts and "'unsafe-eval'" not in scripts and "http" not in policy
    page = tab(820)
    page.open(f"{url}/")
    page.until("document.body.classList.contains('-first-byte')")
    page.value(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        " document.head.append(s); })()"
    )
    assert page.value("window.ran") is None
    assert httpx.get(f"{url}/", headers={"Host": "evil.example"}, timeout=START_S).status_code == 403
    assert httpx.get(f"{url}/ws", headers={"Origin": "https://evil.example"}, timeout=START_S).status_code == 403
