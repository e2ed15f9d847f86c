"""The Talk tab in headless Chromium with a sound file as microphone, and its modules that need no page."""

from __future__ import annotations

from typing import Any

import pytest
from websockets.sync.client import connect

from mstar_core.messages.requests import NewRequest
from tests.api.live import live_api
from tests.fakes.conductor import FakeDeployment, echo, speak
from tests.fakes.omni_model import RATE, SPEC
from tests.fakes.speech_model import SPEC as SPEECH
from tests.web.conftest import OpenTab, RunModule
from tests.web.devtools import Tab
from tests.web.test_page import LISTEN, WIDTHS, check_fits, check_quiet, open_page

browser = pytest.mark.browser

SOCKETS = """
window.sockets = [];
const Real = WebSocket;
window.WebSocket = class extends Real {
  constructor(...given) { super(...given); this.sent = []; sockets.push(this); }
  send(text) { this.sent.push(JSON.parse(text)); super.send(text); }
};
"""
"""Keeps the connections of the page with the events that it sent."""

WORDS = [f"word{number} " for number in range(60)]
STATE = "document.querySelector('.pill[role=status]:not(#state)').textContent"


class Speaker:
    """Script of a model that speaks for a long time, and transcribes each sound as `seven`."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, fake: FakeDeployment, request: NewRequest) -> None:
        if "audio" not in request.outputs:
            fake.text(request.handle, b"seven")
            fake.finish(request.handle)
            return
        self.prompts.append(fake.prompt(request))
        for word in WORDS:
            fake.text(request.handle, word.encode())
            fake.audio(request.handle, RATE // 2)
        fake.finish(request.handle)


def talk(tab: OpenTab, url: str, width: int = 1280) -> Tab:
    """Open the page at its Talk tab."""
    page = tab(width)
    page.before_load(LISTEN + SOCKETS)
    open_page(page, url)
    page.value("[...document.querySelectorAll('[role=tab]')].find(e => e.textContent === 'Talk').click()")
    return page


def write(page: Tab, text: str) -> None:
    """Send a written turn."""
    page.click("[role=tabpanel]:not([hidden]) .composer input")
    page.type(text)
    page.press("Enter")


def button(page: Tab, text: str) -> None:
    """Click a shown button as a user would: browsers begin sound only then."""
    shown = f"e => e.offsetParent && e.textContent === {text!r}"
    page.value(f"[...document.querySelectorAll('button')].find({shown}).id = 'wanted'")
    page.click("#wanted")
    page.value("document.querySelector('#wanted').removeAttribute('id')")


def words(page: Tab, role: str) -> list[str]:
    """Return the transcripts of a side."""
    found: list[str] = page.value(f"[...document.querySelectorAll('.turn.{role} .words')].map(e => e.textContent)")
    return found


def sent(page: Tab, kind: str) -> list[dict[str, Any]]:
    """Return the events of a type that the page has sent."""
    found: list[dict[str, Any]] = page.value(
        f"sockets.flatMap(each => each.sent).filter(each => each.type === {kind!r})"
    )
    return found


@browser
def test_speech_is_heard_answered_and_interrupts_the_answer(tab: OpenTab) -> None:
    model = Speaker()
    with live_api(model, SPEC) as api:
        page = talk(tab, api.url)
        button(page, "Microphone")
        page.until("document.querySelector('.turn.user .words')?.textContent === 'seven'")
        page.until("heard.blocks > 0")
        page.until(f"{STATE} === 'fake speaks'")
        page.until("document.querySelector('.turn.assistant .faint').textContent.startsWith('Interrupted after')")
        (cut,) = sent(page, "conversation.item.truncate")[:1]
        assert 0 < cut["audio_end_ms"] < 30_000
        page.until("document.querySelector('.turn.assistant .words').textContent.length < 400")
        page.until("document.querySelectorAll('.turn.assistant').length >= 2")
        spoken = words(page, "assistant")[0]
        assert "".join(WORDS).startswith(spoken)
        first, second = model.prompts[:2]
        assert int(first.partition("[audio ")[2].partition("]")[0]) > 3_000, "samples of 16 kHz"
        assert second.startswith(f"{first}{spoken.rstrip()}"), "the model knows what was heard"
        assert page.value("[...document.querySelectorAll('.figures dd')].some(e => Number(e.textContent) >= 1)")
        button(page, "Mute")
        assert page.value("document.querySelector('[aria-pressed=true]').textContent") == "Mute"
        page.problems = [each for each in page.problems if "/console/" not in each]
        check_quiet(page, api.url)
        button(page, "End")
        page.until(f"{STATE} === 'not connected'")
        assert page.value("document.activeElement.textContent") == "Microphone"


@browser
@pytest.mark.parametrize("width", WIDTHS)
def test_written_turns_go_on_after_a_lost_connection(width: int, tab: OpenTab) -> None:
    with live_api(echo, SPEC) as api:
        page = talk(tab, api.url, width)
        write(page, "<i>first</i>")
        page.until("heard.blocks > 0")
        page.until(f"{STATE} === 'ready'")
        assert words(page, "user") == ["<i>first</i>"]
        assert page.value("document.querySelectorAll('.turn i').length") == 0
        page.value("sockets.at(-1).close(3000)")
        page.until("sockets.length === 2 && sockets[1].readyState === 1")
        assert "resume=sess_" in page.value("sockets[1].url")
        write(page, "second")
        page.until("document.querySelectorAll('.turn.assistant').length === 2")
        page.until(f"{STATE} === 'ready'")
        first, second = words(page, "assistant")
        assert second == f"{first.removesuffix('<assistant>')}<assistant>{first}<user>second<assistant>"
        check_fits(page)


@browser
def test_a_held_button_makes_a_turn(tab: OpenTab) -> None:
    with live_api(echo, SPEC) as api:
        page = talk(tab, api.url)
        page.value(
            "(e => { e.value = 'none'; e.dispatchEvent(new Event('change', { bubbles: true })); })"
            "([...document.querySelectorAll('label')].find(e => e.textContent === 'My turn ends').control)"
        )
        button(page, "Microphone")
        page.until("document.activeElement.textContent === 'Hold to talk'")
        assert sent(page, "input_audio_buffer.append") == []
        page.press(" ")
        page.until("sockets[0].sent.filter(each => each.type === 'input_audio_buffer.append').length > 10")
        page.press(" ")
        page.until("document.querySelectorAll('.turn.assistant').length === 1")
        page.until(f"{STATE} === 'ready'")
        assert words(page, "assistant")[0].startswith("<user>[audio ")
        (update,) = sent(page, "session.update")
        assert update["session"]["audio"]["input"]["turn_detection"] is None


@browser
def test_a_model_that_only_speaks_reads_lines_and_refusals_are_shown(tab: OpenTab) -> None:
    with live_api(speak(4), SPEECH, api_keys=("right",), realtime_max_sessions=1) as api:
        page = tab(820)
        page.before_load(LISTEN + SOCKETS)
        page.open(f"{api.url}/")
        page.until("document.querySelector('#key-dialog').open")
        page.type("right")
        page.press("Enter")
        page.until("document.body.dataset.ready === '1'")
        page.value("document.querySelector('#tab-1').click()")
        assert page.value("document.querySelector('#panel-1 h2').textContent") == "Write, and hear it"
        shown = "[...document.querySelectorAll('#panel-1 button')].filter(e => e.offsetParent)"
        names = page.value(f"{shown}.map(e => e.textContent)")
        assert "Microphone" not in names and "Hold to talk" not in names
        address = f"{api.url.replace('http', 'ws')}/v1/realtime"
        with connect(address, additional_headers={"X-API-Key": "right"}, open_timeout=60) as other:
            other.recv()
            write(page, "Hello there.")
            page.until("document.querySelector('#panel-1 .error').textContent.includes('realtime sessions are open')")
        page.value("document.querySelector('#panel-1 .composer input').value = ''")
        page.until("sockets.at(-1).readyState === 3")
        write(page, "Hello again.")
        page.until("document.querySelector('.turn.assistant .words')?.textContent === 'Hello again.'")
        page.until("heard.blocks > 0")
        page.until("Number(document.querySelector('#panel-1 form').dataset.played) > 0")
        assert not any("right" in each for each in page.value("sockets.map(each => each.protocol + each.url)"))


# -- modules that need no page -----------------------------------------------------------------------------------------

CONVERSE = """
const { Conversation } = await import(`${STATIC}/surfaces/talk/conversation.js`);
const sent = [], lines = {}, queue = [];
const shown = {
  changed() {},
  failed: (text) => sent.push(['failed', text]),
  answered: (ms) => sent.push(['answered', ms]),
};
const turns = {
  turn() {},
  note: (id, role, text) => { lines[id + ' note'] = text; },
  grow: (id, role, text) => { lines[id] = (lines[id] || '') + text; },
  set: (id, role, text) => { lines[id] = text; },
};
const player = {
  push: (samples, id) => queue.push([id, samples.length]),
  clear: async () => { queue.length = 0; report?.(); },
};
let report = null, now = 0;
const send = (type, fields) => sent.push([type, fields]);
const talk = new Conversation({ send, player, turns, shown, clock: () => now });
const sound = (response_id, item_id, count) => {
  const delta = btoa('\\0'.repeat(2 * count));
  talk.handle({ type: 'response.output_audio.delta', response_id, item_id, delta });
};
"""


def test_an_interrupt_cuts_each_speech_where_it_was_played(run_module: RunModule) -> None:
    found = run_module(
        CONVERSE + "talk.handle({ type: 'response.created', response: { id: 'r' } });"
        "sound('r', 'a', 24000); sound('r', 'b', 24000);"
        "report = () => { talk.played('a', 24000); talk.played('b', 1212); };"
        "talk.handle({ type: 'input_audio_buffer.speech_started', item_id: 'u' });"
        "await null; sound('r', 'b', 24000); await new Promise((resolve) => setTimeout(resolve));"
        "talk.handle({ type: 'conversation.item.truncated', item_id: 'b', audio_end_ms: 50 });"
        "return [sent, queue, talk.interrupts, talk.isPlaying, lines];"
    )
    cut = {"item_id": "b", "content_index": 0, "audio_end_ms": 50}
    assert found[0] == [["conversation.item.truncate", cut], ["conversation.item.retrieve", {"item_id": "b"}]]
    assert found[1:4] == [[], 1, False]
    assert found[4] == {"u note": "Listening", "b note": "Interrupted after 0.1 s"}


def test_speech_over_silence_interrupts_nothing(run_module: RunModule) -> None:
    found = run_module(
        CONVERSE + "talk.handle({ type: 'response.created', response: { id: 'r' } }); sound('r', 'a', 100);"
        "talk.handle({ type: 'response.done', response: { id: 'r', status: 'completed', output: [] } });"
        "talk.played('a', 100);"
        "talk.handle({ type: 'input_audio_buffer.speech_started', item_id: 'u' }); await null;"
        "return [sent, talk.interrupts];"
    )
    assert found == [[], 0]


def test_a_written_turn_cancels_the_answer_and_measures_the_next(run_module: RunModule) -> None:
    found = run_module(
        CONVERSE + "talk.handle({ type: 'response.created', response: { id: 'r' } });"
        "await talk.say('no'); now = 70; sound('r', 'a', 10);"
        "talk.handle({ type: 'error', error: { code: 'response_cancel_not_active', message: 'over' } });"
        "talk.handle({ type: 'error', error: { code: 'other', message: 'why' } });"
        "talk.handle({ type: 'response.created', response: { id: 's' } }); sound('s', 'b', 10); sound('s', 'b', 10);"
        "return [sent, queue];"
    )
    kinds = [kind for kind, _ in found[0]]
    assert kinds == ["response.cancel", "conversation.item.create", "response.create", "failed", "answered"]
    assert found[0][0][1] == {"response_id": "r"} and found[0][3:] == [["failed", "why"], ["answered", 70]]
    assert found[1] == [["b", 10], ["b", 10]]


@pytest.mark.parametrize("rate", [24_000, 44_100, 48_000])
def test_a_lower_rate_keeps_length_and_level_over_pieces(rate: int, run_module: RunModule) -> None:
    found = run_module(
        "const { Downsampler } = await import(`${STATIC}/media/downsampler.js`);"
        f"const down = new Downsampler({rate}, 24000);"
        f"const wave = Float32Array.from({{ length: {rate} }}, (_, i) => Math.sin(2 * Math.PI * 440 * i / {rate}));"
        "const made = [];"
        "for (let i = 0; i < wave.length; i += 128) made.push(...down.push(wave.subarray(i, i + 128)));"
        "const crossings = made.filter((value, i) => i && value >= 0 && made[i - 1] < 0).length;"
        "return [made.length, Math.max(...made), crossings];"
    )
    assert abs(found[0] - 24_000) <= 1 and 0.98 < found[1] <= 1 and abs(found[2] - 440) <= 1
