"""A tiny world model with candidates: encode, read context, roll out, score step by step, plan. Everything is random.

Its texts are JSON: the arrays of the request by name, as nested lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mstar_core.conformance.nodes import BuiltNode
from mstar_core.graph import (
    CLIENT,
    STATELESS,
    STEP,
    GraphEdge,
    GraphNode,
    Loop,
    NodeSpec,
    Sequential,
    Walk,
)
from mstar_core.plugin import ModelSpec, Partition, ProgramRequest, Run, TensorData, Text, param
from mstar_core.plugin.processor import Inputs, PromptRequest
from mstar_core.plugin.program import ProgramGenerator
from tests.engine.tiny_engine import WIDTH
from tests.engine.tiny_world import FRAME, PATCHES, TRIAL, WORLD, TinyWorld

TASKS = ("rollout", "told", "scored", "plan", "looked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    task: str = param("rollout", "what to do", choices=TASKS)
    rows: int = param(1, "candidates", ge=1, le=64)
    steps: int = param(2, "of a rollout", ge=1, le=8)
    rounds: int = param(2, "of planning", ge=1, le=8)
    context: int = param(0, "frames read before", ge=0, le=8)


FRAME_TYPE = f"f32[{PATCHES},{WIDTH}]"
ENCODER = NodeSpec(
    name="encoder",
    engine=STATELESS,
    per="request",
    ports={"clip": FRAME_TYPE, "frame": FRAME_TYPE},
    doc="doubles what it sees",
)
SCORER = NodeSpec(
    name="scorer",
    engine=STATELESS,
    per="request",
    ports={"final": FRAME_TYPE, "goal": FRAME_TYPE, "energies": "f32[1]"},
    doc="distance to the goal",
)
SAMPLER = NodeSpec(
    name="sampler",
    engine=STATELESS,
    per="request",
    ports={"mean": f"f32[h,{WIDTH}]", "noise": f"f32[c,k,h,{WIDTH}]", "candidates": f"f32[h,{WIDTH}]"},
    doc="the mean and this round's noise",
)
UPDATE = NodeSpec(
    name="update",
    engine=STATELESS,
    per="request",
    ports={"candidates": f"f32[h,{WIDTH}]", "energies": "f32[1]", "mean": f"f32[h,{WIDTH}]"},
    doc="the best candidate",
)
CARRY = {"next_frame": "frame"}


def send(port: str) -> GraphEdge:
    return GraphEdge(port, CLIENT, modality="tensor")


def walks() -> dict[str, Walk]:
    taken = ("frame", "actions", STEP)
    encode = GraphNode(ENCODER, ("clip",), (GraphEdge("frame", WORLD),))
    last = (send("next_frame"),)
    scored = GraphNode(WORLD, taken, (GraphEdge("next_frame", SCORER, into="final"),), attend=TRIAL)
    score = GraphNode(SCORER, ("final", "goal"), (send("energies"),))
    roll = Loop(
        "rollout_loop",
        GraphNode(WORLD, taken, attend=TRIAL),
        carry=CARRY,
        fused=True,
        outputs=(GraphEdge("next_frame", SCORER, into="final"),),
    )
    draw = GraphNode(
        SAMPLER,
        ("mean", "noise", STEP),
        (GraphEdge("candidates", WORLD, into="actions"), GraphEdge("candidates", UPDATE)),
    )
    judge = GraphNode(SCORER, ("final", "goal"), (GraphEdge("energies", UPDATE),))
    search = Sequential(draw, roll, judge, GraphNode(UPDATE, ("candidates", "energies")))
    told = (send("next_frame"), send("norm"))
    return {
        "context": Loop("context_loop", GraphNode(WORLD, taken, attend=FRAME), fused=True),
        "rollout": Sequential(
            encode, Loop("rollout_loop", GraphNode(WORLD, taken, attend=TRIAL), carry=CARRY, fused=True, outputs=last)
        ),
        "told": Sequential(
            encode, Loop("rollout_loop", GraphNode(WORLD, taken, told, attend=TRIAL), carry=CARRY, fused=True)
        ),
        "scored": Sequential(encode, Loop("rollout_loop", Sequential(scored, score), carry=CARRY, outputs=last)),
        "look": GraphNode(ENCODER, ("clip",), (send("frame"),)),
        "plan": Sequential(encode, Loop("search", search, carry={"mean": "mean"}, outputs=(send("mean"),))),
    }


def program(request: ProgramRequest) -> ProgramGenerator:
    params, inputs = request.params, request.inputs
    context = [
        Run("context", max_iters=1, sample=False, frame=inputs[f"frame{n}"], actions=inputs["past"])
        for n in range(params.context)
    ]
    given: dict[str, Any] = {
        name: inputs[name] for name in ("clip", "actions", "goal", "mean", "noise") if name in inputs
    }
    limits: Any = {"search": params.rounds, "rollout_loop": params.steps} if params.task == "plan" else params.steps
    walk = "scored" if params.task == "looked" else params.task
    together = walk == "scored"
    keeps = params.steps * PATCHES if together else 0
    yield [*context, Run(walk, max_iters=limits, rows=params.rows, row_tokens=keeps, sample=False, **given)]
    if params.task == "looked":
        yield Run("look", clip=inputs["clip"])


SPEC = ModelSpec(
    name="world",
    title="A toy that imagines",
    plugin="world",
    inputs=(Text(),),
    outputs=(TensorData(),),
    params=Params,
    nodes=(ENCODER, WORLD, SCORER, SAMPLER, UPDATE),
    partitions=(Partition(name="main", program=program, walks=walks()),),
    processor=f"{__name__}:Processor",
    model=f"{__name__}:Model",
    max_seq_len=48,
)


class Processor:
    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        pass

    def process_prompt(self, request: PromptRequest) -> Inputs:
        given = json.loads(request.text or "{}")
        return Inputs(arrays={name: np.array(value, dtype=np.float32) for name, value in given.items()})

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return output.tobytes(), {}


class Encoder(nn.Module):
    def forward(self, clip: Tensor) -> dict[str, Tensor]:
        return {"frame": clip * 2}


class Scorer(nn.Module):
    def forward(self, final: Tensor, goal: Tensor) -> dict[str, Tensor]:
        assert final.dim() - goal.dim() in (0, 1)
        wide = goal[:, None] if final.dim() > goal.dim() else goal
        return {"energies": (final - wide).abs().mean(dim=(-2, -1))[..., None]}


class Sampler(nn.Module):
    def forward(self, mean: Tensor, noise: Tensor, step: Tensor) -> dict[str, Tensor]:
        return {
            "candidates": mean[:, None] + torch.stack([each[int(at)] for each, at in zip(noise, step, strict=True)])
        }


class Update(nn.Module):
    def forward(self, candidates: Tensor, energies: Tensor) -> dict[str, Tensor]:
        best = energies.flatten(1).argmin(dim=1)
        return {"mean": torch.stack([each[at] for each, at in zip(candidates, best, strict=True)])}


def built() -> dict[str, BuiltNode]:
    """Build every node with new modules; the world's records the batch sizes of its passes."""
    modules = {ENCODER: Encoder(), WORLD: TinyWorld(), SCORER: Scorer(), SAMPLER: Sampler(), UPDATE: Update()}
    return {node.name: BuiltNode(node=node, module=module, vocab=0) for node, module in modules.items()}
