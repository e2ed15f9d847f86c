"""Two ranks answer as one does: the miniature of every model that can be divided, through the whole runtime."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mstar_core.config.deployment import Plan
from mstar_core.config.files.load import read_file
from mstar_core.config.files.placement import make_plan
from mstar_core.config.files.resolution import resolve
from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.conformance.miniature import Miniature
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.resuming import known_ids
from mstar_core.conformance.samples import greedy
from mstar_core.conformance.two_ranks import parallel_runtime
from mstar_core.messages.requests import Resume
from tests.families.families import ROOT, SPECS

MODELS = {
    "llm": (("LLM",), ("question", "one id")),
    "orpheus": (("LLM",), ("sentence", "flushed")),
    "qwen3_omni": (("Thinker", "Talker"), ("text, spoken", "image and audio, spoken")),
    "bagel": (("LLM",), ()),
    "pi05": (("LLM",), ()),
    "wan22": (("transformer",), ()),
}
"""Nodes of the group, and samples; all samples if none is named."""

SENT = {name: samples for name, (_, samples) in MODELS.items()}
FILES = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if "tp_size" in path.read_text(encoding="utf-8")]

SETTINGS = RuntimeSettings(token_budget=48)
"""A budget that cuts prompts into chunks."""


@functools.cache
def miniature(name: str) -> Miniature:
    return Miniature(SPECS[name])


def same(found: RequestOutcome, wanted: RequestOutcome) -> None:
    assert found.status == wanted.status == "finished", found.cause
    assert found.counts == wanted.counts
    assert found.outputs.keys() == wanted.outputs.keys()
    for modality, data in wanted.outputs.items():
        if modality in ("text", "audio"):
            assert found.outputs[modality] == data, modality
    for one, other in zip(found.items, wanted.items, strict=True):
        if one.array is None or one.array.dtype.kind in "iub" and one.modality not in ("image", "video"):
            continue
        spread = 2 if one.array.dtype.kind == "u" else 1e-4
        assert np.abs(one.array.astype(np.float64) - other.array.astype(np.float64)).max() <= spread


def asks_named(mini: Miniature, samples: Collection[str]) -> list[SampleRequest]:
    """Return the greedy requests of these samples; of all if none is named."""
    names = {f"sample {name!r}" for name in samples}
    asks = [greedy(mini.spec, ask) for ask in mini.asks if not samples or ask.name in names]
    assert asks, "the model has no such sample"
    return asks


def assert_answers_of_one_rank(
    mini: Miniature, groups: Sequence[Sequence[str]], samples: Collection[str], plan: Plan | None = None
) -> None:
    asks = asks_named(mini, samples)
    wanted = mini.runtime(SETTINGS).ask(*asks)
    with parallel_runtime(mini.spec, mini.folder, groups, SETTINGS, processor=mini.processor, plan=plan) as (
        runtime,
        followers,
    ):
        found = runtime.ask(*asks)
        assert runtime.leaks() == []
    assert all({"Step", "Forward"} & set(follower.kinds) for follower in followers)
    for one, other in zip(found, wanted, strict=True):
        assert other.items
        same(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_answer_as_one_does(name: str) -> None:
    nodes, samples = MODELS[name]
    assert_answers_of_one_rank(miniature(name), [nodes], samples)


@pytest.mark.parametrize("name", ["orpheus", "qwen3_omni"])
def test_new_attempts_go_on_at_two_ranks_as_at_one(name: str) -> None:
    nodes, samples = MODELS[name]
    mini = miniature(name)
    asks = [replace(ask, is_journaled=True) for ask in asks_named(mini, samples)]
    wanted = mini.runtime(SETTINGS).ask(*asks)
    again = [
        replace(ask, resume=Resume(attempt=2, ids=known_ids(one, 0.6))) for ask, one in zip(asks, wanted, strict=True)
    ]
    with parallel_runtime(mini.spec, mini.folder, [nodes], SETTINGS, processor=mini.processor) as (runtime, _):
        found = runtime.ask(*again)
        assert runtime.leaks() == []
    for one, other in zip(found, wanted, strict=True):
        same(one, other)
        assert one.drawn == other.drawn


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_with_groups_gives_the_answers_of_one_rank(path: Path) -> None:
    config = read_file(path)
    mini = miniature(str(config.model))
    plan = make_plan(mini.spec, resolve(mini.spec, config), ("cpu",))
    assert_answers_of_one_rank(mini, [group.nodes for group in plan.groups], SENT.get(mini.spec.name, ()), plan)
