"""BAGEL's parts on one GPU with random weights: attention, GEMMs, autoencoder, encoders, image steps, decoding.

Run from the repository root: `python -m bench.gpu_bagel_steps [--out FILE]`. Engines run in this process, so times
contain no server. Each image size is run for a few steps: device time per step and by kernel, host time per step, and
kernel launches. `--tiny --device cpu` runs the same with small sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from bench.families.bagel_checkpoint import write_random
from bench.families.clock import by_family, timed, wait
from bench.families.sections import Sections
from bench.serving.figures import Figures, head
from mstar_bagel.checkpoint.config import Autoencoder, Language, Sizes, Vision
from mstar_bagel.graph import LOOK, MARKERS, PAGE, BagelGraph, build
from mstar_bagel.model import Bagel
from mstar_bagel.nodes.autoencoder import CleanLatents, Pixels
from mstar_bagel.nodes.flow import FlowSteps
from mstar_bagel.nodes.vision import ImageFeatures
from mstar_bagel.plugin import mstar_models
from mstar_core.engine.attention.backend import backend
from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.device import prepare_device, resolve_device
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.engine.steps.attention import AttentionMetadata
from mstar_core.graph.declare.nodes import STEP, Attend
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.linear import fuse_projections
from mstar_core.plugin.model import ModelContext

PROMPT: Final = 12
MAIN, CFG_TEXT = "main", "cfg_text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes. grids: sides of images in latent tokens. cached: (latent tokens, cached tokens) of attention."""

    sizes: Sizes
    grids: tuple[int, ...] = (64, 32)
    cached: tuple[tuple[int, int], ...] = ((4096, 0), (4096, 14), (4096, 8902), (1024, 74))
    seen: tuple[int, ...] = (37, 70)
    decoded: tuple[int, ...] = (1, 16)
    words: int = 64
    steps: int = 5
    most_tokens: int = 20480


TINY: Final = Scale(
    sizes=Sizes(
        language=Language(width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=96, vocab=151700),
        vision=Vision(width=64, layers=2, heads=4, mlp=96),
        vae=Autoencoder(width=32, multipliers=(1, 1, 1, 1), blocks=1, channels=16),
    ),
    grids=(4,),
    cached=((16, 0), (16, 20)),
    seen=(4,),
    decoded=(1, 2),
    words=4,
    steps=2,
    most_tokens=512,
)


def main() -> int:
    """Measure, write and print the report."""
    options = read_options()
    device = resolve_device(options.device)
    prepare_device(device)
    figures, report = Figures(), {**head(), "model": "bagel, random weights"}
    sections = Sections(report, figures, options.out)
    scale: Scale = options.scale
    with torch.inference_mode():
        for name, part in parts(scale, device, options.page):
            if not options.only or name in options.only:
                started = time.perf_counter()
                made = sections.run(name, part)
                print(f"== {name}: {time.perf_counter() - started:.1f} s", flush=True)
                print(json.dumps(made, indent=1), flush=True)
    sections.save()
    return int(bool(sections.failed))


