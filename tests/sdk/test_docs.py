"""docs/sdk.md: every Python block runs as written, and every public name of the client is on the page."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from pathlib import Path

import pytest

import mstar_core.client
from mstar_core.client import MStarClient, errors
from tests.api.conftest import Api
from tests.fakes import media
from tests.fakes.any_model import PIXELS, png
from tests.sdk.conftest import ROOT, SHARED, told

PAGE = (ROOT / "docs" / "sdk.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
TOLD_ELSEWHERE = {"Line", "Event", "AsyncStream"}
"""The command line's own, and names that the page tells of under another name."""


@SHARED
async def test_the_blocks_run_one_after_the_other(tmp_path: Path, api: Api) -> None:
    for name in ("cat.png", "dog.png", "base.png", "wrist.png"):
        (tmp_path / name).write_bytes(png(PIXELS))
    (tmp_path / "clip.mp4").write_bytes(media.video())
    assert len(BLOCKS) >= 7
    script = "\n".join(BLOCKS).replace("http://localhost:8000", api.url)
    said = await asyncio.to_thread(told, [sys.executable, "-c", script], tmp_path)
    assert "voice invalid_value" in said
    for name in ("hello.wav", "story.wav", "openai.wav"):
        assert (tmp_path / name).read_bytes()[:4] == b"RIFF"


@pytest.mark.parametrize("name", sorted(set(mstar_core.client.__all__) - TOLD_ELSEWHERE))
def test_every_public_name_is_on_the_page(name: str) -> None:
    assert re.search(rf"\b{name}\b", PAGE)


def test_every_call_and_its_arguments_are_on_the_page() -> None:
    for name, call in inspect.getmembers(MStarClient, inspect.isfunction):
        if name.startswith("_"):
            continue
        assert f"`{name}(" in PAGE or f"`, `{name}(" in PAGE, name
        row = re.search(rf"`{name}\(([^`]*)\)`", PAGE)
        assert row is not None
        inputs = {word.strip().lstrip("*") for word in row[1].split(",")} - {""}
        assert inputs == set(inspect.signature(call).parameters) - {"self"}, name


def test_the_tree_of_errors_is_that_of_the_module() -> None:
    (page,) = re.findall(r"^```\n(ClientError .*?)```", PAGE, re.DOTALL | re.MULTILINE)
    names = re.findall(r"[├└]─ (\w+)", page)
    assert names == re.findall(r"[├└]─ (\w+)", errors.__doc__ or "")
    assert set(names) == {name for name, kind in vars(errors).items() if _is_client_error(name, kind)}


def _is_client_error(name: str, kind: object) -> bool:
    """Return whether a name of the module is a subclass of ClientError under its own name."""
    base = errors.ClientError
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base and kind.__name__ == name


def test_the_names_of_earlier_versions_are_aliases() -> None:
    (sentence,) = re.findall(r"^The earlier names (.*?)\.$", PAGE, re.DOTALL | re.MULTILINE)
    names = re.findall(r"`(\w+)`", sentence)
    pairs = list(zip(names[: len(names) // 2], names[len(names) // 2 :], strict=True))
    assert len(pairs) == 7
    for old, new in pairs:
        assert vars(mstar_core.client)[old] is vars(mstar_core.client)[new]
