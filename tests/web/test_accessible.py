"""The page for people without a mouse, with a screen reader, or with weak eyes: names, keyboard, contrast."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import mstar_core.api.console
from tests.api.live import live_api
from tests.fakes.any_model import SPEC as ANY
from tests.fakes.any_model import everything
from tests.fakes.conductor import echo, speak
from tests.fakes.omni_model import SPEC as OMNI
from tests.fakes.speech_model import SPEC as SPEECH
from tests.web.conftest import OpenTab
from tests.web.devtools import Tab

STYLE = Path(mstar_core.api.console.__file__).parent / "static" / "style" / "base.css"
TEXT, GRAPHIC = 4.5, 3.0
"""Least contrasts. Source: Web Content Accessibility Guidelines 2.2, criteria 1.4.3 and 1.4.11."""
CONTROLS = frozenset({"button", "textbox", "combobox", "checkbox", "spinbutton", "tab", "link", "slider", "searchbox"})
MODELS = {"speech": (speak(4), SPEECH), "omni": (echo, OMNI), "any": (everything, ANY)}


# -- contrast ----------------------------------------------------------------------------------------------------------


def colours(is_dark: bool) -> dict[str, str]:
    """Return the colours of the style sheet by name."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[0]))
    return found | (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[1])) if is_dark else {})


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(is_dark: bool) -> None:
    known = colours(is_dark)
    pairs = [
        *product(("text", "faint"), ("back", "card", "field", "code")),
        ("text", "warn"),
        ("text", "soft"),
        ("accent", "card"),
        ("accent", "back"),
        ("on-accent", "accent"),
        ("bad", "card"),
    ]
    low = {pair: found for pair in pairs if (found := contrast(*(known[name] for name in pair))) < TEXT}
    assert not low


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_lines_of_plots_stand_out(is_dark: bool) -> None:
    known = colours(is_dark)
    low = {
        name: found
        for name in known
        if re.fullmatch(r"c\d", name) and (found := contrast(known[name], known["card"])) < GRAPHIC
    }
    assert not low


# -- names and keyboard ------------------------------------------------------------------------------------------------


def controls(page: Tab) -> list[dict[str, Any]]:
    """Return the controls of the accessibility tree, as a screen reader has them."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    return [each for each in nodes if not each["ignored"] and each["role"]["value"] in CONTROLS]


def tabs(page: Tab) -> list[str]:
    found: list[str] = page.value("[...document.querySelectorAll('[role=tab]')].map(e => e.id)")
    return found


def open_page(tab: OpenTab, url: str) -> Tab:
    page = tab(1280)
    page.open(f"{url}/")
    page.until("document.body.dataset.ready === '1'")
    return page


@pytest.mark.browser
@pytest.mark.parametrize("model", MODELS)
def test_every_control_has_a_name(model: str, tab: OpenTab) -> None:
    answer, spec = MODELS[model]
    with live_api(answer, spec) as api:
        page = open_page(tab, api.url)
        for each in tabs(page) or ["surfaces"]:
            page.value(f"document.getElementById('{each}').click()")
            found = controls(page)
            assert found
            nameless = [node["role"]["value"] for node in found if not node.get("name", {}).get("value", "").strip()]
            assert not nameless, (each, nameless)


@pytest.mark.browser
@pytest.mark.parametrize("model", MODELS)
def test_the_tab_key_reaches_every_control(model: str, tab: OpenTab) -> None:
    answer, spec = MODELS[model]
    with live_api(answer, spec) as api:
        page = open_page(tab, api.url)
        for each in tabs(page) or ["surfaces"]:
            page.value(f"document.getElementById('{each}').click()")
            page.value("(document.activeElement.blur(), getSelection().removeAllRanges())")
            wanted = page.value(
                "[...document.querySelectorAll('button,input,select,textarea,a[href]')]"
                ".filter(e => e.checkVisibility() && !e.disabled && e.tabIndex >= 0)"
                ".map((e, index) => (e.dataset.number = String(index))).length"
            )
            seen = set()
            for _ in range(wanted + 12):  # regions that scroll take a turn as well
                page.press("Tab")
                seen.add(page.value("document.activeElement.dataset.number ?? ''"))
            missing = page.value(
                "[...document.querySelectorAll('[data-number]')]"
                f".filter(e => !{sorted(seen)!r}.includes(e.dataset.number))"
                ".map(e => e.outerHTML.slice(0, 90))"
            )
            assert not missing, (each, missing)
            page.value("document.querySelectorAll('[data-number]').forEach(e => delete e.dataset.number)")


@pytest.mark.browser
def test_keyboard_alone_makes_an_image(tab: OpenTab) -> None:
    with live_api(echo, OMNI) as api:
        page = open_page(tab, api.url)
        until_focused(page, "document.activeElement.id === 'tab-0'")
        while page.value("document.activeElement.textContent") != "Images":
            page.press("ArrowRight")
        until_focused(page, "document.activeElement.textContent === 'Make'")
        page.press("Enter")
        page.until("document.querySelector('img.picture:not(.partial)')?.naturalWidth > 0")


def until_focused(page: Tab, condition: str, most: int = 30) -> None:
    """Press Tab until the focused element fulfils the condition."""
    for _ in range(most):
        page.press("Tab")
        if page.value(condition):
            return
    raise AssertionError(f"{condition} was not reached by {most} presses of Tab")
