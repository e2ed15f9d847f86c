"""The thinker's golden cases, and a minimal cache to run it without an engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.graph import KV_CACHE, Attend, EngineHints, KVSpec, NodeSpec, Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.plugin.model import ModelContext
from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config
from mstar_qwen3omni.model import Qwen3Omni
from mstar_qwen3omni.plugin import mstar_models
from mstar_qwen3omni.thinker.thinker import Thinker

from .golden_set import golden_folder

FOLDER = golden_folder()
CASES = sorted(path.stem.removeprefix("case_") for path in FOLDER.glob("case_*.safetensors"))
STATES = 2e-3
"""Tolerance of the set for hidden states and logits."""

needs_weights = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").exists() or not CASES, reason="needs the golden set in MSTAR_GOLDEN"
)


@dataclass(frozen=True)
class Case:
    """One request of the set: its prompt as the thinker reads it."""

    tensors: dict[str, Tensor]
    tokens: Tensor
    positions: Tensor
    embeds: Tensor
    deepstack: Tensor

    @property
    def answer(self) -> Tensor:
        return self.tensors["thinker_tokens"]


class DenseCache:
    """A minimal KVView of several sequences. lengths: new tokens of each in the next forward."""

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.lengths: list[int] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        lengths = self.lengths or [len(query)]
        parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._one((layer, index), *part) for index, part in enumerate(parts)])

    def _one(self, at: tuple[int, int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if at in self._layers:
            before_key, before_value = self._layers[at]
            key, value = torch.cat([before_key, key]), torch.cat([before_value, value])
        self._layers[at] = (key, value)
        groups = query.shape[1] // key.shape[1]
        visible = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(len(key) - len(query))
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (key, value))
        return scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=visible).transpose(0, 1)


def read(name: str) -> Case:
    found = load_file(FOLDER / f"case_{name}.safetensors")
    tokens, levels = found["in.input_ids"], len(read_config(FOLDER).vision.deepstack)
    ids = read_config(FOLDER).ids
    deepstack = torch.zeros(levels, len(tokens), found["thinker_inputs_embeds"].shape[-1])
    for kind, pad in (("image", ids.image_pad), ("video", ids.video_pad)):
        for level in range(levels):
            if f"{kind}_deepstack.{level}" in found:
                deepstack[level, tokens == pad] = found[f"{kind}_deepstack.{level}"]
    return Case(found, tokens, found["thinker_position_ids"].float(), found["thinker_inputs_embeds"], deepstack)


def prefill(thinker: Thinker, case: Case, cache: DenseCache, cuts: list[int]) -> dict[str, Tensor]:
    parts = [
        thinker(
            kv=cache,
            positions=case.positions[:, a:b].contiguous(),
            tokens=case.tokens[a:b],
            embeds=case.embeds[a:b],
            deepstack=case.deepstack[:, a:b],
        )
        for a, b in itertools.pairwise([0, *cuts, len(case.tokens)])
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def golden_thinker() -> Thinker:
    """The thinker with the weights of the set, on the CPU in float32."""
    (spec,) = mstar_models()
    context = ModelContext(spec=spec, folder=FOLDER, device=torch.device("cpu"), dtype=torch.float32)
    built = Qwen3Omni(context).get_submodule(spec.node("Thinker"))
    assert isinstance(built, Thinker)
    return built


def node(config: OmniConfig) -> NodeSpec:
    """The thinker's node for these sizes."""
    sizes, width = config.thinker, config.thinker.width
    return NodeSpec(
        name="Thinker",
        engine=KV_CACHE,
        ports={
            "tokens": "i64[n]",
            "positions": "f32[3,n]",
            "embeds": f"any[n,{width}]?",
            "deepstack": f"any[{len(config.vision.deepstack)},n,{width}]?",
            "token": "i64[1]",
            "states": f"any[n,{width}]",
        },
        kv=KVSpec(layers=sizes.layers, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim),
        sampling=Sampling(port="token"),
        sequence=("tokens", "token"),
        hints=EngineHints(capture_prompts=(64, 256)),
    )