def parts(scale: Scale, device: torch.device, page: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the sections, those that need no weights first."""
    for tokens, cached in scale.cached:
        yield f"attention_{tokens}_{cached}", partial(attention, scale, device, tokens + MARKERS, cached, page)
    yield "products", partial(products, scale, device)
    loaded = Loaded(scale, device, page)
    yield "load", loaded.load
    for side in scale.grids:
        for name, branches, together, captured in (
            ("", (MAIN,), True, False),
            ("_captured", (MAIN,), True, True),
            ("_guided", (MAIN, CFG_TEXT), True, False),
            ("_guided_in_turn", (MAIN, CFG_TEXT), False, False),
            ("_guided_captured", (MAIN, CFG_TEXT), True, True),
        ):
            if not captured or side < max(scale.grids) or len(scale.grids) == 1:
                run = partial(loaded.steps, side, branches, together=together, captured=captured)
                yield f"steps_{side}{name}", run
    for side in scale.grids:
        yield f"pixels_{side}", partial(loaded.pixels, side)
        yield f"latents_{side}", partial(loaded.latents, side)
    for side in scale.seen:
        yield f"features_{side}", partial(loaded.features, side)
    yield "decode", loaded.decode


# -- attention and GEMMs -----------------------------------------------------------------------------------------------


def attention(scale: Scale, device: torch.device, tokens: int, cached: int, page: int) -> dict[str, Any]:
    """Return milliseconds and TFLOP/s of each way to attend for one unmasked pass of one layer that only reads."""
    sizes, dtype = scale.sizes.language, dtype_of(device)
    heads, kv_heads, width = sizes.heads, sizes.kv_heads, sizes.head_dim
    pages = -(-(cached + tokens) // page) + 1
    pools = [torch.randn(pages + 1, 2, page, kv_heads, width, device=device).to(dtype)]
    packed = torch.randn(tokens, heads + 2 * kv_heads, width, device=device).to(dtype)
    query, key, value = (each.contiguous() for each in packed.split([heads, kv_heads, kv_heads], dim=1))
    tables = np.arange(pages, dtype=np.int32)[None]
    operations = 4 * tokens * (tokens + cached) * heads * width
    found: dict[str, Any] = {"tokens": tokens, "cached": cached, "cudnn": torch.backends.cudnn.version()}
    ways: dict[str, Callable[[], Tensor]] = {}
    for name in ("torch", "flashinfer") if device.type == "cuda" else ("torch",):
        made = backend(name, pools, page)
        for writes in (False, True):
            first, lengths = np.zeros(1, dtype=np.int64), np.array([cached])
            step = AttentionMetadata.of(first, lengths, tables, tokens, causal=False, writes=writes)
            view = made.plan(step)
            ways[f"{name}{' appending' if writes else ''}"] = partial(view.attend, 0, query, key, value)
    ways |= _library_ways(query, key, value, cached)
    if device.type == "cuda":
        ways |= _own_kernels(pools[0], (query, key, value), cached)
    wanted = reference = None
    for name, way in ways.items():
        try:
            began = time.perf_counter()
            out = way()
            wait(device)
            first = time.perf_counter() - began
            seconds = statistics.median(timed(way, device, 5, 2))
            entry = {"first_ms": first * 1e3, "ms": seconds * 1e3, "tflops": operations / seconds / 1e12}
            if "new keys" not in name:
                wanted = out.float() if wanted is None and name == "torch" else wanted
                if wanted is not None and name in ("torch", "torch appending", "flashinfer", "flashinfer appending"):
                    entry["away"] = float((out.float() - wanted).norm() / wanted.norm())
            reference = out.float() if name == "library flash grouped" else reference
            if reference is not None and name == "merged":
                entry["away"] = float((out.float() - reference).norm() / reference.norm())
            entry["strides"] = list(out.stride())
            found[name] = entry
        except Exception as error:  # noqa: BLE001 one way of several
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def _library_ways(query: Tensor, key: Tensor, value: Tensor, cached: int) -> dict[str, Callable[[], Tensor]]:
    """Return PyTorch's kernels over contiguous keys of `cached` more tokens, and the first call at a new length."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    more = key.new_zeros((cached, *key.shape[1:])).normal_()
    keys, values = torch.cat([more, key]), torch.cat([more, value])

    def run(kinds: list[Any], keys: Tensor, values: Tensor, *, folds: bool) -> Tensor:
        count, heads, width = query.shape
        kv_heads = keys.shape[1]
        with sdpa_kernel(kinds):
            if folds:
                folded = query.view(count, kv_heads, -1, width).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, width)
                return scaled_dot_product_attention(folded, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            given = (each.transpose(0, 1)[None] for each in (query, keys, values))
            out = scaled_dot_product_attention(*given, enable_gqa=True)
            return out[0].transpose(0, 1).reshape(count, heads, width)

    kinds = {
        "flash": [SDPBackend.FLASH_ATTENTION],
        "cudnn": [SDPBackend.CUDNN_ATTENTION],
        "any": [
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ],
    }
    ways: dict[str, Callable[[], Tensor]] = {}
    merged: dict[str, Callable[[], Tensor]] = {}
    if not query.is_cuda:
        kinds = {"any": kinds["any"]}
    else:
        merged = _merged_ways(query, (key, value), (more, values[:cached]))
    for name, kind in kinds.items():
        ways[f"library {name} grouped"] = partial(run, kind, keys, values, folds=False)
        ways[f"library {name} folded"] = partial(run, kind, keys, values, folds=True)
        for fewer in (1, 2):  # the cost of a length that was not seen before is in first_ms
            ways[f"library {name} grouped, {fewer} new keys less"] = partial(
                run, kind, keys[fewer:], values[fewer:], folds=False
            )
    return ways | merged


def _merged_ways(
    query: Tensor, own: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """Return cuDNN's kernel over the new keys alone, and merged with a pass over the cached keys by its sums."""
    calls = torch.ops.aten

    def heads_first(*given: Tensor) -> list[Tensor]:
        return [each.transpose(0, 1)[None] for each in given]

    def cudnn(keys: tuple[Tensor, Tensor], *, sums: bool) -> tuple[Tensor, Tensor]:
        made = calls._scaled_dot_product_cudnn_attention(*heads_first(query, *keys), None, sums, 0.0, False, False)
        return made[0], made[1]

    def flash(keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        made = calls._scaled_dot_product_flash_attention(*heads_first(query, *keys), 0.0, False, False)
        return made[0], made[1]

    def merged() -> Tensor:
        first, second = cudnn(own, sums=True), flash(held)
        tops = [each[1].reshape(first[0].shape[:3]) for each in (first, second)]
        share = torch.sigmoid(tops[0] - tops[1])[..., None]
        return (first[0] * share + second[0] * (1 - share))[0].transpose(0, 1).to(query.dtype)

    ways: dict[str, Callable[[], Tensor]] = {
        "cudnn direct, new keys": lambda: cudnn(own, sums=False)[0],
        "cudnn direct with sums, new keys": lambda: cudnn(own, sums=True)[0],
    }
    if len(held[0]):
        ways["flash direct with sums, cached keys"] = lambda: flash(held)[0]
        ways["merged"] = merged
    return ways


def _own_kernels(pool: Tensor, given: tuple[Tensor, Tensor, Tensor], cached: int) -> dict[str, Callable[[], Tensor]]:
    """Return this project's kernels for passes that only read, on pages of 64 tokens."""
    from mstar_core.engine.attention.kernels import gqa_packed
    from mstar_core.engine.attention.kernels.prefix import PagedPrefixAttention
    from mstar_core.engine.attention.static import LOG2E, AttentionBuffers
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

    query = given[0]
    count, width = query.shape[0], query.shape[2]
    pages = max(1, -(-cached // 64))
    paged = torch.randn(pages + 1, 2, 64, pool.shape[3], width, device=pool.device).to(pool.dtype)
    shape = AttentionShape(sequences=1, tokens=count, pages=pages, writes=False)
    kernels = PagedPrefixAttention([paged], 64, shape)
    buffers = AttentionBuffers(kernels, pool.device)
    tables = np.arange(pages, dtype=np.int32)[None]
    first, lengths = np.zeros(1, np.int64), np.array([cached])
    buffers.prepare(AttentionMetadata.of(first, lengths, tables, count, causal=False, writes=False))
    factor = width**-0.5 * LOG2E
    found: dict[str, Callable[[], Tensor]] = {}
    if gqa_packed.supports(query, paged):
        descriptor = gqa_packed.descriptor_of(paged)
        found["gqa_packed"] = lambda: gqa_packed.attend(given, paged, descriptor, buffers.device, factor, shape, 1)
    tiles = -(-count * (query.shape[1] // pool.shape[3]) // 64)
    grid = (tiles, 1, pool.shape[3])
    found["prefix split-KV"] = lambda: kernels._attend_split_kv(given, paged, factor, grid)
    return found


def products(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Return milliseconds and TFLOP/s of the GEMMs of one expert, by rows."""
    sizes, dtype = scale.sizes.language, dtype_of(device)
    inner = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    shapes = {
        "qkv": (inner, sizes.width, True),
        "output": (sizes.width, sizes.heads * sizes.head_dim, False),
        "gate_up": (2 * sizes.mlp, sizes.width, False),
        "down": (sizes.width, sizes.mlp, False),
    }
    found: dict[str, Any] = {}
    for rows in sorted(
        {count * side * side + extra for side in scale.grids for count, extra in ((1, 0), (1, 2), (2, 0))}
    ):
        own: dict[str, Any] = {}
        for name, (outputs, inputs, has_bias) in shapes.items():
            weight = torch.randn(outputs, inputs, device=device).to(dtype) / inputs**0.5
            bias = torch.zeros(outputs, device=device, dtype=dtype) if has_bias else None
            x = torch.randn(rows, inputs, device=device).to(dtype)
            seconds = statistics.median(timed(partial(linear, x, weight, bias), device, 5, 2))
            own[name] = {"ms": seconds * 1e3, "tflops": 2 * rows * outputs * inputs / seconds / 1e12}
        found[str(rows)] = own
    return found


# -- nodes -------------------------------------------------------------------------------------------------------------


class Loaded:
    """All nodes, with random weights made on the device."""

    def __init__(self, scale: Scale, device: torch.device, page: int) -> None:
        self.scale = scale
        self.device = device
        self.page = page
        self.nodes: dict[str, nn.Module] = {}
        self.graph: BagelGraph = build(scale.sizes)
        self._keys = 0

    def load(self) -> dict[str, float]:
        """Build the nodes. Returns the seconds of each."""
        took: dict[str, float] = {}
        with tempfile.TemporaryDirectory(prefix="mb-") as scratch:
            folder = write_random(Path(scratch) / "weights", seed=1, sizes=self.scale.sizes)
            spec = mstar_models()[0].bound(folder, {})
            context = ModelContext(
                spec=spec,
                folder=folder,
                device=self.device,
                dtype=dtype_of(self.device),
                model_kwargs=spec.model_kwargs,
            )
            model = Bagel(context)
            for name in ("LLM", "vit_encoder", "vae_encoder", "vae_decoder", "combine_cfg"):
                began = time.perf_counter()
                self.nodes[name] = model.get_submodule(spec.node(name))
                if name == "LLM" and self.device.type == "cuda":
                    fuse_projections(self.nodes[name])
                wait(self.device)
                took[name] = time.perf_counter() - began
        return took

    def engine(self, graphs: CaptureSizes | None = None, slots: int = 4, *, together: bool = True) -> KVCacheEngine:
        """Make an engine for the LLM. together: whether passes of any size share a forward."""
        scale, on_gpu = self.scale, self.device.type == "cuda"
        llm = next(node for node in self.graph.nodes if node.name == "LLM")
        settings = KVSettings(
            device=self.device,
            dtype=dtype_of(self.device),
            attention="flashinfer" if on_gpu else "torch",
            vocab=scale.sizes.language.vocab,
            lookahead=int(on_gpu),
            prefix_cache=False,
            graphs=graphs or CaptureSizes(),
            num_pages=-(-scale.most_tokens // self.page),
            page_size=self.page,
            max_slots=slots,
            max_seq_len=scale.most_tokens // 2,
            token_budget=scale.most_tokens if together else 64,
        )
        hints = replace(llm.hints, pass_tokens=scale.most_tokens if together else 0)
        return KVCacheEngine(replace(llm, hints=hints), cast("Any", self.nodes["LLM"]), settings)

    def steps(self, side: int, branches: tuple[str, ...], *, together: bool, captured: bool) -> dict[str, Any]:
        """Return times of image steps as the engine runs them: forwards of all branches and the Euler step.

        together: whether the branches share a forward.
        """
        engine = self.engine(CaptureSizes(decode=(1,)) if captured else None, 6, together=together)
        scale = self.scale
        flow = cast("FlowSteps", self.nodes["combine_cfg"])
        handle = Handle(1)
        engine.open(handle, SamplingParams(), side * side + 2 * PROMPT)
        engine.submit(self._job(handle, {"tokens": torch.arange(PROMPT)}))
        running = engine.launch()
        assert running is not None
        engine.collect(running)
        noise = torch.randn(side, side, scale.sizes.latent_width, device=self.device)
        times = torch.tensor([[1.0 - 0.02 * step, 0.02, step, 0.0] for step in range(scale.steps)])
        guidance = np.array([4.0, 1.0, 0.0, 0.0, scale.steps], dtype=np.float32)
        host: list[float] = []
        forwards = 0

        def run() -> None:
            nonlocal forwards
            host.clear()
            latents, forwards = noise, 0
            for step in range(scale.steps):
                began = time.perf_counter()
                found: dict[str, Tensor] = {}
                for branch in branches:
                    inputs = {"latents": latents, "times": times, STEP: torch.tensor(step)}
                    engine.submit(self._job(handle, inputs, branch=branch, attend=LOOK, outputs=("velocity",)))
                while len(found) < len(branches):
                    launched = engine.launch()
                    assert launched is not None
                    forwards += 1
                    for done in engine.collect(launched).done:
                        found[done.job.branch] = done.outputs["velocity"]
                both = {"v_text": [found[CFG_TEXT]]} if CFG_TEXT in found else {}
                latents = flow(
                    seeds=np.zeros(1, np.int64),
                    latents=[latents],
                    v=[found[MAIN]],
                    guidance=[guidance],
                    times=[times.numpy()],
                    step=np.array([step]),
                    **both,
                )["latents"][0]
                host.append(time.perf_counter() - began)

        run()
        while engine.idle():
            pass
        seconds = statistics.median(timed(run, self.device, 3, 1))
        profile = by_family(run, self.device)
        tokens = side * side
        language = scale.sizes.language
        linears = len(branches) * scale.steps * 2 * tokens * layer_weights(language) * language.layers
        engine.close(handle)
        return {
            "graph_hits": engine.counters().get("graph_hits", 0.0),
            "step_ms": seconds / scale.steps * 1e3,
            "forwards_per_step": forwards / scale.steps,
            "host_ms_per_step": [each * 1e3 for each in host],
            "device_busy_ms_per_step": profile["busy_s"] / scale.steps * 1e3,
            "launches_per_step": profile["launches"] / scale.steps,
            "linears_tflops": linears / max(1e-9, profile["by_family_s"].get("products", 0.0)) / 1e12,
            "by_family_ms_per_step": {k: v / scale.steps * 1e3 for k, v in profile["by_family_s"].items()},
            "slowest_ms_per_step": {k: v / scale.steps * 1e3 for k, v in profile["slowest_s"].items()},
        }

    def pixels(self, side: int) -> dict[str, Any]:
        """Return seconds of decoding one image by dtype and memory format, and PSNR against float32."""
        node = cast("Pixels", self.nodes["vae_decoder"])
        tokens = torch.randn(side, side, self.scale.sizes.latent_width, device=self.device)
        return self._variants(node.decoder, lambda: node.pixels(node.decode(tokens)), lambda: node(latents=[tokens]))

    def latents(self, side: int) -> dict[str, Any]:
        """Return seconds of encoding one image by dtype and memory format."""
        node = cast("CleanLatents", self.nodes["vae_encoder"])
        pixels = 8 * self.scale.sizes.latent_patch * side
        image = torch.rand(3, pixels, pixels, device=self.device) * 2 - 1
        vae = self.scale.sizes.vae

        def encoded() -> Tensor:
            dtype = node.encoder.conv_in.weight.dtype
            return node.encoder(image[None].to(dtype))[0, : vae.channels].float()

        return self._variants(node.encoder, encoded, lambda: node(image=[image]))

    def _variants(self, module: nn.Module, run: Callable[[], Tensor], whole: Callable[[], object]) -> dict[str, Any]:
        found: dict[str, Any] = {"node_ms": statistics.median(timed(whole, self.device, 2, 1)) * 1e3}
        wanted: Tensor | None = None
        before = next(module.parameters()).dtype
        try:
            for dtype, tf32, layout, benchmark in (
                (torch.float32, False, torch.contiguous_format, False),
                (torch.float32, True, torch.contiguous_format, False),
                (torch.float32, True, torch.channels_last, True),
                (torch.bfloat16, False, torch.contiguous_format, False),
                (torch.bfloat16, False, torch.channels_last, False),
                (torch.bfloat16, False, torch.channels_last, True),
            ):
                torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
                torch.backends.cudnn.benchmark = benchmark
                module.to(dtype=dtype, memory_format=layout)
                name = f"{str(dtype)[6:]}{' tf32' if tf32 else ''}{' last' if layout is torch.channels_last else ''}"
                began = time.perf_counter()
                out = run().float()
                wait(self.device)
                first = time.perf_counter() - began
                wanted = out if wanted is None else wanted
                error = float((out - wanted).square().mean())
                peak = 255.0 if float(wanted.max()) > 100 else float(wanted.abs().max())
                found[name + (" benchmark" if benchmark else "")] = {
                    "first_ms": first * 1e3,
                    "ms": statistics.median(timed(run, self.device, 2, 1)) * 1e3,
                    "psnr_db": 10 * float(np.log10(peak**2 / max(error, 1e-12))),
                }
        finally:
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.benchmark = False
            module.to(dtype=before, memory_format=torch.contiguous_format)
        return found

    def features(self, side: int) -> dict[str, Any]:
        """Return seconds of the vision encoder and of the LLM's pass over its features."""
        node, sizes = cast("ImageFeatures", self.nodes["vit_encoder"]), self.scale.sizes
        pixels = side * sizes.vision.patch
        image = torch.rand(3, pixels, pixels, device=self.device) * 2 - 1
        encode = partial(node, image=[image])
        encode()
        while node.idle():
            pass
        encoded = statistics.median(timed(encode, self.device, 3, 2))
        decoded = torch.randint(0, 256, (pixels, pixels, 3), dtype=torch.uint8, device=self.device)
        resized = statistics.median(timed(partial(node, image=[decoded]), self.device, 3, 2))
        features, engine = encode()["features"][0], self.engine()
        attend = Attend(mask="full", positions="shared", extra=MARKERS)

        def read() -> None:
            self._keys += 1
            handle = Handle(self._keys)
            engine.open(handle, SamplingParams(), side * side + MARKERS + PROMPT)
            engine.submit(self._job(handle, {"embeds": features}, attend=attend))
            engine.submit(self._job(handle, {"tokens": torch.arange(PROMPT)}))
            while (running := engine.launch()) is not None:
                engine.collect(running)
            wait(self.device)
            engine.close(handle)

        passed = statistics.median(timed(read, self.device, 3, 2))
        return {
            "encoder_ms": encoded * 1e3,
            "encoder_with_resizing_ms": resized * 1e3,
            "encoder": by_family(encode, self.device),
            "passes_ms": passed * 1e3,
            "passes": by_family(read, self.device),
        }

    def decode(self) -> dict[str, Any]:
        """Return milliseconds of captured decode steps by batch, and the kernels of one run."""
        scale, found = self.scale, dict[str, Any]()
        on_gpu = self.device.type == "cuda"
        engine = self.engine(CaptureSizes(decode=scale.decoded) if on_gpu else None, 3 * max(scale.decoded))
        for count in scale.decoded:
            seconds = statistics.median(timed(partial(self._answer, engine, count), self.device, 2, 1))
            profile = by_family(partial(self._answer, engine, count), self.device)
            found[str(count)] = {
                "step_ms": seconds / scale.words * 1e3,
                "tokens_per_s": count * scale.words / seconds,
                "busy_ms_per_step": profile["busy_s"] / scale.words * 1e3,
                "launches_per_step": profile["launches"] / scale.words,
                "slowest_ms_per_step": {k: v / scale.words * 1e3 for k, v in profile["slowest_s"].items()},
            }
        return found

    def _answer(self, engine: KVCacheEngine, count: int) -> None:
        handles, flight = [], list[Any]()
        for _ in range(count):
            self._keys += 1
            handles.append(Handle(self._keys))
            engine.open(handles[-1], SamplingParams(), PROMPT + self.scale.words + 2)
            engine.submit(self._job(handles[-1], {"tokens": torch.arange(PROMPT)}))
            loop = LoopSpec(max_iters=self.scale.words, carry={"token": "token"}, stop_port="token")
            engine.submit(self._job(handles[-1], {"token": torch.tensor([5])}, loop=loop, sample=True))
        while True:
            launched = engine.launch()
            flight += [launched] if launched is not None else []
            if not flight:
                break
            if len(flight) > 1 or launched is None:
                engine.collect(flight.pop(0))
        for handle in handles:
            engine.close(handle)

    def _job(self, handle: Handle, inputs: dict[str, Tensor], *, sample: bool = False, **fields: Any) -> Job:
        self._keys += 1
        return Job(key=JobKey(self._keys), handle=handle, inputs=inputs, sample=sample, **fields)


def layer_weights(sizes: Language) -> int:
    """Return the weights of one expert of one layer."""
    inner, shared = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return sizes.width * (2 * inner + 2 * shared) + 3 * sizes.width * sizes.mlp


def dtype_of(device: torch.device) -> torch.dtype:
    """Return the dtype of the models on a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes in place of the official shapes")
    parser.add_argument("--only", nargs="*", default=[], metavar="SECTION", help="sections to run")
    parser.add_argument("--page", type=int, default=PAGE, help="tokens of a KV page")
    parser.add_argument("--out", type=Path, help="report file")
    options = parser.parse_args()
    options.scale = TINY if options.tiny else Scale(sizes=Sizes())
    return options


if __name__ == "__main__":
    sys.exit(main())
