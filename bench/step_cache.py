"""Error of images and videos whose loops leave out forward passes, beside the same cost with fewer steps.

Run from the repository root: `python -m bench.step_cache [--cases 24] [--out FILE]`. The trained miniatures of BAGEL
and Wan 2.2 run in this process, on the CPU. Each case is made with all steps, with shares of `step_cache`, and with
fewer steps of the same number of passes. The error is the distance of the final latents to those of all steps, relative
to their norm; `error_fine` is the same against many more steps. The miniatures' judges decide whether the result is
what was asked. Texts are in the prefix cache before; passes of edits include three for the picture and its text.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import mstar_bagel.plugin
import mstar_wan22.plugin
from bench.serving.figures import head
from mstar_bagel import shapes
from mstar_bagel.checkpoint.shipped import FOLDER as BAGEL
from mstar_bagel.processor import Processor as BagelProcessor
from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.nodes import build_nodes
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin import ModelSpec
from mstar_core.plugin.processor import MediaPart
from mstar_core.workloads.media import png
from mstar_wan22 import moves
from mstar_wan22.processor import Processor as WanProcessor
from mstar_wan22.sources.mini import FOLDER as WAN

Pixels = npt.NDArray[np.uint8]
Latents = npt.NDArray[np.float32]

SHARES: Final = (0.3, 0.5, 0.7)
SHAPES_SEED: Final = 20
MOVES_SEED: Final = 22
"""Seeds of the splits that the miniatures were trained with."""

NOISE_PASSES: Final = 1
"""Passes of the node of the steps that make the first noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request, and whether a result is what it asks for."""

    ask: SampleRequest
    shows: Callable[[Pixels], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Cases of one kind. counts: parameter of the number of steps, and how much larger it is; steps, fine: of them.

    node: of the steps. passes: nodes with weights, whose passes are counted.
    """

    model: ModelSpec
    folder: Path
    processor: Any
    cases: Sequence[Case]
    counts: tuple[str, int]
    steps: int
    fine: int
    node: str
    passes: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def of_steps(self, steps: int) -> dict[str, Any]:
        name, more = self.counts
        return {**self.settings, name: steps + more}


@dataclass(frozen=True, slots=True)
class Made:
    """Latents and pixels of each case, the steps of one, and its passes."""

    latents: Sequence[Latents]
    pixels: Sequence[Pixels]
    steps: int
    passes: float


def drawings(count: int) -> Task:
    """Return pictures of unseen scenes."""
    _, scenes, _, _ = shapes.split(SHAPES_SEED)
    cases = [
        Case(ask=SampleRequest(text=scene.sentence, outputs=("image",), seed=seed), shows=_shows(scene))
        for seed, scene in enumerate(scenes[:count])
    ]
    return _bagel(cases, {"width": shapes.SIDE, "height": shapes.SIDE})


def edits(count: int) -> Task:
    """Return unseen edits: three branches of guidance in all steps."""
    _, _, _, unseen = shapes.split(SHAPES_SEED)
    cases = []
    for seed, edit in enumerate(unseen[:count]):
        file = MediaPart(modality="image", data=png(shapes.draw(shapes.Scene(edit.before), random.Random(seed))))
        order = [("image", 0), ("text", 0)]
        ask = SampleRequest(text=edit.sentence, media=(file,), order=order, outputs=("image",), seed=seed)
        cases.append(Case(ask=ask, shows=_shows(shapes.Scene(edit.after))))
    return _bagel(cases, {})


def _shows(scene: shapes.Scene) -> Callable[[Pixels], bool]:
    return lambda picture: shapes.shows(picture, scene)


def _bagel(cases: Sequence[Case], settings: Mapping[str, Any]) -> Task:
    return Task(
        model=mstar_bagel.plugin.mstar_models()[0],
        folder=BAGEL,
        processor=BagelProcessor(BAGEL, {}),
        cases=cases,
        counts=("num_timesteps", 1),
        steps=49,
        fine=400,
        node="combine_cfg",
        passes=("LLM",),
        settings=settings,
    )


def videos(count: int, solver: str) -> Task:
    """Return videos of unseen moves, then of trained ones."""
    trained, unseen = moves.split(MOVES_SEED)
    every = [*unseen, *trained]
    cases = [
        Case(
            ask=SampleRequest(text=move.sentence, outputs=("video",), seed=seed),
            shows=lambda video, move=move: moves.shows(video, move),  # type: ignore[misc]  # bound now
        )
        for seed, move in enumerate(every[number % len(every)] for number in range(count))
    ]
    return Task(
        model=mstar_wan22.plugin.mstar_models()[0],
        folder=WAN,
        processor=WanProcessor(WAN, {}),
        cases=cases,
        counts=("num_inference_steps", 0),
        steps=50,
        fine=100,
        node="solver",
        passes=("transformer",),
        settings={**moves.PARAMS, "solver": solver},
    )


