"""Two ranks answer as one does: the miniature of every model that can be divided, through the whole runtime."""

from __future__ import annotations

import functools
from importlib import import_module

import numpy as np
import pytest

from mstar_core.conformance.fake_api import RequestOutcome
from mstar_core.conformance.miniature import Miniature
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.samples import greedy
from mstar_core.plugin.spec import ModelSpec
from tests.parallel.two_ranks import parallel_runtime

MODELS = {
    "orpheus": (("LLM",), ("sentence", "flushed")),
    "qwen3_omni": (("Thinker", "Talker"), ("text, spoken", "image and audio, spoken")),
    "bagel": (("LLM",), ()),
    "pi05": (("LLM",), ()),
}
"""Nodes of the group, and samples; all samples if none is named."""

SETTINGS = RuntimeSettings(token_budget=48)
"""A budget that cuts prompts into chunks."""


@functools.cache
def miniature(name: str) -> Miniature:
    package = {"qwen3_omni": "qwen3omni"}.get(name, name)
    models: list[ModelSpec] = import_module(f"mstar_{package}.plugin").mstar_models()
    return Miniature(next(spec for spec in models if spec.name == name))


def same(found: RequestOutcome, wanted: RequestOutcome) -> None:
    assert found.status == wanted.status == "finished", found.cause
    assert found.counts == wanted.counts
    assert found.outputs.keys() == wanted.outputs.keys()
    for modality, data in wanted.outputs.items():
        if modality in ("text", "audio"):
            assert found.outputs[modality] == data, modality
    for one, other in zip(found.items, wanted.items, strict=True):
        if one.array is None or one.array.dtype.kind in "iub" and one.modality != "image":
            continue
        spread = 2 if one.array.dtype.kind == "u" else 1e-4
        assert np.abs(one.array.astype(np.float64) - other.array.astype(np.float64)).max() <= spread


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_answer_as_one_does(name: str) -> None:
    nodes, samples = MODELS[name]
    mini = miniature(name)
    asks = [
        greedy(mini.spec, ask) for ask in mini.asks if not samples or ask.name in {f"sample {s!r}" for s in samples}
    ]
    assert asks, "the model has no such sample"
    wanted = mini.runtime(SETTINGS).ask(*asks)
    with parallel_runtime(mini.spec, mini.folder, nodes, SETTINGS, processor=mini.processor) as (runtime, follower):
        found = runtime.ask(*asks)
        assert runtime.leaks() == []
    assert "Forward" in follower.kinds
    for one, other in zip(found, wanted, strict=True):
        assert other.items
        same(one, other)
