"""Table of keys: help texts fit, keys are unique, actions exist."""

from __future__ import annotations

from collections.abc import Callable

from mstarctl.top.app import TopApp
from mstarctl.top.keys import KEYS
from tests.top.pictures import EVERY_PAGE


def test_every_binding_has_help_that_fits() -> None:
    for key in KEYS:
        assert key.help and key.label and key.shown, key
        assert len(key.help) <= 46, key.help


def test_no_two_keys_of_a_screen_are_the_same() -> None:
    for page in EVERY_PAGE:
        names = [name for key in KEYS if page in key.pages for name in key.keys.split(",")]
        assert len(names) == len(set(names)), page


def test_every_action_exists() -> None:
    for key in KEYS:
        name = key.action.partition("(")[0]
        assert isinstance(getattr(TopApp, f"action_{name}"), Callable), name  # type: ignore[arg-type]  # abc works here
