"""Pi0.5 around its engines: random or checkpoint weights in any sizes, requests, and lower bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bench.families.engine_driver import EngineDriver
from mstar_core.engine.base import Done, Handle, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.engine.module import node_module
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.graph import NodeSpec
from mstar_core.graph.declare.nodes import Attend, from_param
from mstar_core.layers.kv_view import KVModule
from mstar_core.layers.linear import fuse_projections
from mstar_core.layers.quantize import quantize
from mstar_core.plugin.model import ModelContext
from mstar_core.weights.building import building
from mstar_core.worker.steps import FairShare, Steps
from mstar_pi05.checkpoint.config import ACTION_WIDTH, IMAGE, Sizes, read_sizes
from mstar_pi05.graph import build
from mstar_pi05.model import Pi05
from mstar_pi05.nodes.policy import Policy
from mstar_pi05.nodes.siglip import Cameras
from mstar_pi05.plugin import mstar_models

PAGE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Device and execution options. vision: compute dtype of the image tower (`float32`, `tf32`, `bfloat16`)."""

    device: torch.device
    dtype: torch.dtype
    vision: str = "float32"
    attention: str = "torch"
    is_captured: bool = True
    max_tokens: int = 1024
    requests: int = 16
    quantization: str = "none"

    @property
    def vision_dtype(self) -> torch.dtype:
        """Dtype of the tower's weights."""
        return torch.bfloat16 if self.vision == "bfloat16" else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A request. images: uint8 or floats [c, S, S, 3]; ids: int64 [n]; noise: float32 [horizon, 32]."""

    images: Tensor
    ids: Tensor
    noise: Tensor
    steps: int = 10


def random_modules(sizes: Sizes, place: Place, most_steps: int = 20) -> dict[str, nn.Module]:
    """Build both nodes with scale-preserving random weights."""
    with building(place.device, place.dtype):
        policy = Policy(sizes)
    with building(place.device, place.vision_dtype):
        cameras = Cameras(sizes, rounds=place.vision == "tf32")
    for module in (policy, cameras):
        draw(module.eval().requires_grad_(False), place.device)
    policy.settle(most_steps)
    return {"LLM": policy, "vit_encoder": cameras}


def checkpoint_modules(folder: Path, place: Place) -> tuple[Sizes, dict[str, nn.Module]]:
    """Build both nodes of a checkpoint as a worker does, on the place's device."""
    options = {"vision_dtype": place.vision}
    spec = mstar_models()[0].bound(folder, options)
    context = ModelContext(
        spec=spec, folder=folder, device=place.device, dtype=place.dtype, model_kwargs=spec.model_kwargs
    )
    model = Pi05(context)
    return read_sizes(folder), {name: model.get_submodule(spec.node(name)) for name in ("LLM", "vit_encoder")}


