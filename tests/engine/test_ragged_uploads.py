"""Uploads per step: the host inputs of all sequences share one copy. Runs on torch's meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.steps.device import AHEAD
from mstar_core.graph.declare.nodes import Attend, EngineHints
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.kv_view import KVView
from tests.engine.tiny_engine import LM, WIDTH, TinyLM, make_engine
from tests.engine.tiny_world import PATCHES, TRIAL, WORLD, make_world, numbers

META = torch.device("meta")
SPEC = replace(
    LM,
    ports={**LM.ports, "marks": "i64[n]"},
    sampling=None,
    hints=EngineHints(capture_sizes=(1, 2, 4), capture_tokens=(8, 16, 32, 64)),
    sequence=("embeds", "latents"),
)
PREFIX, READ = Attend(mask="full"), Attend(mask="full", write=False)


class Marked(nn.Module):
    """Takes a number for each token of a prefix beside its vector."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyLM()

    def forward(self, marks: torch.Tensor | None = None, **given: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.inner(**given)
        return found


class Still:
    def replay(self) -> None:
        """Values are nowhere: there is nothing to do."""


class StillCache(GraphCache):
    def graph(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        return Still(), step()


class Uploads(TorchDispatchMode):
    """Counts uploads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        is_there = isinstance(made, torch.Tensor) and made.device == META
        self.count += is_there and any(each.device.type == "cpu" for each in tensors)
        return made


def engine() -> KVCacheEngine:
    module = Marked().to(META)
    return make_engine(
        spec=SPEC, module=module, vocab=0, device=META, graphs=(1,), captures=StillCache(META), token_budget=64
    )


def launched(made: KVCacheEngine) -> int:
    """Copies from the host that a step takes."""
    uploads = Uploads()
    with uploads:
        running = made.launch()
    assert running is not None
    result = made.collect(running)
    assert not result.failed, result.failed
    return uploads.count


def acted(made: KVCacheEngine, rows: int) -> tuple[int, int]:
    """Copies that so many prefixes take, and so many flows over them."""
    for handle in range(rows):
        made.open(Handle(handle), SamplingParams(), 64)
        inputs = {"embeds": numbers(handle, 8, 32).to(META), "marks": torch.arange(8)}
        made.submit(Job(key=JobKey(2 * handle), handle=Handle(handle), inputs=inputs, attend=PREFIX, sample=False))
        loop = LoopSpec(max_iters=3, carry={"latents_out": "latents"}, fused=True)
        made.submit(
            Job(
                key=JobKey(2 * handle + 1),
                handle=Handle(handle),
                inputs={"latents": numbers(handle, 4, 32)},
                attend=READ,
                loop=loop,
                outputs=("velocity",),
                sample=False,
            )
        )
    prefixes = launched(made)
    flows = launched(made)
    for handle in range(rows):
        made.close(Handle(handle))
    return prefixes, flows


@pytest.mark.parametrize("rows", [1, 4])
def test_a_captured_step_takes_one_upload_for_all_host_inputs(rows: int) -> None:
    made = engine()
    acted(made, 1)
    while made.idle():
        pass
    acted(made, 4)  # these get pages that others held, whose numbers are uploaded to clear them
    assert made.counters()["graph_hits"] > 0
    assert acted(made, rows) == (2, 1)


class Imagined(nn.Module):
    """Gives each row a frame from its last one and the action of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM()

    def forward(self, kv: KVView, positions: Tensor, step: Tensor, frame: Tensor, actions: Tensor) -> dict[str, Tensor]:
        x = (frame + actions).reshape(len(positions), WIDTH) + step[:, None]
        rotation = self.lm.rotary(positions)
        for block in self.lm.blocks:
            x = block(x, kv, rotation)
        return {"next_frame": self.lm.norm(x).view(frame.shape)}


def imagined(made: KVCacheEngine, rows: int, steps: int, key: int) -> int:
    """Copies that rollouts take, each of a request of its own; what they begin from is on the device."""
    for handle in range(rows):
        made.open(Handle(handle), SamplingParams(), 3 * steps)
        inputs = {"frame": numbers(handle, PATCHES, WIDTH).to(META), "actions": numbers(handle, steps, WIDTH)}
        loop = LoopSpec(max_iters=steps, carry={"next_frame": "frame"}, fused=True)
        made.submit(
            Job(
                key=JobKey(key + handle),
                handle=Handle(handle),
                inputs=inputs,
                attend=TRIAL,
                loop=loop,
                outputs=("next_frame",),
                sample=False,
            )
        )
    copies = launched(made)
    for handle in range(rows):
        made.close(Handle(handle))
    return copies


@pytest.mark.parametrize("rows", [1, 4])
def test_each_iteration_of_a_replay_ahead_takes_one_upload(rows: int) -> None:
    spec = replace(WORLD, step_ports=("actions",), hints=EngineHints(capture_sizes=(1, 4)))
    made = make_world(spec=spec, module=Imagined().to(META), device=META, graphs=(1,), captures=StillCache(META))
    steps = 2 * AHEAD[0]
    for key in (0, 10):
        imagined(made, 4, steps, key)
        while made.idle():
            pass
    imagined(made, 4, steps, 20)  # as above: pages that others held
    hits = made.counters()["graph_hits"]
    replays = steps // AHEAD[0]
    assert imagined(made, rows, steps, 30) == steps + replays, "one for each iteration, and to clear a replay's pages"
    assert made.counters()["graph_hits"] == hits + steps
