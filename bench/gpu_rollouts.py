"""Rollouts of V-JEPA 2-AC by this tree and another, in turn on one GPU, with random weights in the official
shapes.

Run from the repository root: `python -m bench.gpu_rollouts --tree FOLDER [--out FILE]`. One process per tree creates
its engines and captures its graphs. Windows of requests alternate, so that background load affects both alike. Seconds
of the context, of the steps and of whole requests are named `before_...` (the other tree) and `now_...`; `..._replays`
are graph replays in the steps. Without `--tree`, only this tree is measured. `--tiny --device cpu` tries the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from bench.families.clock import timed
from bench.families.policy import Place
from bench.families.world import Rolling, random_nodes, trial
from bench.gpu_vjepa2 import TINY_AC, three
from bench.serving.figures import ROOT, Figures, head
from bench.serving.trees import Tree
from mstar_core.engine.device import prepare_device, resolve_device
from mstar_vjepa2.checkpoint.config import RELEASED_AC

PARTS: Final = ("context", "steps", "whole")


class Measured:
    """Engines of one tree. asked: (context, candidates, horizon) of all measurements."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = resolve_device(options.device)
        prepare_device(self.device)
        asked: list[tuple[int, int, int]] = options.rollout
        self.facts = TINY_AC if options.tiny else replace(RELEASED_AC, most_frames=37)
        frames = max(context - 1 + horizon for context, _, horizon in asked)
        on_gpu = self.device.type == "cuda"
        place = Place(
            device=self.device,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            is_captured=on_gpu,
            attention="flashinfer" if on_gpu else "torch",
            requests=2 + max(candidates for _, candidates, _ in asked),
        )
        self.rolling = Rolling(self.facts, random_nodes(self.facts, place), place, frames)
        self.each: int = options.each
        self.warm: set[tuple[int, int, int]] = set()

    def window(self, asked: tuple[int, int, int]) -> dict[str, list[float]]:
        """Return the seconds of requests by part, and the graph replays of their steps."""
        wanted = trial(self.facts, *asked)
        wanted = replace(wanted, clip=wanted.clip.to(self.device))
        if asked not in self.warm:
            self.warm.add(asked)
            for _ in range(3):
                self.rolling.whole(wanted)
                self.rolling.driver.capture()
        found: dict[str, list[float]] = {part: [] for part in (*PARTS, "replays")}
        for _ in range(self.each):
            handle, latents = self.rolling.encode(wanted)
            found["context"] += timed(partial(self.rolling.context, handle, wanted, latents), self.device, 1, warm=0)
            with _counted() as replays:
                found["steps"] += timed(partial(self.rolling.roll, handle, wanted, latents), self.device, 1, warm=0)
            found["replays"].append(float(sum(replays)))
            self.rolling.driver.close(handle)
            found["whole"] += timed(partial(self.rolling.whole, wanted), self.device, 1, warm=0)
        return found


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the graph replays inside, as a list of ones."""
    found: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def told(graph: torch.cuda.CUDAGraph) -> None:
        found.append(1)
        replay(graph)

    torch.cuda.CUDAGraph.replay = told  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def serve(options: argparse.Namespace) -> None:
    """Answer each input line CONTEXT:CANDIDATES:HORIZON with a window. Other output lines are not answers."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), torch.inference_mode():
        measured = Measured(options)
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(measured.window(three(line.strip()))), file=answers, flush=True)


def main() -> int:
    """Measure both trees, write and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="folder with the sources of the other tree")
    parser.add_argument("--rollout", type=three, nargs="*", default=[(1, 1, 30), (8, 1, 30)], help="what is asked")
    parser.add_argument("--rounds", type=int, default=3, help="windows of each tree and kind")
    parser.add_argument("--each", type=int, default=5, help="requests of a window")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes in place of the official shapes")
    parser.add_argument("--out", type=Path, help="report file; raw samples are written beside it")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return 0
    folders = [("before", options.tree)] if options.tree else []
    trees = [Tree(name, folder, __file__) for name, folder in (*folders, ("now", ROOT))]
    figures = Figures()
    for asked in options.rollout:
        word = ":".join(map(str, asked))
        for _ in range(options.rounds):
            for tree in trees:
                _keep(figures, tree.window(word), word.replace(":", "_"))
    for tree in trees:
        tree.close()
    report = {
        **head(),
        "model": "small sizes" if options.tiny else "official shapes, random weights",
        "before": options.tree.name if options.tree else None,
        "metrics": figures.summary(),
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        options.out.with_suffix(".samples.json").write_text(json.dumps(figures.samples) + "\n")
    print(json.dumps(report, indent=1), flush=True)
    return 0


def _keep(figures: Figures, window: dict[str, Any], label: str) -> None:
    for part in PARTS:
        figures.add(f"{window['tree']}_{part}_{label}", window[part])
    figures.add(f"{window['tree']}_replays_{label}", window["replays"], "1")


if __name__ == "__main__":
    sys.exit(main())