@dataclass(slots=True)
class Acting:
    """Both engines of one place. graphs: creates the graph cache of an engine; nothing is captured on the CPU."""

    sizes: Sizes
    modules: dict[str, nn.Module]
    place: Place
    graphs: Callable[[], GraphCache] | None = None
    driver: EngineDriver = field(init=False)
    _open: list[Handle] = field(default_factory=list)
    _flows: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create the engines."""
        place, make = self.place, self.graphs or partial(GraphCache, self.place.device)
        graph = build(self.sizes, ACTION_WIDTH, place.vision)
        nodes = {node.name: node for node in graph.nodes}
        cameras = cast("Cameras", self.modules["vit_encoder"])
        prepare(self.modules["LLM"], place)
        if place.is_captured:
            cameras.capture(make())
        self.driver = EngineDriver(
            {
                "vit_encoder": StatelessEngine(
                    nodes["vit_encoder"],
                    cameras,
                    device=place.device,
                    dtype=place.vision_dtype,
                    lookahead=int(place.device.type == "cuda"),
                ),
                "LLM": self._llm(nodes["LLM"], make()),
            }
        )

    def _llm(self, node: NodeSpec, captures: GraphCache) -> KVCacheEngine:
        place = self.place
        settings = KVSettings(
            device=place.device,
            dtype=place.dtype,
            num_pages=place.requests * -(-place.max_tokens // PAGE),
            page_size=PAGE,
            max_slots=place.requests,
            max_seq_len=place.max_tokens,
            vocab=0,
            token_budget=place.requests * place.max_tokens,
            attention=place.attention,
            lookahead=int(place.device.type == "cuda"),
            prefix_cache=False,
            graphs=CaptureSizes(decode=(1,)) if place.is_captured else CaptureSizes(),
        )
        return KVCacheEngine(node, cast("KVModule", self.modules["LLM"]), settings, captures=captures)

    def submit(self, seen: Observation, *, is_flowing: bool = True) -> Handle:
        """Queue one request: cameras, prefix, and flow unless `is_flowing` is False."""
        prefix = torch.cat([torch.full((self._places(seen),), IMAGE), seen.ids])
        handle = self.driver.open(len(prefix))
        self._open.append(handle)

        def read(cameras: Done) -> None:
            inputs = {"tokens": prefix, "embeds": cameras.outputs["features"]}
            self.driver.submit("LLM", handle, inputs, attend=Attend(mask="full"), outputs=())
            if is_flowing:
                self.flow(handle, seen)

        inputs = {"images": seen.images, "tokens": prefix}
        self.driver.submit("vit_encoder", handle, inputs, read, outputs=("features",))
        return handle

    def flow(self, handle: Handle, seen: Observation) -> None:
        """Queue the flow of a request whose prefix is queued."""
        shape = seen.noise.shape
        inputs = {
            "actions": seen.noise,
            "scale": torch.ones(shape),
            "offset": torch.zeros(shape),
            from_param("num_steps"): torch.tensor(seen.steps),
        }
        loop = LoopSpec(max_iters=seen.steps, carry={"actions": "actions"}, fused=True)
        self._flows[int(handle)] = self.driver.submit(
            "LLM", handle, inputs, loop=loop, outputs=("robot_actions",), attend=Attend(mask="full", write=False)
        )

    def act(self, *seen: Observation) -> list[Tensor]:
        """Run all requests together. Returns their actions on the host: float32 [horizon, 32] each."""
        with torch.inference_mode():
            for each in seen:
                self.submit(each)
            self.driver.run()
            found = [self.driver.done[self._flows[int(h)]].outputs["robot_actions"].cpu() for h in self._open]
        self.end()
        return found

    def saturate(self, seen: Observation, clients: int, answers: int) -> list[float]:
        """Run closed-loop clients until `answers` responses arrived. Returns the arrival times in seconds.

        Steps are launched and collected as in a worker; a client's next message is free.
        """
        runners = self.driver.runners
        steps = Steps(runners=runners, scheduler=FairShare(runners), lookahead=int(self.place.device.type == "cuda"))
        for _ in range(clients):
            self.submit(seen)
        start, came = time.perf_counter(), list[float]()
        while len(came) < answers or self._open:
            launched, count = steps.launch(), steps.collected
            for result in steps.collect(launched):
                self.driver.take(result)
            for handle in [each for each in self._open if self._flows.get(int(each), 0) in self.driver.done]:
                came.append(time.perf_counter() - start)
                self._finish(handle)
                if len(came) + len(self._open) < answers:
                    self.submit(seen)
            if steps.count and not launched and steps.collected == count:
                steps.wait(lambda: False)
        return came

    def _finish(self, handle: Handle) -> None:
        self.driver.close(handle)
        self._open.remove(handle)
        del self.driver.done[self._flows.pop(int(handle))]

    def end(self) -> None:
        """Close every request."""
        for handle in self._open:
            self.driver.close(handle)
        self._open.clear()
        self._flows.clear()
        self.driver.done.clear()

    @property
    def handles(self) -> list[Handle]:
        """Open requests, oldest first."""
        return list(self._open)

    def counters(self) -> dict[str, Mapping[str, float]]:
        """Return the counters of both engines, by node."""
        runners: dict[str, Any] = dict(self.driver.runners)
        return {name: runner.counters() for name, runner in runners.items()}

    def _places(self, seen: Observation) -> int:
        return len(seen.images) * self.sizes.vision.tokens


def prepare(module: nn.Module, place: Place) -> None:
    """Fuse and quantize the projections of a KV node, as a worker does. A second call changes nothing."""
    if place.device.type == "cuda":
        fuse_projections(module)
    if place.quantization != "none":
        own = node_module(module)
        quantize(module, place.quantization, rounds_inputs=own.rounds_inputs, kept=own.unquantized)


def observation(sizes: Sizes, cameras: int, prompt: int, seed: int = 0, steps: int = 10) -> Observation:
    """Return a random request."""
    generator, side = torch.Generator().manual_seed(seed), sizes.vision.image_size
    return Observation(
        images=torch.randint(0, 256, (cameras, side, side, 3), generator=generator, dtype=torch.uint8),
        ids=torch.randint(0, sizes.vocab, (prompt,), generator=generator),
        noise=torch.randn(sizes.horizon, ACTION_WIDTH, generator=generator),
        steps=steps,
    )


def floors(sizes: Sizes, cameras: int, prompt: int, steps: int, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the minimum seconds of each part for one request: operations at the GEMM rate, or bytes at the
    copy rate.

    Weights count two bytes. Attention of the prefix is not counted (3 % of it).
    """
    tower, language, expert = sizes.vision, sizes.language, sizes.expert
    tokens = cameras * tower.tokens
    vision = tower.layers * (4 * tower.width**2 + 2 * tower.width * tower.mlp)
    places = tokens + prompt
    vision_ops = 2 * tokens * vision + tower.layers * 4 * cameras * tower.tokens**2 * tower.width
    cache = 2 * 2 * places * sizes.language.layers * language.kv_heads * language.head_dim
    flow = steps * (2 * _block(expert.width, expert) * expert.layers + cache)
    # The last block of the prefix computes keys and values only.
    prefix = _block(language.width, language) * (language.layers - 1)
    return {
        "vision_s": max(vision_ops / rates["product_per_s"], 2 * vision / rates["copy_bytes_per_s"]),
        "prefix_s": max(2 * places * prefix / rates["product_per_s"], 2 * prefix / rates["copy_bytes_per_s"]),
        "flow_s": flow / rates["copy_bytes_per_s"],
    }


def _block(width: int, tower: Any) -> int:
    """Return the number of weights of a block."""
    heads = (2 * tower.heads + 2 * tower.kv_heads) * tower.head_dim
    return int(width * heads + 3 * width * tower.mlp)


def draw(module: nn.Module, device: torch.device) -> None:
    """Draw weights: scale-preserving matrices, unit norm weights, zero biases."""
    generator = torch.Generator(device).manual_seed(1)
    for part in module.modules():
        for value in part.parameters(recurse=False):
            if value.dim() > 1:
                value.normal_(0.0, value[0].numel() ** -0.5, generator=generator)
            elif isinstance(part, nn.LayerNorm) and value is part.weight:
                value.fill_(1.0)
            else:
                value.zero_()
