"""A WebRTC call of Chromium with a sound file as microphone, by the code of docs/realtime.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api.live import live_api
from tests.api.realtime.test_realtime_calls import tone
from tests.fakes.omni_model import SPEC
from tests.web.conftest import OpenTab
from tests.web.test_page import open_page

PAGE = Path(__file__).parents[2] / "docs/realtime.md"
KEEP = "window.kinds = []; window.heard = 0;"
WATCH = """
window.peer = peer;
setInterval(async () => {
  for (const report of (await peer.getStats()).values())
    if (report.type === "inbound-rtp" && report.kind === "audio") window.heard = report.totalAudioEnergy;
}, 100);
"""
"""Notes the energy of the sound that the browser has heard."""


@pytest.mark.browser
def test_the_code_of_the_docs_makes_a_call_in_a_browser(tab: OpenTab) -> None:
    (code,) = re.findall(r"```js\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = code.replace("console.log(", "kinds.push(") + WATCH
    with live_api(tone, SPEC) as api:
        page = tab()
        open_page(page, api.url)
        page.value(f"{KEEP} (async () => {{ {script} }})()")
        page.until("kinds.includes('input_audio_buffer.speech_started')")
        page.until("kinds.includes('output_audio_buffer.started')")
        page.until("heard > 0")
        assert "error" not in page.value("kinds")