@contextmanager
def running(task: Task) -> Iterator[Callable[[Mapping[str, Any]], Made]]:
    """Yield a function that makes all cases with some parameters."""
    spec = task.model.bound(task.folder, {})
    built, seen, passes = build_nodes(spec, task.folder), list[Latents](), Counter[str]()

    def see(module: Any, args: Any, ports: dict[str, Any]) -> None:
        seen.extend(x.numpy().copy() for x in ports["latents"])

    def make(params: Mapping[str, Any]) -> Made:
        latents, pixels = list[Latents](), list[Pixels]()
        passes.clear()
        for case in task.cases:
            seen.clear()
            (outcome,) = runtime.ask(_with(case.ask, params))
            if outcome.status != "finished":
                raise RuntimeError(outcome.cause)
            latents.append(seen[0])
            shown = [np.asarray(item.array) for item in outcome.items if item.modality in ("image", "video")]
            pixels.append(shown[0] if len(shown) == 1 else np.concatenate(shown))
        count = len(task.cases)
        steps = passes[task.node] // count - NOISE_PASSES
        return Made(latents, pixels, steps, sum(passes[name] for name in task.passes) / count)

    runtime = LocalRuntime(
        spec,
        task.folder,
        built=built,
        processor=task.processor,
        faults=lambda node, handles: passes.update({node: len(handles)}),
    )
    handle = built["vae_decoder"].module.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield make
    finally:
        handle.remove()


def _with(ask: SampleRequest, params: Mapping[str, Any]) -> SampleRequest:
    return SampleRequest(
        text=ask.text, media=ask.media, order=ask.order, outputs=ask.outputs, seed=ask.seed, params=params
    )


def measured(task: Task) -> list[dict[str, Any]]:
    """Return one line for all steps, and two for each share: with the cache, and with fewer steps of its cost."""
    lines = []
    with running(task) as make:
        make(task.of_steps(2))  # prompts stay in the prefix cache, so that all further passes are steps
        full, fine = make(task.of_steps(task.steps)), make(task.of_steps(task.fine))
        lines.append({"setting": "all steps", **_judged(task, full, full, fine)})
        for share in SHARES:
            cached = make({**task.of_steps(task.steps), "step_cache": share})
            fewer = make(task.of_steps(cached.steps))
            for name, made in ((f"step_cache {share}", cached), ("fewer steps", fewer)):
                lines.append({"setting": name, **_judged(task, made, full, fine)})
                print(json.dumps(lines[-1]), flush=True)
    return lines


def _judged(task: Task, made: Made, full: Made, fine: Made) -> dict[str, Any]:
    errors, off = (_errors(made.latents, other.latents) for other in (full, fine))
    ratios = [_psnr(one, other) for one, other in zip(made.pixels, full.pixels, strict=True)]
    right = [case.shows(pixels) for case, pixels in zip(task.cases, made.pixels, strict=True)]
    return {
        "steps": made.steps,
        "passes": made.passes,
        "error": round(float(np.mean(errors)), 5),
        "error_most": round(max(errors), 5),
        "error_fine": round(float(np.mean(off)), 5),
        "psnr_db": None if made is full else round(float(np.mean(ratios)), 1),
        "right": sum(right),
        "cases": len(right),
    }


def _errors(found: Sequence[Latents], wanted: Sequence[Latents]) -> list[float]:
    pairs = zip(found, wanted, strict=True)
    return [float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in pairs]


def _psnr(one: Pixels, other: Pixels) -> float:
    """Return the peak signal-to-noise ratio in dB; at most 99."""
    apart = float(np.mean((one.astype(np.float64) - other) ** 2))
    return min(99.0, 10 * float(np.log10(255**2 / max(apart, 1e-9))))


def main() -> None:
    """Measure, write and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=24, help="of each kind")
    parser.add_argument("--only", nargs="*", default=[], metavar="KIND")
    parser.add_argument("--out", type=Path, help="report file")
    options = parser.parse_args()
    kinds: dict[str, Callable[[], Task]] = {
        "bagel_drawings": lambda: drawings(options.cases),
        "bagel_edits": lambda: edits(options.cases),
        "wan22_unipc": lambda: videos(options.cases, "unipc"),
        "wan22_euler": lambda: videos(options.cases, "euler"),
    }
    report = head()
    for name, task in kinds.items():
        if not options.only or name in options.only:
            report[name] = measured(task())
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
