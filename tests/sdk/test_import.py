"""Modules that importing the client loads: no part of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mstar_core
import mstar_core.client

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "sanic",
    "textual",
    "zmq",
    "msgspec",
    "yaml",
    "requests",
    "httpx",
    "openai",
    "asyncio",
)
TELL = "from mstar_core import MStarClient, AsyncMStarClient, ClientError"


def test_the_import_loads_the_standard_library_and_the_client_alone(fresh_python: Callable[[str], Any]) -> None:
    """A list of modules is checked instead of a time limit of 150 ms, which is unreliable on a shared host."""
    fresh = fresh_python(TELL)
    assert fresh.loaded(HEAVY) == set()
    ours = {module for module in fresh.modules if module.startswith("mstar_core.")}
    light = tuple(f"mstar_core.{name}" for name in ("client", "closing", "codec", "errors", "version"))
    assert {module for module in ours if not module.startswith(light)} == set()


def test_making_a_client_loads_httpx_and_never_numpy_or_requests(fresh_python: Callable[[str], Any]) -> None:
    fresh = fresh_python(f"{TELL}; MStarClient(); AsyncMStarClient()")
    assert fresh.loaded(HEAVY) == {"asyncio", "httpx"}


def test_a_whole_answer_with_sound_loads_no_numpy_until_an_array_is_asked_for(
    fresh_python: Callable[[str], Any],
) -> None:
    body = {"outputs": {"audio": [{"data": "AAA=", "metadata": {"sample_rate": 8000}}]}}
    work = (
        f"from mstar_core.client.results import result_of_json; sound = result_of_json({body}).audio; sound.wav_bytes()"
    )
    assert fresh_python(work).loaded(("numpy",)) == set()
    assert fresh_python(f"{work}; sound.to_numpy()").loaded(("numpy",)) == {"numpy"}


def test_the_names_of_the_package_are_those_it_gives() -> None:
    assert mstar_core.MStarClient is mstar_core.client.MStarClient
    assert set(mstar_core.__all__) <= set(dir(mstar_core))
    assert sorted(mstar_core.client.__all__) == sorted(set(mstar_core.client.__all__))
    with pytest.raises(AttributeError, match="no attribute 'Client'"):
        mstar_core.Client  # type: ignore[attr-defined]  # noqa: B018
