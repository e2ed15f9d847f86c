"""The page of a real deployment: voices, Stop, graph, waterfall, snippets that run, and the limit of live views."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from mstar_core.api.routes.console import MAX_VIEWS
from tests.fakes.ports import free_port
from tests.web.conftest import OpenTab
from tests.web.test_page import button, check_fits, check_quiet, open_page

pytest.importorskip("mstar_orpheus")
pytestmark = pytest.mark.browser

START_S = 250.0
ROOT = Path(__file__).parents[2]
SNIPPET = "document.querySelector('.snippet pre').textContent"


@pytest.fixture(scope="module")
def deployment(browser: str) -> Iterator[str]:
    """The address of a running orpheus:tiny."""
    folder = Path(tempfile.mkdtemp(prefix="mstar-web-"))  # sockets need a short path
    port = free_port()
    sources = [str(ROOT), *(str(path) for path in ROOT.glob("plugins/*/src")), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "MSTAR_RUNTIME_DIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sources))}
    mstarctl = [sys.executable, "-m", "mstarctl"]
    up = [*mstarctl, "up", "orpheus:tiny", "-d", "--wait", "--host", "127.0.0.1", "--port", str(port)]
    try:
        started = subprocess.run(up, env=env, capture_output=True, text=True, timeout=START_S, check=False)
        assert started.returncode == 0, started.stdout + started.stderr
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([*mstarctl, "down", "orpheus"], env=env, capture_output=True, timeout=START_S, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def test_speech_with_a_voice_graph_waterfall_and_stop(deployment: str, tab: OpenTab) -> None:
    page = tab(1280)
    open_page(page, deployment)
    assert page.value("document.querySelectorAll('[role=tabpanel]:not([hidden]) .voice option').length") == 8
    page.value("document.querySelector('form .voice select').value = 'leo'")
    page.click("form button.primary")
    page.until("document.querySelector('#graph .box.busy') !== null")
    page.until("Number(document.querySelector('form').dataset.played) > 0")
    button(page, "Stop")
    page.until("document.querySelector('form > .error').textContent === 'Stopped.'")
    page.until("document.querySelector('#recent').innerText.includes('cancelled')")
    assert '"voice": "leo"' in page.value(SNIPPET)
    assert "Download WAV" in page.value("document.querySelector('form').innerText")
    page.until("document.body.innerText.includes('waits for input')")
    assert "snac_decoder" in page.value("document.querySelector('#after').innerText")
    assert " = prepare " in page.value("document.querySelector('#after').innerText"), "the parts of its time"
    check_fits(page)
    check_quiet(page, deployment)


@pytest.mark.parametrize(
    "language, file", [("curl", "speech.wav"), ("Python", "speech.wav"), ("mstarctl", "speech.wav")]
)
def test_snippets_run(language: str, file: str, deployment: str, tab: OpenTab, tmp_path: Path) -> None:
    """Only the length of the sound is changed."""
    page = tab(820)
    open_page(page, deployment)
    page.value('document.querySelector(\'form textarea\').value = "It\'s a \\"test\\" $HOME."')
    page.click("form button.primary")
    page.until("Number(document.querySelector('form').dataset.played) > 0")
    button(page, "Stop")
    button(page, language)
    code = page.value(SNIPPET).replace('"voice":', '"max_output_tokens": 60, "voice":')
    code = code.replace(" voice=", " max_output_tokens=60, voice=")
    assert "max_output_tokens" in code
    command = ["bash", "-c", code] if language == "curl" else [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=START_S, check=False)
    assert ran.returncode == 0, f"{code}\n{ran.stderr}"
    assert (tmp_path / file).read_bytes()[:4] == b"RIFF"
    assert (tmp_path / file).stat().st_size > 1000
    check_quiet(page, deployment)


def test_one_more_live_view_than_allowed_is_refused(deployment: str) -> None:
    with ExitStack() as stack, httpx.Client(base_url=deployment, timeout=60) as client:
        kept = []  # an iterator that is dropped closes its connection
        for _ in range(MAX_VIEWS):
            answer = stack.enter_context(client.stream("GET", "/console/live"))
            assert answer.status_code == 200
            kept.append(answer.iter_lines())
            assert next(kept[-1]).startswith("data: ")
        refused = client.get("/console/live")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
