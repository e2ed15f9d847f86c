"""V-JEPA 2 and 2-AC on one GPU: random weights in the official shapes, made there; pixels on the host to latents.

Run from the repository root: `python -m bench.gpu_vjepa2 [--out FILE]`. Prints JSON: clips per second of the encoders
at several batches and their share of the bound that this device's own product sets; single frames as the world model
encodes them; rollouts beyond the encode by horizon and number of candidates with their floors; where device time goes
by family of kernel. `--tiny --device cpu` does the same with small sizes, to try the measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from bench.families.clock import by_family, ceilings, timed
from bench.families.policy import Place, draw
from bench.families.world import Rolling, encode_operations, random_nodes, step_seconds, trial
from bench.serving.figures import Figures, head, write
from mstar_core.engine.captured import Captures
from mstar_core.engine.device import prepare_device
from mstar_pi05.weights import building
from mstar_vjepa2.encoder import ClipEncoder, FrameEncoder
from mstar_vjepa2.facts import ENCODERS, RELEASED_AC, ActionFacts, EncoderFacts, VitFacts, encoder_of

FRAMES: Final = 64
TINY: Final = replace(encoder_of(48, 2, 3, 192, crop=32, clip_frames=8), patch=8)
TINY_AC: Final = ActionFacts(
    encoder=TINY, predictor=VitFacts(width=36, layers=2, heads=3, inner=144), uses_extrinsics=False, most_frames=37
)


def main() -> int:
    """Measure, print, write."""
    options = read_options()
    device = torch.device(options.device)
    prepare_device(device)
    begun, figures = head(), Figures()
    rates = ceilings(device, **({"size": 256, "copied_bytes": 1 << 20} if options.tiny else {}))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report: dict[str, Any] = {**begun, "model": "small sizes" if options.tiny else "official shapes, random weights"}
    report |= {"ceilings": rates, "encoders": {}, "rollouts": {}}
    with torch.inference_mode():
        if "encoders" in options.part:
            chosen = {"tiny": TINY} if options.tiny else {name: ENCODERS[name] for name in options.encoder}
            for name, facts in chosen.items():
                report["encoders"][name] = encoder(facts, name, device, dtype, options, figures, rates)
        if "world" in options.part:
            arm = TINY_AC if options.tiny else replace(RELEASED_AC, most_frames=37)
            report["rollouts"] = world(arm, device, dtype, options, figures, rates)
    report["metrics"] = figures.summary()
    if options.out:
        write(report, figures.samples, options.out)
    print(json.dumps(report, indent=1), flush=True)
    return 0


def encoder(
    facts: EncoderFacts, name: str, device: torch.device, dtype: torch.dtype, options: argparse.Namespace,
    figures: Figures, rates: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Clips of uint8 on the device to latents, by batch. share_of_bound: operations over the product's rate."""
    with building(device, dtype):
        node = ClipEncoder(facts)
    draw(node.eval().requires_grad_(False), device)
    frames = facts.clip_frames if options.tiny else FRAMES
    found: dict[str, Any] = {}
    for count in options.clips:
        clips = _pixels((count, frames, 3, facts.crop, facts.crop), device)
        run = partial(_encode, node, clips)
        samples = timed(run, device, options.repeats, warm=2)
        floor = encode_operations(facts, count, frames) / rates["product_per_s"]
        figures.add(f"{name}_clips_{count}", samples)
        figures.add(f"{name}_clips_per_s_{count}", [count / value for value in samples], "1/s")
        figures.add(f"{name}_share_of_bound_{count}", [floor / value for value in samples], "1")
        found[str(count)] = {"floor_s": floor}
        if count == options.clips[0]:
            found[str(count)]["profile"] = by_family(run, device)
    return found


