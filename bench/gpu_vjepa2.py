"""V-JEPA 2 and 2-AC on one GPU with random weights in the official shapes, from pixels on the host to
latents.

Run from the repository root: `python -m bench.gpu_vjepa2 [--out FILE]`. Writes JSON after each section and prints it:
clips per second of the encoders at several batch sizes and their share of this device's GEMM bound; single frames as
the world model encodes them; a layer's attention over cached frames by number of KV splits; rollouts after the encode
by horizon and number of candidates with their lower bounds; kernels and gaps of ViT-L, ViT-g and rollouts. `--part
server` measures a deployment over HTTP. A failing section writes its traceback and the others run; the exit code is 1.
`--tiny --device cpu` runs the same with small sizes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bench.families.clip_requests import Load, served
from bench.families.clock import ceilings, timed
from bench.families.policy import Place, draw
from bench.families.sections import Sections
from bench.families.timeline import timeline
from bench.families.world import (
    Rolling,
    attending,
    attention_seconds,
    encode_operations,
    random_nodes,
    step_seconds,
    trial,
)
from bench.serving.figures import Figures, head
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.device import prepare_device, resolve_device
from mstar_core.weights.building import building
from mstar_vjepa2.checkpoint.config import ENCODERS, RELEASED_AC, ActionConfig, EncoderConfig, VitConfig, encoder_of
from mstar_vjepa2.nodes.encoder import ClipEncoder, FrameEncoder

FRAMES: Final = 64
TINY: Final = replace(encoder_of(48, 2, 3, 192, crop=32, clip_frames=8), patch=8)
TINY_AC: Final = ActionConfig(
    encoder=TINY, predictor=VitConfig(width=36, layers=2, heads=3, inner=144), uses_extrinsics=False, most_frames=37
)
PARTS: Final = ("encoders", "attention", "world", "server")


@dataclass(slots=True)
class Bench:
    """One run. rates: the device's ceilings, operations and bytes per second."""

    options: argparse.Namespace
    device: torch.device
    figures: Figures
    rates: dict[str, float]

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the models."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def arm(self) -> ActionConfig:
        """Config of the world model. Eight context frames and a horizon of 30 exceed the released limit by five."""
        return TINY_AC if self.options.tiny else replace(RELEASED_AC, most_frames=37)

    def samples(self, run: Callable[[], object]) -> list[float]:
        """Return the seconds of several runs after two warm-up runs: as many as fit the time of one figure,
        at least 3.
        """
        (once,) = timed(run, self.device, 1, warm=1)
        count = min(self.options.repeats, int(self.options.seconds / max(once, 1e-6)))
        return timed(run, self.device, max(3, count), warm=0)


def main() -> int:
    """Measure, write and print the report."""
    options = read_options()
    device = resolve_device(options.device)
    prepare_device(device)
    report: dict[str, Any] = {**head(), "model": "small sizes" if options.tiny else "official shapes, random weights"}
    bench = Bench(options, device, Figures(), {})
    sections = Sections(report, bench.figures, options.out)
    with torch.inference_mode():
        if set(options.part) - {"server"}:
            size = {"size": 256, "copied_bytes": 1 << 20} if options.tiny else {}
            bench.rates = sections.run("ceilings", partial(ceilings, device, **size)) or {}
        if "attention" in options.part:
            for cached in options.cached:
                sections.run(f"attention_{cached}", partial(attention, bench, cached))
        if "world" in options.part:
            for count in options.frames:
                sections.run(f"frames_{count}", partial(frames, bench, count))
            world(bench, sections)
        if "encoders" in options.part:
            chosen = {"tiny": TINY} if options.tiny else {name: ENCODERS[name] for name in options.encoder}
            for name, facts in chosen.items():
                encoder(bench, sections, name, facts)
    if "server" in options.part:
        server(bench, sections)
    sections.save()
    print(json.dumps(report, indent=1), flush=True)
    return int(bool(sections.failed))


# -- encoders --------------------------------------------------------------------------------------------------------


def encoder(bench: Bench, sections: Sections, name: str, facts: EncoderConfig) -> None:
    """Measure clips of uint8 on the device to latents, by batch size; kernels and gaps of the smallest batch."""
    with building(bench.device, bench.dtype):
        node = ClipEncoder(facts)
    draw(node.eval().requires_grad_(False), bench.device)
    for count in bench.options.clips:
        sections.run(f"{name}_clips_{count}", partial(clips, bench, name, node, count))
    first = bench.options.clips[0]
    sections.run(f"{name}_profile", lambda: timeline(partial(_encode, node, _clips(bench, node, first)), bench.device))


