"""Frames of the watch within an api version: fields are only added, and keep their types, so that old readers go on.

The golden file holds what API 1 had when it was written. A field that is gone or has another type needs a new version.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mstar_core.observe import frames

NAMES = {"GraphView": "Graph", "NodeView": "GraphNode", "EdgeView": "GraphEdge", "WalkView": "GraphWalk"}
"""Class -> its name in the golden file."""


def golden_names(text: str) -> str:
    """Return `text` with class names as the golden file has them: `RankStatus` is `Rank` there."""
    return re.sub(r"\w+", lambda word: NAMES.get(word[0], word[0].removesuffix("Status")), text)


GOLDEN: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "frames_api_1.json").read_text())
KINDS: dict[str, type[msgspec.Struct]] = {
    golden_names(kind.__name__): kind
    for kind in (
        frames.HelloFrame, frames.SnapshotFrame, frames.DeltaFrame, frames.EventFrame, frames.BeatFrame,
        frames.ResyncFrame, frames.DeploymentStatus, *frames.ITEM_TYPES.values(), frames.GraphView, frames.NodeView,
        frames.EdgeView, frames.WalkView, frames.Event,
    )
}  # fmt: skip


def fields(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Name on the wire -> type, of every field."""
    return {field.encode_name: words(field.type) for field in msgspec.structs.fields(kind)}


def words(kind: Any) -> str:
    """A type as text that does not change with the version of Python."""
    text = str(kind).replace("<class '", "").replace("'>", "").replace("mstar_core.observe.frames.", "")
    return golden_names(text)


def test_the_golden_file_is_of_the_version_that_is_spoken() -> None:
    assert frames.API == 1, "write a golden file for the new version, and keep the old one for its readers"
    assert set(GOLDEN) <= set(KINDS)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_fields_are_only_added(name: str) -> None:
    now = fields(KINDS[name])
    for field, kind in GOLDEN[name].items():
        assert now.get(field) == kind, f"{name}.{field} was {kind}"


def test_a_field_that_is_new_has_a_default() -> None:
    """A reader of today takes frames of the first server of this version."""
    for name, kind in KINDS.items():
        for field in msgspec.structs.fields(kind):
            is_new = field.encode_name not in GOLDEN.get(name, {})
            assert not (is_new and field.required), f"{name}.{field.name} is new and has no default"
