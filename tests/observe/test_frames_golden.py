"""Frames of the watch within an API version: fields are only added and keep their types, for old readers.

The golden file lists the fields of API 1. Removing a field or changing its type needs a new version.
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
        frames.HelloFrame,
        frames.SnapshotFrame,
        frames.DeltaFrame,
        frames.EventFrame,
        frames.BeatFrame,
        frames.ResyncFrame,
        frames.DeploymentStatus,
        *frames.ITEM_TYPES.values(),
        frames.GraphView,
        frames.NodeView,
        frames.EdgeView,
        frames.WalkView,
        frames.Event,
    )
}


def fields(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return name on the wire -> type of every field."""
    return {field.encode_name: words(field.type) for field in msgspec.structs.fields(kind)}


def words(kind: Any) -> str:
    """Return a type as text that is independent of the Python version."""
    text = str(kind).replace("<class '", "").replace("'>", "").replace("mstar_core.observe.frames.", "")
    return golden_names(text)


def test_the_golden_file_is_that_of_the_current_version() -> None:
    assert frames.API == 1, "write a golden file for the new version, and keep the old one for its readers"
    assert set(GOLDEN) <= set(KINDS)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_fields_are_only_added(name: str) -> None:
    now = fields(KINDS[name])
    for field, kind in GOLDEN[name].items():
        assert now.get(field) == kind, f"{name}.{field} was {kind}"


def test_a_new_field_has_a_default() -> None:
    """A current reader accepts frames of the first server of this version."""
    for name, kind in KINDS.items():
        for field in msgspec.structs.fields(kind):
            is_new = field.encode_name not in GOLDEN.get(name, {})
            assert not (is_new and field.required), f"{name}.{field.name} is new and has no default"