def clips(bench: Bench, name: str, node: ClipEncoder, count: int) -> dict[str, Any]:
    """Measure an encoder. share_of_bound: operations at the GEMM rate, divided by the seconds taken."""
    given = _clips(bench, node, count)
    samples = bench.samples(partial(_encode, node, given))
    floor = encode_operations(node.encoder.config, count, given.shape[1]) / bench.rates["product_per_s"]
    bench.figures.add(f"{name}_clips_{count}", samples)
    bench.figures.add(f"{name}_clips_per_s_{count}", [count / value for value in samples], "1/s")
    bench.figures.add(f"{name}_share_of_bound_{count}", [floor / value for value in samples], "1")
    return {"floor_s": floor}


def _clips(bench: Bench, node: ClipEncoder, count: int) -> Tensor:
    facts = node.encoder.config
    frames = facts.clip_frames if bench.options.tiny else FRAMES
    return _pixels((count, frames, 3, facts.crop, facts.crop), bench.device)


def _encode(node: ClipEncoder, given: Tensor) -> Tensor:
    made = node(pixel_values_videos=given)["encoder_hidden"]
    assert isinstance(made, Tensor)
    return made


# -- the world model -------------------------------------------------------------------------------------------------


def frames(bench: Bench, count: int) -> dict[str, Any]:
    """Measure single frames as the world model encodes them, with and without graphs."""
    facts = bench.arm.encoder
    with building(bench.device, bench.dtype):
        whole = FrameEncoder(facts).encoder
    draw(whole.eval().requires_grad_(False), bench.device)
    pixels = _pixels((count, 1, 3, facts.crop, facts.crop), bench.device)
    bench.figures.add(f"frames_plain_{count}", bench.samples(partial(whole.hidden, pixels)))
    whole.capture(GraphCache(bench.device))
    whole(pixels)
    while whole.idle():
        pass
    bench.figures.add(f"frames_captured_{count}", bench.samples(partial(whole, pixels)))
    floor = encode_operations(facts, count, 1) / bench.rates["product_per_s"]
    return {"floor_s": floor, "counters": whole.counters()}


def attention(bench: Bench, cached: int) -> dict[str, Any]:
    """Measure one layer's attention of a frame over `cached` frames, by number of KV splits, and torch's
    attention.

    torch reads contiguous keys, unlike a paged cache.
    """
    found: dict[str, Any] = {"floor_s": attention_seconds(bench.arm, cached, bench.rates)}
    for name, run in attending(bench.arm, cached, bench.device, bench.dtype).items():
        bench.figures.add(f"attention_{name}_cached_{cached}", bench.samples(run))
    return found


