"""The view with which `top` starts again, and its themes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstarctl.output.theme import GROUNDS, LIGHT_GROUND, ROLES, style_of
from mstarctl.top.layout.request_list import Sort
from mstarctl.top.layout.state import State
from mstarctl.top.saved_view import SavedView, load_view, path_of, save_view
from tests.top.screen import running


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_a_view_is_kept_for_its_deployment() -> None:
    view = SavedView(page="requests", sort="ttft", is_rising=True, filter="state:run")
    save_view("orpheus", view)
    assert load_view("orpheus") == view and load_view("bagel") == SavedView()
    assert path_of("orpheus").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text", ["", "{", '{"page": 3}', '{"page": "tables"}', '{"sort": "colour"}', '{"filter": "nod:x"}']
)
def test_a_file_that_does_not_fit_is_ignored(text: str) -> None:
    path_of("orpheus").parent.mkdir(parents=True)
    path_of("orpheus").write_text(text)
    assert load_view("orpheus") == SavedView()


def test_a_name_of_another_host_stays_in_the_folder(folder: Path) -> None:
    save_view("../../evil", SavedView(page="logs"))
    assert load_view("../../evil").page == "logs"
    assert path_of("../../evil").parent == path_of("orpheus").parent and not (folder.parent / "evil.json").exists()


def test_a_folder_that_cannot_be_made_does_not_stop_the_program(folder: Path) -> None:
    (folder / "mstar").write_text("a file")
    save_view("orpheus", SavedView(page="logs"))
    assert load_view("orpheus") == SavedView()


async def test_the_app_says_what_to_save() -> None:
    """A request that is open is not there the next time, so its table is saved."""
    async with running() as screen:
        screen.app.choose(State(page="request", came_from="requests", sort=Sort(key="wait", is_rising=True)))
        assert screen.app.saved_view() == SavedView(page="requests", sort="wait", is_rising=True)


# -- themes -------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour. Source: WCAG 2.1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("role", sorted(ROLES - {"rest", "frame", "faint", "wait", "bar", "spark", "compute"}))
@pytest.mark.parametrize("mark", ["", "+bar", "+selected"])
def test_text_of_the_light_theme_is_readable(role: str, mark: str) -> None:
    """At least 3:1, the contrast of large text; charts and lines are not text."""
    if role.startswith("chart") or (role == "tab.on" and mark):  # a tab has its own ground, and no marks
        return
    style = style_of(role + mark, "light")
    low, high = sorted((luminance(style.fg), luminance(style.bg)))
    assert (high + 0.05) / (low + 0.05) >= 3.0, (style.fg, style.bg)


def test_every_role_has_a_style_in_the_light_theme() -> None:
    assert all(style_of(role + mark, "light").bg for role in ROLES for mark in ("", "+bar", "+selected", "+off"))
    assert style_of("", "light").bg == LIGHT_GROUND == GROUNDS["light"].screen
    with pytest.raises(KeyError):
        style_of("value+blinking", "light")
