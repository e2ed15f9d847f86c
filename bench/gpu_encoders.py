"""Qwen3-Omni's encoders and vocoder on one GPU with random weights in the official shapes (performance.md, encoders).

Run from the repository root: `python -m bench.gpu_encoders [--out FILE]`. Writes JSON after each section and prints it:
seconds of each node's call, from inputs on the device to outputs on the device, captured and uncaptured, with the
lower bound of its operations; the kernels of one call; the error of bfloat16 against float32. A failing section writes
its traceback and the others run; the exit code is 1. `--tiny --device cpu` runs the same with small sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from bench.families.clock import by_family, ceilings, timed
from bench.families.sections import Sections
from bench.serving.figures import Figures, head
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.device import prepare_device, resolve_device
from mstar_core.weights.building import building
from mstar_core.weights.random_fill import fill_randomly
from mstar_qwen3omni.checkpoint.config import AudioSizes, OmniConfig, VisionSizes, VocoderSizes
from mstar_qwen3omni.encoders.audio import AudioEncoder
from mstar_qwen3omni.encoders.patches import places_of
from mstar_qwen3omni.encoders.vision import VisionEncoder
from mstar_qwen3omni.vocoder.code2wav import Code2Wav

PARTS: Final = ("mel", "audio", "vision", "code2wav", "errors")
RATE: Final = 16_000
TINY: Final = OmniConfig(
    audio=AudioSizes(width=32, layers=2, heads=2, mlp=64, channels=8, output=32),
    vision=VisionSizes(width=64, layers=3, heads=2, mlp=64, positions=64, output=32, deepstack=(0, 1)),
    vocoder=VocoderSizes(
        codebook=64,
        groups=4,
        width=32,
        layers=2,
        heads=2,
        kv_heads=2,
        head_dim=16,
        mlp=64,
        window=8,
        decoder=64,
        rates=(4, 3),
        ratios=(2, 2),
    ),
)


@dataclass(slots=True)
class Bench:
    """One run. rates: the device's ceilings, operations and bytes per second."""

    options: argparse.Namespace
    device: torch.device
    config: OmniConfig
    figures: Figures
    rates: dict[str, float]

    def samples(self, run: Callable[[], object]) -> list[float]:
        """Return the seconds of each run."""
        return timed(run, self.device, self.options.repeats)

    def node(self, kind: type[nn.Module], dtype: torch.dtype = torch.bfloat16) -> Any:
        """Build a node with random weights."""
        with building(self.device, dtype):
            module = kind(self.config)
        fill_randomly(module, 7)
        for name, weight in module.named_parameters():
            if name.endswith((".scale", ".gamma")):
                weight.data.fill_(0.1)  # as in trained weights; zero would hide the branch from the errors
        return module.eval().requires_grad_(False)

    def both(self, name: str, node: Any, run: Callable[[], object], floor_s: float) -> dict[str, Any]:
        """Measure a call of a node uncaptured, then captured, and its kernels."""
        plain = self.samples(run)
        self.figures.add(f"{name}_plain", plain)
        found: dict[str, Any] = {"floor_s": floor_s, "kernels": by_family(run, self.device)}
        node.capture(GraphCache(self.device))
        run()
        while node.idle():
            pass
        run()
        self.figures.add(f"{name}_captured", self.samples(run))
        return {**found, "counters": node.counters()}


def main() -> int:
    """Run the sections."""
    options = read_options()
    device = resolve_device(options.device)
    prepare_device(device)
    report: dict[str, Any] = {**head(), "what": "encoders and vocoder of Qwen3-Omni, random weights"}
    figures, config = Figures(), TINY if options.tiny else OmniConfig()
    sections = Sections(report, figures, options.out)
    rates = ceilings(device, *((256, 1 << 20) if options.tiny else ()))
    report["rates"], bench = rates, Bench(options, device, config, figures, rates)
    parts: dict[str, Callable[[Bench, Sections], None]] = {
        "mel": mel,
        "audio": audio,
        "vision": vision,
        "code2wav": code2wav,
        "errors": errors,
    }
    for part in options.part:
        parts[part](bench, sections)
    sections.save()
    print(json.dumps(report, indent=1), flush=True)
    return int(bool(sections.failed))


def mel(bench: Bench, sections: Sections) -> None:
    """Measure spectrograms by number of clips."""
    module = AudioEncoder(TINY).log_mel
    for count, seconds in bench.options.clips:
        clips = [torch.randn(int(seconds * RATE), device=bench.device) for _ in range(count)]
        name = f"mel_{count}x{seconds:g}s"
        sections.run(name, lambda name=name, clips=clips: bench.figures.add(name, bench.samples(lambda: module(clips))))


def audio(bench: Bench, sections: Sections) -> None:
    """Measure the audio encoder from samples, by number of clips."""
    for count, seconds in bench.options.clips:
        clips = [torch.randn(1, int(seconds * RATE), device=bench.device) * 0.1 for _ in range(count)]
        name = f"audio_{count}x{seconds:g}s"
        sections.run(name, partial(_audio, bench, name, clips))


def _audio(bench: Bench, name: str, clips: list[Tensor]) -> dict[str, Any]:
    node = bench.node(AudioEncoder)
    tokens = sum(len(each) for each in node(audio=clips)["embeds"])
    floor = 2 * tokens * _weights(node.layers) / bench.rates["product_per_s"]
    return bench.both(name, node, lambda: node(audio=clips), max(floor, _reading(bench, node)))


