"""The page in headless Chromium at three widths: sound plays, nothing foreign is fetched, the console stays empty."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.api.live import live_api
from tests.fakes.any_model import ACTIONS, PIXELS, everything, png
from tests.fakes.any_model import SPEC as ANY
from tests.fakes.conductor import echo, speak
from tests.fakes.omni_model import SPEC as OMNI
from tests.fakes.speech_model import SPEC as SPEECH
from tests.web.conftest import OpenTab
from tests.web.devtools import Tab

pytestmark = pytest.mark.browser

WIDTHS = (1280, 820, 390)

LISTEN = """
window.heard = {blocks: 0, sum: 0};
const connect = AudioNode.prototype.connect;
AudioNode.prototype.connect = function (target, ...rest) {
  if (target instanceof AudioDestinationNode) {
    const meter = this.context.createAnalyser();
    meter.fftSize = 32768;
    connect.call(this, meter);
    const block = new Float32Array(meter.fftSize);
    const listen = () => {
      meter.getFloatTimeDomainData(block);
      const level = block.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
      if (level) { heard.blocks += 1; heard.sum += level; }
      if (this.context.state !== 'closed') setTimeout(listen, 20);
    };
    listen();
  }
  return connect.call(this, target, ...rest);
};
"""
"""Counts readings with sound at every node that is connected to the destination of an audio context.

