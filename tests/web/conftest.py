"""Headless Chromium and tabs of it for tests of the web pages, and a runner of their modules without a page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import mstar_core.api.console
from mstar_core.api.realtime.sound.resampling import resampled_whole
from tests.api.live import live_api
from tests.fakes.conductor import speak
from tests.fakes.speech_model import SPEC as SPEECH
from tests.web.devtools import Tab, chromium, find_chromium

OpenTab = Callable[..., Tab]
RATE = 24_000
WORD = Path(__file__).parents[2] / "plugins/mstar-qwen3omni/src/mstar_qwen3omni/checkpoint/mini/seven.wav"
STATIC = Path(mstar_core.api.console.__file__).parent / "static"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The DevTools address of a running Chromium. Skips without one, fails in `make test-web`."""
    binary = find_chromium()
    if binary is None:
        why = "runs where Chromium is installed (Debian: apt-get install chromium); MSTAR_CHROMIUM can name it"
        if os.environ.get("MSTAR_NEED_BROWSER"):
            pytest.fail(why)
        pytest.skip(why)
    folder = Path(tmp_path_factory.mktemp("chromium"))
    microphone = folder / "microphone.wav"
    soundfile.write(microphone, spoken(), RATE, subtype="PCM_16")
    with chromium(binary, folder, microphone) as address:
        yield address


def spoken() -> np.ndarray:
    """Return the sound that the microphone repeats: the spoken word `seven` between silences."""
    samples, rate = soundfile.read(WORD, dtype="int16")
    word = resampled_whole(samples, rate, RATE)
    return np.concatenate([np.zeros(RATE, np.int16), word, np.zeros(2 * RATE, np.int16)])


@pytest.fixture
def tab(browser: str) -> Iterator[OpenTab]:
    """Open tabs of a width; all are closed after the test."""
    tabs: list[Tab] = []

    def make(width: int = 1280, *, is_dark: bool = False) -> Tab:
        tabs.append(Tab(browser, width, is_dark=is_dark))
        return tabs[-1]

    yield make
    for each in tabs:
        each.close()


RunModule = Callable[[str], Any]


@pytest.fixture
def run_module(tmp_path: Path, request: pytest.FixtureRequest) -> RunModule:
    """Run the body of an async function that imports modules of the page; return what it returns, as JSON carries it.

    Uses Node if it is installed, otherwise Chromium. Skips without both. `STATIC` in the code is the modules' address.
    """
    node = shutil.which("node")
    if node is None:
        page = request.getfixturevalue("tab")()

        def in_browser(code: str) -> Any:
            with live_api(speak(1), SPEECH) as api:
                page.open(f"{api.url}/")
                page.until("document.body.dataset.ready === '1'")
                return page.value(f"(async () => {{ const STATIC = '/assets'; {code} }})()")

        return in_browser

    def in_node(code: str) -> Any:
        program = tmp_path / "program.mjs"
        program.write_text(
            f"const STATIC = {json.dumps(STATIC.as_uri())};\n"
            f"const run = async () => {{ {code} }};\nconsole.log(JSON.stringify((await run()) ?? null));\n"
        )
        ran = subprocess.run([node, str(program)], capture_output=True, text=True, timeout=250, check=False)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    return in_node