def vision(bench: Bench, sections: Sections) -> None:
    """Measure the vision encoder by frames and side in patches."""
    for count, side in bench.options.frames:
        name = f"vision_{count}x{side * bench.config.vision.patch}"
        sections.run(name, partial(_vision, bench, name, count, side))


def _vision(bench: Bench, name: str, count: int, side: int) -> dict[str, Any]:
    node, sizes = bench.node(VisionEncoder), bench.config.vision
    shape = (count, side * side, sizes.patch_values)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=bench.device)
    places = places_of(side, side, sizes.merge, round(sizes.positions**0.5)).expand(count, -1, -1).to(bench.device)
    patches = count * side * side
    operations = 2 * patches * _weights(node.blocks) + 4 * patches * side * side * sizes.width * sizes.layers
    floor = operations / bench.rates["product_per_s"]
    return bench.both(name, node, lambda: node._replayed(pixels, places), floor)


def code2wav(bench: Bench, sections: Sections) -> None:
    """Measure Code2Wav by windows and their frames."""
    for count, frames in bench.options.windows:
        name = f"code2wav_{count}x{frames}"
        sections.run(name, partial(_code2wav, bench, name, count, frames))


def _code2wav(bench: Bench, name: str, count: int, frames: int) -> dict[str, Any]:
    node, sizes = bench.node(Code2Wav), bench.config.vocoder
    codes = torch.randint(0, sizes.codebook, (count, frames, sizes.groups), device=bench.device)
    node._lengths.add(frames)
    floor = count * frames * _vocoder_operations(sizes) / bench.rates["product_per_s"]
    return bench.both(name, node, lambda: node._decoded(codes), floor)


def _vocoder_operations(sizes: VocoderSizes) -> float:
    """Return the operations per frame: convolutions of the decoder, and twice the transformer's weights."""
    width = sizes.heads * sizes.head_dim * sizes.width * 4 + 3 * sizes.width * sizes.mlp
    steps, channels, total = 1, sizes.decoder, 2.0 * sizes.layers * width
    for ratio in sizes.ratios:
        steps *= ratio
        total += 2 * steps * (sizes.width**2 + 8 * sizes.width**2)
    total += 2 * steps * 7 * sizes.width * channels
    for rate in sizes.rates:
        total += 2 * steps * rate * 2 * channels * (channels // 2)
        steps, channels = steps * rate, channels // 2
        total += 2 * steps * 3 * 8 * channels**2
    return total


def errors(bench: Bench, sections: Sections) -> None:
    """Compare bfloat16, and TF32 of Code2Wav, with float32: relative error by norms, in dB for samples."""
    sections.run("errors", partial(_errors, bench))


def _errors(bench: Bench) -> dict[str, Any]:
    made = torch.Generator().manual_seed(3)
    config = bench.config
    clip = torch.randn(1, 5 * RATE, generator=made).to(bench.device) * 0.1
    side = 8 if bench.options.tiny else 32
    shape = (1, side * side, config.vision.patch_values)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=made).to(bench.device)
    table = round(config.vision.positions**0.5)
    places = places_of(side, side, config.vision.merge, table)[None].to(bench.device)
    shape = (2, 50, config.vocoder.groups)
    codes = torch.randint(0, config.vocoder.codebook, shape, generator=made).to(bench.device)
    runs: dict[str, tuple[type[nn.Module], Callable[[Any], Tensor]]] = {
        "audio": (AudioEncoder, lambda node: node(audio=[clip])["embeds"][0]),
        "vision": (VisionEncoder, lambda node: node.encode_frames(pixels, places)),
        "code2wav": (Code2Wav, lambda node: node.decode(codes)),
    }
    found = {}
    for name, (kind, run) in runs.items():
        exact = bench.node(kind, torch.float32)
        wanted = run(exact).double()
        rough = bench.node(kind)
        rough.load_state_dict(exact.state_dict())
        apart = (run(rough).double() - wanted).norm() / wanted.norm()
        found[name] = {"relative": float(apart), "snr_db": float(-20 * apart.log10())}
    return found


def _weights(part: nn.Module) -> int:
    return sum(each.numel() for each in part.parameters())


def _reading(bench: Bench, node: nn.Module) -> float:
    """Return the seconds that reading the weights takes at the copy rate, which counts reading and writing."""
    return sum(each.nbytes for each in node.parameters()) / bench.rates["copy_bytes_per_s"]


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument(
        "--clips", type=pair, nargs="*", default=[(1, 3.0), (1, 30.0), (16, 30.0)], help="CLIPS:SECONDS"
    )
    parser.add_argument(
        "--frames",
        type=whole_pair,
        nargs="*",
        default=[(1, 16), (1, 32), (1, 64), (8, 64), (32, 48)],
        help="FRAMES:SIDE in patches of 16 pixels",
    )
    parser.add_argument(
        "--windows",
        type=whole_pair,
        nargs="*",
        default=[(1, 8), (1, 50), (8, 50), (16, 50), (32, 50)],
        help="WINDOWS:FRAMES",
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes in place of the official shapes")
    parser.add_argument("--out", type=Path, help="report file; raw samples are written beside it")
    return parser.parse_args()


def pair(text: str) -> tuple[int, float]:
    """Parse `16:30` into clips and seconds."""
    count, _, seconds = text.partition(":")
    return int(count), float(seconds)


def whole_pair(text: str) -> tuple[int, int]:
    """Parse `16:50` into two whole numbers."""
    count, _, size = text.partition(":")
    return int(count), int(size)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