def segments(case: Case) -> Iterator[tuple[dict[str, Tensor], Attend]]:
    """Cut a prompt into passes of text and of media, as the walks do."""
    ids = read_config(FOLDER).ids
    pads = torch.isin(case.tokens, torch.tensor([ids.image_pad, ids.video_pad, ids.audio_pad]))
    is_seen = torch.isin(case.tokens, torch.tensor([ids.image_pad, ids.video_pad]))
    cuts = [0, *(torch.nonzero(pads[1:] != pads[:-1]).flatten() + 1).tolist(), len(pads)]
    for a, b in itertools.pairwise(cuts):
        tokens = {"tokens": case.tokens[a:b], "positions": case.positions[:, a:b]}
        if pads[a]:
            tokens["embeds"] = case.embeds[a:b]
        if is_seen[a:b].any():
            tokens["deepstack"] = case.deepstack[:, a:b]
        yield tokens, Attend(positions="given")


def made_engine(thinker: Thinker, cases: list[Case], config: OmniConfig | None = None, **changes: Any) -> KVCacheEngine:
    """Return an engine that has room for these requests."""
    steps = max(len(case.answer) for case in cases)
    longest = max(len(case.tokens) for case in cases) + steps
    options: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "vocab": thinker.lm_head.weight.shape[0],
        "page_size": 8,
        "max_slots": len(cases) + 4,
        "max_seq_len": 2 * longest,
        "token_budget": 256,
        "num_pages": (len(cases) + 1) * (longest // 8 + 2),
    }
    return KVCacheEngine(node(config or read_config(FOLDER)), thinker, KVSettings(**(options | changes)))


def answers(
    thinker: Thinker,
    cases: list[Case],
    config: OmniConfig | None = None,
    *,
    engine: KVCacheEngine | None = None,
    **changes: Any,
) -> tuple[list[list[int]], list[Tensor]]:
    """Return greedy ids of several requests at once, and the states of their media. engine: a used one."""
    engine = engine or made_engine(thinker, cases, config, **changes)
    keys, ids, states = itertools.count(1), [list[int]() for _ in cases], [list[Tensor]() for _ in cases]
    waiting = {handle: list(segments(case)) for handle, case in enumerate(cases)}
    loops: dict[int, int] = {}
    steps = max(len(case.answer) for case in cases)

    def go_on(handle: int) -> None:
        passes, key, outputs = waiting[handle], JobKey(next(keys)), ("token",)
        if passes:
            inputs, attend = passes.pop(0)
            outputs = (*(("token",) if not passes else ()), *(("states",) if "embeds" in inputs else ()))
            is_last = not passes
            job = Job(key=key, handle=Handle(handle), inputs=inputs, attend=attend, outputs=outputs, sample=is_last)
            engine.submit(job)
        elif len(ids[handle]) == 1:
            loop = LoopSpec(max_iters=len(cases[handle].answer) - 1, carry={"token": "token"}, stop_port="token")
            loops[key] = handle
            engine.submit(Job(key=key, handle=Handle(handle), loop=loop, outputs=outputs))

    for handle, case in enumerate(cases):
        engine.open(Handle(handle), SamplingParams(), len(case.tokens) + steps)
        go_on(handle)
    while (running := engine.launch()) is not None:
        result = engine.collect(running)
        assert not result.failed
        for done in result.done:
            handle = int(done.job.handle)
            if "states" in done.outputs:
                states[handle].append(done.outputs["states"])
            if done.job.loop is None and "token" in done.outputs:
                ids[handle].append(int(done.outputs["token"]))
            if done.job.loop is None:
                go_on(handle)
        if result.loop is not None:
            for key, value in zip(result.loop.keys.tolist(), result.loop.ids.tolist(), strict=True):
                ids[loops[key]].append(value)
    for handle in range(len(cases)):
        engine.close(Handle(handle))
    return ids, [torch.cat(state) if state else torch.empty(0) for state in states]
