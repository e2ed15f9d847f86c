"""The page as a playground: Markdown, editing, history, galleries, and simulated worlds, in headless Chromium."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from mstar_core.messages.requests import NewRequest
from mstar_core.plugin import Action, Image, ModelSpec, TensorData, Text, Video, param
from tests.api.live import live_api
from tests.fakes.any_model import SPEC as ANY
from tests.fakes.conductor import FakeDeployment, echo, say, speak
from tests.fakes.omni_model import SPEC as OMNI
from tests.fakes.speech_model import SPEC as SPEECH
from tests.web.conftest import OpenTab
from tests.web.devtools import Tab
from tests.web.test_page import button, check_fits, open_page

pytestmark = pytest.mark.browser

ANSWERED = "!document.querySelector('[aria-busy]') && document.querySelectorAll('.turn.assistant').length"
KEPT = "document.querySelectorAll('#recent button').length"


def send(page: Tab, text: str) -> None:
    """Send a message and wait for the end of its answer."""
    count = page.value("document.querySelectorAll('.turn.assistant').length")
    page.value(f"(e => {{ e.value = {text!r}; }})(document.querySelector('.composer textarea'))")
    button(page, "Send")
    page.until(f"({ANSWERED}) === {count + 1}")
    page.until("!document.querySelector('.composer .primary').disabled")


def turns(page: Tab) -> list[str]:
    """Return the texts of the conversation."""
    found: list[str] = page.value("[...document.querySelectorAll('.turn .words')].map(e => e.textContent)")
    return found


def test_answers_are_markdown_and_never_markup(tab: OpenTab) -> None:
    text = b"# Head\n**bold** <b id=evil>x</b>\n\n- one\n- two\n\n```\ncode\n```\n[a](javascript:alert(1))"
    with live_api(say(text), OMNI) as api:
        page = tab(820)
        open_page(page, api.url)
        send(page, "hi")
        tags = page.value("[...document.querySelectorAll('.turn.assistant .words *')].map(e => e.tagName).join()")
        assert tags == "H3,P,STRONG,UL,LI,LI,PRE,CODE,P"
        assert page.value("document.querySelector('#evil')") is None
        assert "<b id=evil>x</b>" in page.value("document.querySelector('.turn.assistant').textContent")
        check_fits(page)


def test_messages_are_edited_answered_again_and_survive_a_reload(tab: OpenTab) -> None:
    with live_api(echo, OMNI) as api:
        page = tab(1280)
        open_page(page, api.url)
        send(page, "first")
        send(page, "second")
        page.value("document.querySelectorAll('.turn.user')[1].querySelectorAll('.actions button')[1].click()")
        page.value("(e => { e.value = 'changed'; })(document.querySelector('.turn textarea'))")
        button(page, "Send again")
        page.until("document.querySelectorAll('.turn').length === 4 && !document.querySelector('[aria-busy]')")
        page.until("!document.querySelector('.composer .primary').disabled")
        assert turns(page)[2] == "changed" and "second" not in "".join(turns(page))
        assert "changed" in turns(page)[3]
        button(page, "Regenerate")  # of the first answer: the turns after it are removed
        page.until(f"({ANSWERED}) === 1")
        page.until("!document.querySelector('.composer .primary').disabled")
        kept = turns(page)
        assert len(kept) == 2 and kept[0] == "first"
        until_kept(page, "items.find(each => each.messages)?.messages.length === 2")
        until_kept(page, "items.filter(each => each.request).length === 4")
        open_page(page, api.url)
        page.until("document.querySelectorAll('.turn').length === 2")
        assert turns(page) == kept
        page.until(f"{KEPT} === 4")
        button(page, "Clear history")
        page.until("document.querySelectorAll('.turn').length === 0")
        open_page(page, api.url)
        page.until("document.querySelector('#recent').textContent.includes('None yet')")
        assert turns(page) == []


def test_the_system_prompt_and_the_parameters_are_sent(tab: OpenTab) -> None:
    with live_api(echo, OMNI) as api:
        page = tab(820)
        open_page(page, api.url)
        page.value("document.querySelectorAll('details.more').forEach(e => { e.open = true; })")
        page.value("(e => { e.value = 'Be brief.'; })(document.querySelector('.folds textarea'))")
        for name, value in (("seed", 7), ("temperature", 0), ("top p", 0.5)):
            page.value(
                "[...document.querySelectorAll('.chat label')]"
                f".find(e => e.textContent === {name!r}).control.value = {value}"
            )
        send(page, "hi")
        code = page.value("document.querySelector('.snippet pre').textContent")
        for part in ('"role": "system"', '"Be brief."', '"seed": 7', '"temperature": 0', '"top_p": 0.5'):
            assert part in code
        assert "seed 7" in page.value("document.querySelector('#after').innerText")


def test_with_a_key_nothing_is_written_unless_it_is_chosen(tab: OpenTab) -> None:
    with live_api(echo, OMNI, api_keys=("secret-key",)) as api:
        page = tab(820)
        for is_chosen in (False, True):
            page.open(f"{api.url}/")
            page.until("document.querySelector('#key-dialog').open")
            page.type("secret-key")
            page.press("Enter")
            page.until("document.body.dataset.ready === '1'")
            assert page.value("document.querySelector('#keep').checked") is is_chosen
            send(page, "private")
            if is_chosen:
                until_kept(page, "JSON.stringify(items).includes('private')")
            stored = page.value(STORED)
            assert ("private" in stored) is is_chosen
            assert "secret-key" not in stored
            page.value("document.querySelector('#keep').checked || document.querySelector('#keep').click()")


STORED = """(async () => {
  const database = await new Promise((resolve, reject) => {
    const request = indexedDB.open('mstarctl', 1);
    request.onupgradeneeded = () => request.result.createObjectStore('items', { keyPath: ['shelf', 'id'] });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const all = await new Promise((resolve) => {
    const request = database.transaction('items').objectStore('items').getAll();
    request.onsuccess = () => resolve(request.result);
  });
  database.close();
  return JSON.stringify([all, { ...localStorage }]);
})()"""
"""Everything that the page has written to the browser."""


def until_kept(page: Tab, condition: str) -> None:
    """Wait until the page has written what it reads after a reload. condition: of `items`, those of all shelves."""
    page.until(f"{STORED}.then((text) => (([items]) => {condition})(JSON.parse(text)))")


def test_sounds_are_kept_with_text_and_seed_and_repeat_the_request(tab: OpenTab) -> None:
    with live_api(speak(12), SPEECH) as api:
        page = tab(390)
        open_page(page, api.url)
        page.value("document.querySelector('form textarea').value = 'One two three.'")
        page.click("form button.primary")
        page.until("document.querySelector('.take audio')?.duration > 0")
        until_kept(page, "items.some(each => each.text === 'One two three.')")
        open_page(page, api.url)
        page.until("document.querySelector('.take audio')?.duration > 0")
        facts = page.value("document.querySelector('.take').innerText")
        assert "One two three." in facts and "seed " in facts
        page.value("document.querySelector('form textarea').value = ''")
        button(page, "Use text and seed")
        assert page.value("document.querySelector('form textarea').value") == "One two three."
        seed = page.value("[...document.querySelectorAll('label')].find(e => e.textContent === 'seed').control.value")
        assert f"seed {seed}" in facts
        check_fits(page)


def test_two_pictures_are_compared(tab: OpenTab) -> None:
    with live_api(echo, OMNI) as api:
        page = tab(820)
        open_page(page, api.url)
        page.value("[...document.querySelectorAll('[role=tab]')].find(e => e.textContent === 'Images').click()")
        for count in (1, 2):
            button(page, "Make")
            page.until(f"document.querySelectorAll('.strip .thumb').length === {count}")
        page.value("document.querySelectorAll('.strip .thumb').forEach(e => e.click())")
        page.until("document.querySelectorAll('.compare img').length === 2")
        page.value(
            "(e => { e.value = 30; e.dispatchEvent(new Event('input')); })(document.querySelector('.compare + input'))"
        )
        assert "30%" in page.value("document.querySelectorAll('.compare img')[1].style.clipPath")
        page.value("document.querySelector('.strip .thumb').click()")
        assert page.value("document.querySelectorAll('.compare').length") == 0
        check_fits(page)


# -- simulated worlds --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldParams:
    task: str | None = param(None, "what to do", choices=("encode", "rollout", "plan"))
    actions: object = param(None, "numbers")
    states: object = param(None, "numbers")
    returns: tuple[str, ...] | None = param(None, "outputs")
    samples: int = param(400, "candidates", ge=2)
    topk: int = param(10, "best candidates", ge=2)
    cem_steps: int = param(10, "planning steps", ge=1)
    horizon: int | None = param(None, "moves", ge=1)
    maxnorm: float = param(0.05, "metres", gt=0)
    axis: object = param(None, "fixed values")
    robot_state: tuple[float, ...] | None = param(None, "joint values")
    max_output_tokens: int = param(100, "ids", ge=1)
    seed: int | None = param(None, "seed", ge=0)


def miniature(world: str, **changes: object) -> ModelSpec:
    """Return a model whose miniature lives in a simulated world."""
    return dataclasses.replace(ANY, params=WorldParams, routes=frozenset(), mini_world=world, **changes)  # type: ignore[arg-type]


BLOCK = miniature("block", inputs=(Image(), Video(max_frames=3), TensorData()), outputs=(TensorData(),))
ARM = miniature("arm", inputs=(Image(), Text()), outputs=(Action(),))


def plan(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: two moves of 5 cm along x."""
    moves = np.zeros((2, 7), dtype=np.float32)
    moves[:, 0] = 0.05
    fake.output(request.handle, "tensor", moves, port="actions")
    fake.output(request.handle, "tensor", np.array([0.25], dtype=np.float32), port="best_energy")
    fake.finish(request.handle)


def slide(page: Tab, name: str, value: float) -> None:
    """Move a slider of the table."""
    page.value(
        f"(e => {{ e.value = {value}; e.dispatchEvent(new Event('input')); }})"
        f"([...document.querySelectorAll('.simulated label')].find(e => e.textContent === {name!r}).control)"
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_the_block_moves_as_planned(width: int, tab: OpenTab) -> None:
    with live_api(plan, BLOCK, weights_source="mini") as api:
        page = tab(width)
        open_page(page, api.url)
        for name, value in (("block x", -0.05), ("block y", 0), ("goal x", 0.05), ("goal y", 0)):
            slide(page, name, value)
        assert "10.0 cm" in page.value("document.querySelector('form .figures').innerText")
        button(page, "Plan and move")
        page.until("document.querySelector('form p[role=status]').textContent.includes('at the goal after 2 moves')")
        shown = page.value("document.querySelector('form .figures').innerText")
        assert "0.0 cm" in shown and "0.2500" in shown
        assert page.value("document.querySelectorAll('.stage .stop').length") == 3
        code = page.value("document.querySelector('.snippet pre').textContent")
        assert "files=@now.png" in code and "files=@goal.png" in code and '"task":"plan"' in code
        check_fits(page)


def test_a_sample_clip_has_as_many_frames_as_the_model_takes(tab: OpenTab) -> None:
    with live_api(plan, BLOCK, weights_source="mini") as api:
        page = tab(1280)
        open_page(page, api.url)
        page.value(
            "(e => { e.value = 'Features of the clip'; e.dispatchEvent(new Event('change')); })"
            "(document.querySelector('.card select'))"
        )
        button(page, "Sample clip")
        page.until("document.querySelectorAll('.thumb img').length === 3")
        assert page.value("document.querySelector('form:not([hidden]) input[type=number]').max") == "3"


def stretch(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: ten small movements of both joints."""
    fake.output(request.handle, "action", np.full((10, 2), 0.01, dtype=np.float32), port="actions")
    fake.finish(request.handle)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_arm_moves_in_a_closed_loop(width: int, tab: OpenTab) -> None:
    with live_api(stretch, ARM, weights_source="mini") as api:
        page = tab(width)
        open_page(page, api.url)
        before = page.value("document.querySelector('svg.scene .tip').getAttribute('cx')")
        page.value(
            "[...document.querySelectorAll('label')].find(e => e.textContent === 'Period, ms').control.value = 200"
        )
        button(page, "Run")
        page.until("Number(document.querySelectorAll('form .figures dd')[2].textContent) >= 2")
        button(page, "Stop")
        page.until("!document.querySelector('form .primary').disabled")
        assert page.value("document.querySelector('svg.scene .tip').getAttribute('cx')") != before
        assert page.value("document.querySelectorAll('form svg.plot').length") == 2
        code = page.value("document.querySelector('.snippet pre').textContent")
        for part in (
            "files=@above.png",
            "files=@tip.png",
            "files=@turned.png",
            '"period_ms":200',
            "reach the red target",
        ):
            assert part in code
        check_fits(page)


def test_the_page_works_where_the_browser_blocks_storage(tab: OpenTab) -> None:
    with live_api(echo, OMNI) as api:
        page = tab(820)
        page.before_load(
            "for (const name of ['localStorage', 'indexedDB']) Object.defineProperty(window, name,"
            " { get() { throw new DOMException('blocked', 'SecurityError'); } });"
        )
        open_page(page, api.url)
        send(page, "hi")
        assert page.value("document.querySelector('#keep').checked") is False
        button(page, "Clear history")
        page.until("document.querySelectorAll('.turn').length === 0")
        assert [each for each in page.problems if "/console/" not in each] == []