A reading covers the last second and more, so a page that is late for a few readings misses no sound.
"""


def check_quiet(tab: Tab, url: str) -> None:
    """Check that the page fetched only from its own origin and wrote nothing to the console."""
    tab.value("1")  # reads the events so far
    origins = {
        f"{urlsplit(each).scheme}://{urlsplit(each).netloc}"
        for each in tab.requests
        if not each.startswith(("blob:", "data:"))
    }
    assert origins == {url}, tab.requests
    assert tab.problems == []


def check_fits(tab: Tab) -> None:
    """Check that nothing is wider than the window."""
    assert tab.value("document.documentElement.scrollWidth <= innerWidth"), tab.value(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.tagName + '.' + e.className).slice(0, 9).join()"
    )


def open_page(tab: Tab, url: str) -> None:
    """Open the page and wait until its surfaces are shown."""
    tab.open(f"{url}/")
    tab.until("document.body.dataset.ready === '1'")


@pytest.mark.parametrize("width", WIDTHS)
def test_speech_plays_while_it_arrives(width: int, tab: OpenTab) -> None:
    with live_api(speak(12), SPEECH) as api:
        page = tab(width)
        page.before_load(LISTEN)
        open_page(page, api.url)
        page.click("form button.primary")
        page.until("document.querySelector('form').dataset.over === '1'")
        assert page.until("heard.blocks > 0")
        assert page.value("Number(document.querySelector('form').dataset.played)") == 12 * 2048
        text = page.value("document.body.innerText")
        assert "Download WAV" in text
        assert "curl -N" in text and '"input"' in text
        check_fits(page)
        # The fakes have no supervisor, so these two routes refuse; the browser reports each refusal.
        page.problems = [each for each in page.problems if "/console/" not in each]
        check_quiet(page, api.url)


def test_keyboard_alone_speaks(tab: OpenTab) -> None:
    with live_api(speak(4), SPEECH) as api:
        page = tab(1280)
        open_page(page, api.url)
        for _ in range(12):
            page.press("Tab")
            if page.value("document.activeElement.tagName") == "TEXTAREA":
                break
        page.type(" More words.")
        page.press("Tab")
        assert page.value("document.activeElement.tagName") == "SELECT"
        for _ in range(6):
            page.press("Tab")
            if page.value("document.activeElement.textContent") == "Speak":
                break
        page.press("Enter")
        page.until("document.querySelector('form').dataset.over === '1'")
        assert page.until("document.querySelector('#recent').innerText.includes('finished')")


def test_the_key_is_asked_for_and_stays_in_memory(tab: OpenTab) -> None:
    with live_api(speak(2), SPEECH, api_keys=("right",)) as api:
        page = tab(820)
        page.open(f"{api.url}/")
        page.until("document.querySelector('#key-dialog').open")
        page.type("wrong")
        page.press("Enter")
        page.until("document.querySelector('#key-dialog').open && !document.querySelector('#key-error').hidden")
        page.type("right")
        page.press("Enter")
        page.until("document.body.dataset.ready === '1'")
        kept = page.value("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
        assert "right" not in kept
        assert not any("right" in each for each in page.requests)
        open_again = tab(820)
        open_again.open(f"{api.url}/")
        open_again.until("document.querySelector('#key-dialog').open")


def test_a_failure_is_shown_as_text(tab: OpenTab) -> None:
    with live_api(speak(1), SPEECH) as api:
        page = tab(390)
        open_page(page, api.url)
        page.value("document.querySelector('textarea').value = 'raise'")
        page.click("form button.primary")
        page.until("document.querySelector('form > .error').textContent.length > 5")
        assert page.value("document.querySelector('button.primary').disabled") is False


def button(tab: Tab, text: str) -> None:
    """Press a shown button by its text."""
    tab.value(
        f"[...document.querySelectorAll('button')].find(e => e.offsetParent && e.textContent === {text!r}).click()"
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_chat_streams_text_and_plays_speech(width: int, tab: OpenTab) -> None:
    with live_api(echo, OMNI) as api:
        page = tab(width)
        page.before_load(LISTEN)
        open_page(page, api.url)
        page.click("#chat-speaks")
        page.click("textarea")
        page.type("<i>hi</i>")
        page.press("Enter")
        page.until("document.querySelector('.turn.assistant')?.dataset.over === '1'")
        assert page.until("heard.blocks > 0")
        page.until("document.querySelector('.turn.assistant audio')?.duration > 0")
        said = page.value("document.querySelector('.turn.assistant .words').textContent")
        assert "<i>hi</i>" in said
        assert page.value("document.querySelectorAll('.turn i').length") == 0
        check_fits(page)
        page.problems = [each for each in page.problems if "/console/" not in each]
        check_quiet(page, api.url)


@pytest.mark.parametrize("width", WIDTHS)
def test_an_image_is_made_and_shown(width: int, tab: OpenTab) -> None:
    with live_api(echo, OMNI) as api:
        page = tab(width)
        open_page(page, api.url)
        page.click("#tab-0")
        for _ in range(3):
            page.press("ArrowRight")
        assert page.value("document.activeElement.textContent") == "Images"
        button(page, "Make")
        page.until("document.querySelector('img.picture:not(.partial)')?.naturalWidth > 0")
        assert "client.images.generate" in page.value(
            "([...document.querySelectorAll('button')].find(e => e.textContent === 'OpenAI').click(),"
            " document.querySelector('.snippet pre').textContent)"
        )
        check_fits(page)


@pytest.mark.parametrize("width", WIDTHS)
def test_actions_are_plotted_by_dimension(width: int, tab: OpenTab, tmp_path: Path) -> None:
    camera = tmp_path / "camera.png"
    camera.write_bytes(png(PIXELS))
    with live_api(everything, ANY, unknown_params="warn") as api:
        page = tab(width)
        open_page(page, api.url)
        page.value("[...document.querySelectorAll('[role=tab]')].find(e => e.textContent === 'Robot').click()")
        page.upload("[role=tabpanel]:not([hidden]) input[type=file]", camera)
        page.until("document.querySelectorAll('.thumb img').length === 1")
        button(page, "Act")
        page.until("document.querySelectorAll('svg.plot').length > 0")
        assert page.value("document.querySelectorAll('svg.plot').length") == ACTIONS.shape[-1]
        check_fits(page)


@pytest.mark.parametrize("width", WIDTHS)
def test_docs_group_the_routes_and_send_requests(width: int, tab: OpenTab) -> None:
    with live_api(speak(2), SPEECH) as api:
        page = tab(width)
        page.open(f"{api.url}/docs")
        page.until("document.body.dataset.ready === '1'")
        text = page.value("document.body.innerText")
        for word in ("OpenAI-compatible routes", "/v1/audio/speech", "Deployment", "Types"):
            assert word in text
        page.value("document.querySelector('details.card').open = true")
        page.click("details.card[open] form button.primary")
        page.until("document.querySelector('details.card audio')?.duration > 0")
        words = page.value("document.querySelector('main').textContent")
        assert "/openapi.json" in page.value("document.querySelector('.links').innerHTML")
        assert ".The" not in words
        check_fits(page)
        check_quiet(page, api.url)