def world(bench: Bench, sections: Sections) -> None:
    """Measure rollouts by context frames, candidates and horizon: captured, and the first also uncaptured."""
    options, facts = bench.options, bench.arm
    made: dict[str, Rolling] = {}
    for is_captured in (True, False):
        chosen, kind = options.rollout if is_captured else options.rollout[:1], "captured" if is_captured else "plain"
        made.clear()  # frees its cache for the next one

        def make(chosen: list[tuple[int, int, int]] = chosen, is_captured: bool = is_captured) -> None:
            most = max(candidates * (horizon + context) for context, candidates, horizon in chosen)
            frames = max(context - 1 + horizon for context, _, horizon in chosen)
            place = Place(
                device=bench.device,
                dtype=bench.dtype,
                attention=options.attention,
                requests=-(-most // frames) + 2,
                is_captured=is_captured,
            )
            made["rolling"] = Rolling(facts, random_nodes(facts, place), place, frames)

        sections.run(f"engines_{kind}", make)
        for each in chosen if made else ():
            label = "{}_context_{}_candidates_{}_steps_{}".format(kind, *each)
            sections.run(f"rollout_{label}", partial(rollout, bench, made["rolling"], label, each))
            if is_captured and each in (options.rollout[0], options.profiled):
                sections.run(f"profile_{label}", partial(profiled, bench, made["rolling"], each))


def rollout(bench: Bench, rolling: Rolling, label: str, asked: tuple[int, int, int]) -> dict[str, Any]:
    """Measure whole requests, and their context and steps, with the lower bounds of both."""
    context, candidates, horizon = asked
    wanted = _trial(bench, asked)
    rolling.whole(wanted)
    rolling.driver.capture()
    rolling.whole(wanted)
    whole = bench.samples(partial(rolling.whole, wanted))
    bench.figures.add(f"rollout_whole_{label}", whole)
    for _ in whole:
        handle, latents = rolling.encode(wanted)
        read = timed(partial(rolling.context, handle, wanted, latents), bench.device, 1, warm=0)
        bench.figures.add(f"rollout_context_{label}", read)
        steps = timed(partial(rolling.roll, handle, wanted, latents), bench.device, 1, warm=0)
        bench.figures.add(f"rollout_steps_{label}", steps)
        rolling.driver.close(handle)
    ahead = [step_seconds(bench.arm, candidates, context - 1 + step, bench.rates) for step in range(horizon)]
    before = [step_seconds(bench.arm, 1, step, bench.rates) for step in range(context - 1)]
    return {"floor_steps_s": sum(ahead), "floor_context_s": sum(before), "counters": rolling.counters()}


def profiled(bench: Bench, rolling: Rolling, asked: tuple[int, int, int]) -> dict[str, Any]:
    """Profile the kernels and gaps of a rollout's steps."""
    wanted = _trial(bench, asked)
    handle, latents = rolling.encode(wanted)
    rolling.context(handle, wanted, latents)
    found = timeline(partial(rolling.roll, handle, wanted, latents), bench.device)
    rolling.driver.close(handle)
    return found


def _trial(bench: Bench, asked: tuple[int, int, int]) -> Any:
    made = trial(bench.arm, *asked)
    return replace(made, clip=made.clip.to(bench.device))


def _pixels(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


# -- the whole server ------------------------------------------------------------------------------------------------


def server(bench: Bench, sections: Sections) -> None:
    """Measure `mstarctl up` of both models over HTTP."""
    options = bench.options
    load = Load(alone=options.alone, clients=options.clients, each=options.each, is_tiny=options.tiny)
    scratch = Path(tempfile.mkdtemp(prefix="mv-", dir="/tmp"))
    try:
        for number, model in enumerate(options.model):
            run = partial(
                served,
                load,
                model=model,
                device=options.device,
                port=options.port + number,
                scratch=scratch,
                folder=options.folder,
                figures=bench.figures,
                sections=sections,
            )
            sections.run(f"server_{model}", run)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", default=list(PARTS[:3]), choices=PARTS)
    parser.add_argument("--encoder", nargs="*", default=["vitl", "vitg"], choices=list(ENCODERS))
    parser.add_argument("--clips", type=int, nargs="*", default=[1, 8, 32], help="clips of a batch")
    parser.add_argument("--frames", type=int, nargs="*", default=[1, 8], help="single frames of a batch")
    parser.add_argument("--cached", type=int, nargs="*", default=[1, 8, 37], help="frames that attention looks back at")
    parser.add_argument(
        "--rollout",
        type=three,
        nargs="*",
        default=[(8, 1, 30), (1, 1, 30), (8, 1, 15), (1, 64, 2), (1, 400, 2)],
        help="CONTEXT:CANDIDATES:HORIZON; the first also without graphs",
    )
    parser.add_argument(
        "--profiled", type=three, default=(1, 64, 2), help="the rollout that is profiled, and the first"
    )
    parser.add_argument("--attention", default=None, help="backend of the cache; default flashinfer, torch on the CPU")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one figure; at least three samples are taken")
    parser.add_argument("--model", nargs="*", default=["vjepa2", "vjepa2_ac"], help="what the server part starts")
    parser.add_argument("--alone", type=int, default=10, help="requests one after the other at the server")
    parser.add_argument("--clients", type=int, default=8, help="clients at once")
    parser.add_argument("--each", type=int, default=4, help="requests of each of them")
    parser.add_argument("--folder", type=Path, help="where the server's checkpoints are, or are written and kept")
    parser.add_argument("--port", type=int, default=18134)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes in place of the official shapes")
    parser.add_argument("--out", type=Path, help="report file; raw samples are written beside it")
    options = parser.parse_args()
    options.attention = options.attention or ("flashinfer" if options.device == "cuda" else "torch")
    return options


def three(text: str) -> tuple[int, int, int]:
    """Parse `8:1:30` into three numbers."""
    context, candidates, horizon = map(int, text.split(":"))
    return context, candidates, horizon


if __name__ == "__main__":
    sys.exit(main())
