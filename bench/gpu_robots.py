"""Pi0.5 server of this tree and of another tree, both on one GPU and measured in turn.

Run from the repository root: `python -m bench.gpu_robots --tree FOLDER [--out FILE]`. Both deployments run at once, so
that background load affects both alike. Windows of requests alternate: one robot with stored PNGs and with arrays, then
several robots at once. Figures are named `before_...` (the other tree) and `now_...`. The report includes request
spans, batch sizes and seconds of steps, and shares of the worker's time. `--tiny --device cpu` tries the program.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.families.robots import at_once, one_by_one
from bench.families.sections import Sections
from bench.robot_requests import FORMS, images_of
from bench.serving.deployment import Plan, Served
from bench.serving.figures import ROOT, Figures, head
from bench.serving.watch import note_stations, watched

SIDES: Final = ("before", "now")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Both deployments and their requests. running: by side; images: by form."""

    running: Mapping[str, Served]
    images: Mapping[str, list[bytes]]
    figures: Figures

    def warm(self, clients: int) -> None:
        """Send requests until nothing more is captured."""
        for served in self.running.values():
            for form in FORMS:
                one_by_one(served.plan.port, self.images[form], 5)
            for _ in range(2):
                at_once(served.plan.port, self.images["png"], clients, 2)
                served.wait_captured()

    def alone(self, form: str, windows: int, each: int) -> None:
        """Measure one robot, in windows."""
        for side in _in_turn(windows):
            self.figures.add(f"{side}_{form}_alone", one_by_one(self._port(side), self.images[form], each))
        for side, served in self.running.items():
            note_stations(served, self.figures, f"{side}_{form}_alone", windows * each)

    def crowd(self, clients: int, each: int, windows: int) -> None:
        """Measure concurrent robots, in windows."""
        for side in _in_turn(windows):
            label = f"{side}_clients_{clients}"
            with watched(self.running[side], self.figures, label):
                start = time.monotonic()
                answered = at_once(self._port(side), self.images["png"], clients, each)
                span = time.monotonic() - start
            self.figures.add(label, answered)
            self.figures.add(f"{side}_chunks_per_s_clients_{clients}", [len(answered) / span], "1/s")

    def _port(self, side: str) -> int:
        return self.running[side].plan.port


def _in_turn(windows: int) -> Iterator[str]:
    """Yield the sides of each window; the first side alternates."""
    for number in range(windows):
        yield from SIDES if number % 2 == 0 else reversed(SIDES)


def main() -> int:
    """Measure, write and print the report."""
    options = read_options()
    report: dict[str, Any] = {**head(), "model": "miniature" if options.tiny else "official shapes, random weights"}
    sections = Sections(report, Figures(), options.out)
    scratch = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    try:
        with ExitStack() as stack:
            running = {side: _started(options, sections, scratch, side, stack) for side in SIDES}
            if None not in running.values():
                ask(options, sections, {side: served for side, served in running.items() if served is not None})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sections.save()
    print(json.dumps(report, indent=1), flush=True)
    return int(bool(sections.failed))


def ask(options: argparse.Namespace, sections: Sections, running: Mapping[str, Served]) -> None:
    """Run all windows, one section per kind."""
    side = 28 if options.tiny else 224
    images = {form: images_of(side, form) for form in FORMS}
    turns = Turns(running=running, images=images, figures=sections.figures)
    sections.run("warm", partial(turns.warm, max(options.clients, default=1)))
    for form in FORMS:
        sections.run(f"alone_{form}", partial(turns.alone, form, options.windows, options.alone))
    for clients in options.clients:
        sections.run(f"clients_{clients}", partial(turns.crowd, clients, options.each, options.windows))


def _started(
    options: argparse.Namespace, sections: Sections, scratch: Path, side: str, stack: ExitStack
) -> Served | None:
    """Start one side's deployment, which stops with the stack. Returns None if it did not start."""
    folder = None if options.tiny else options.folder or scratch / "pi05"
    if folder is not None and not folder.exists():
        subprocess.run([sys.executable, "-m", "bench.families.robots", str(folder)], cwd=ROOT, check=True)
    root = scratch / side
    root.mkdir()
    settings = (f"max_concurrent_requests={max([*options.clients, 4]) + 1}", *options.set)
    plan = Plan(
        model="pi05:tiny" if options.tiny else "pi05",
        device=options.device,
        port=options.port + SIDES.index(side),
        root=root,
        weights=folder,
        settings=settings,
        tree=options.tree.resolve() if side == "before" else ROOT,
        shares_gpu=True,
    )
    made: list[Served] = []

    def start() -> dict[str, Any]:
        served = stack.enter_context(Served(plan))
        made.append(served)
        return {"ready_s": round(served.ready_s, 2), "phases_s": served.snapshot()["deployment"]["phases_s"]}

    sections.run(f"start_{side}", start)
    return made[0] if made else None


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True, help="folder with the sources of the other tree")
    parser.add_argument("--windows", type=int, default=4, help="of each side and kind")
    parser.add_argument("--alone", type=int, default=25, help="requests of a window of one robot")
    parser.add_argument("--clients", type=int, nargs="*", default=[16, 32], help="robots at once")
    parser.add_argument("--each", type=int, default=20, help="requests of each of them in a window")
    parser.add_argument(
        "--set",
        nargs="*",
        default=["model_kwargs.vision_dtype=bfloat16", "kv_cache.tokens=65536"],
        help="settings of both deployments, KEY=VALUE",
    )
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; written if missing, and kept")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the miniature in place of the official shapes")
    parser.add_argument("--port", type=int, default=18150)
    parser.add_argument("--out", type=Path, help="report file; raw samples are written beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