def world(
    facts: ActionFacts, device: torch.device, dtype: torch.dtype, options: argparse.Namespace, figures: Figures,
    rates: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Single frames, then rollouts: (context frames, candidates, horizon). Captured, and the first also plainly."""
    frames = max(context - 1 + horizon for context, _, horizon in options.rollout)
    most = max(candidates * (horizon + context) for context, candidates, horizon in options.rollout)
    place = Place(device=device, dtype=dtype, attention=options.attention, requests=-(-most // frames) + 2)
    modules = random_nodes(facts, place)
    found: dict[str, Any] = {
        "frames": _frames(facts, cast("FrameEncoder", modules["video_encoder"]), device, options, figures, rates)
    }
    for is_captured in (True, False):
        rolling = Rolling(facts, modules, replace(place, is_captured=is_captured), frames)
        chosen = options.rollout if is_captured else options.rollout[:1]
        for context, candidates, horizon in chosen:
            label = (
                f"{'captured' if is_captured else 'plain'}_context_{context}_candidates_{candidates}_steps_{horizon}"
            )
            asked = trial(facts, context, candidates, horizon)
            asked = replace(asked, clip=asked.clip.to(device))
            rolling.whole(asked)
            rolling.turner.capture()
            rolling.whole(asked)
            few = max(3, options.repeats // candidates)
            figures.add(f"rollout_whole_{label}", timed(partial(rolling.whole, asked), device, few, warm=1))
            for _ in range(few):
                handle, latents = rolling.encode(asked)
                figures.add(f"rollout_context_{label}", timed(
                    partial(rolling.context, handle, asked, latents), device, 1, warm=0))  # fmt: skip
                figures.add(f"rollout_steps_{label}", timed(
                    partial(rolling.roll, handle, asked, latents), device, 1, warm=0))  # fmt: skip
                rolling.turner.close(handle)
            steps = [step_seconds(facts, candidates, context - 1 + step, rates) for step in range(horizon)]
            before = [step_seconds(facts, 1, step, rates) for step in range(context - 1)]
            found[label] = {"floor_steps_s": sum(steps), "floor_context_s": sum(before), "counters": rolling.counters()}
            if (context, candidates, horizon) == options.rollout[0]:
                found[label]["profile"] = by_family(partial(rolling.whole, asked), device)
    return found


def _frames(
    facts: ActionFacts, node: FrameEncoder, device: torch.device, options: argparse.Namespace, figures: Figures,
    rates: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """The world model's frames, each alone: by graphs and plainly."""
    whole = node.encoder
    found = {}
    for count in options.frames:
        pixels = _pixels((count, 1, 3, facts.encoder.crop, facts.encoder.crop), device)
        floor = encode_operations(facts.encoder, count, 1) / rates["product_per_s"]
        found[str(count)] = {"floor_s": floor}
        figures.add(f"frames_plain_{count}", timed(partial(whole.hidden, pixels), device, options.repeats))
        whole.capture(Captures(device))
        whole(pixels)
        while whole.idle():
            pass
        figures.add(f"frames_captured_{count}", timed(partial(whole, pixels), device, options.repeats))
    return found


def _encode(node: ClipEncoder, clips: Tensor) -> Tensor:
    made = node(pixel_values_videos=clips)["encoder_hidden"]
    assert isinstance(made, Tensor)
    return made


def _pixels(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", default=["encoders", "world"], choices=("encoders", "world"))
    parser.add_argument("--encoder", nargs="*", default=["vitl", "vitg"], choices=list(ENCODERS))
    parser.add_argument("--clips", type=int, nargs="*", default=[1, 8, 32], help="clips of a batch")
    parser.add_argument("--frames", type=int, nargs="*", default=[1, 8], help="single frames of a batch")
    parser.add_argument(
        "--rollout", type=three, nargs="*", default=[(8, 1, 30), (1, 1, 30), (8, 1, 15), (1, 64, 2), (1, 400, 2)],
        help="CONTEXT:CANDIDATES:HORIZON; the first also without graphs",
    )  # fmt: skip
    parser.add_argument("--attention", default=None, help="backend of the cache; default flashinfer, torch on the CPU")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes in place of the official shapes")
    parser.add_argument("--out", type=Path, help="the file of figures; raw samples go beside it")
    options = parser.parse_args()
    options.attention = options.attention or ("flashinfer" if options.device == "cuda" else "torch")
    return options


def three(text: str) -> tuple[int, int, int]:
    """`8:1:30` as numbers."""
    context, candidates, horizon = map(int, text.split(":"))
    return context, candidates, horizon


if __name__ == "__main__":
    sys.exit(main())
