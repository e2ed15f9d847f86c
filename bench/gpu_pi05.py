"""Pi0.5 on one GPU with random weights in the official shapes: the engines by themselves, then the whole
server.

Run from the repository root: `python -m bench.gpu_pi05 [--out FILE]`. Writes JSON after each section and prints it:
seconds from submission to actions on the host by number of requests; responses per second of closed-loop clients; the
parts (cameras, prefix, flow) with their lower bounds from this device's ceilings, and the kernels and gaps of each;
then latency over HTTP at batch 1 and throughput at saturation. Each attention backend is measured in turn: in flows,
`torch` gathers and copies keys, `flashinfer` reads them in place. A failing section writes its traceback and the others
run; the exit code is 1. `--tiny --device cpu` runs the same with the miniature.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.families.clock import ceilings, timed
from bench.families.policy import Acting, Observation, Place, checkpoint_modules, floors, observation, random_modules
from bench.families.robots import Load, served
from bench.families.sections import Sections
from bench.families.timeline import timeline
from bench.serving.figures import ROOT, Figures, head
from mstar_core.engine.device import prepare_device, resolve_device
from mstar_pi05.checkpoint.config import Sizes
from mstar_pi05.sources.tiny import write_tiny

PROMPT = 60
"""Ids of the prompt: an instruction with the state."""


def main() -> int:
    """Measure, write and print the report."""
    options = read_options()
    begun, figures, scratch = head(), Figures(), Path(tempfile.mkdtemp(prefix="mp-", dir="/tmp"))
    report: dict[str, Any] = {
        **begun,
        "model": "pi05:tiny" if options.tiny else "pi05, official shapes, random weights",
        "prompt_ids": PROMPT,
    }
    sections = Sections(report, figures, options.out)
    try:
        if "engines" in options.part:
            engines(options, sections, scratch)
        if "server" in options.part:
            server(options, sections, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sections.save()
    print(json.dumps(report, indent=1), flush=True)
    return int(bool(sections.failed))


# -- the engines by themselves ---------------------------------------------------------------------------------------


def engines(options: argparse.Namespace, sections: Sections, scratch: Path) -> None:
    """Measure each precision of the tower with graphs; the first also with each attention backend, and
    without graphs.
    """
    device = resolve_device(options.device)
    prepare_device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = {"size": 256, "copied_bytes": 1 << 20} if options.tiny else {}
    rates = sections.run("ceilings", partial(ceilings, device, **size))
    for vision in options.vision:
        place = Place(
            device=device,
            dtype=dtype,
            vision=vision,
            requests=max(*options.batch, options.clients) + 1,
            quantization=options.quantization,
        )
        made: dict[str, Any] = {}
        sections.run(f"{vision}_modules", partial(_make, made, "modules", partial(_modules, options, place, scratch)))
        if "modules" not in made:
            continue
        is_first = vision == options.vision[0]
        ways = [(name, True) for name in (options.attention if is_first else options.attention[:1])]
        plain = [(options.attention[0], False)] if is_first and not options.captured_only else []
        for attention, is_captured in [*ways, *plain]:
            here = replace(place, attention=attention, is_captured=is_captured)
            label = f"{vision}_{attention}_{'captured' if is_captured else 'plain'}"
            sections.run(f"{label}_engines", partial(_make, made, "acting", partial(_acting, made["modules"], here)))
            if "acting" in made:
                with torch.inference_mode():
                    OnePlace(made.pop("acting"), label, options, sections).measure(rates)


def _make(into: dict[str, Any], name: str, make: Callable[[], Any]) -> None:
    """Create an object that later sections need, without recording a result."""
    into[name] = make()


def _modules(options: argparse.Namespace, place: Place, scratch: Path) -> tuple[Sizes, dict[str, torch.nn.Module]]:
    if options.tiny:
        return checkpoint_modules(write_tiny(scratch / f"tiny-{place.vision}" / "pi05"), place)
    return Sizes(), random_modules(Sizes(), place)


def _acting(modules: tuple[Sizes, dict[str, torch.nn.Module]], place: Place) -> Acting:
    return Acting(*modules, place)


class OnePlace:
    """Sections for one precision, attention backend and execution mode."""

    def __init__(self, acting: Acting, label: str, options: argparse.Namespace, sections: Sections) -> None:
        self.acting = acting
        self.label = label
        self.options = options
        self.sections = sections
        self.prompt = 8 if options.tiny else PROMPT

    def measure(self, rates: dict[str, float] | None) -> None:
        """Run every section, the most important ones first."""
        for size in self.options.batch:
            self._run(f"rows_{size}", partial(self.rows, size))
        self._run("parts", partial(self.parts, rates))
        for name in ("cameras", "prefix", "flow", "request"):
            self._run(f"profile_{name}", partial(self.profile, name))
        self._run("two_cameras", self.two_cameras)
        self._run("saturation", self.saturation)

    def _run(self, name: str, section: Any) -> None:
        if self.options.only and name not in self.options.only:
            return
        self.sections.run(f"{self.label}_{name}", section)
        self.acting.end()  # close requests of a failed section

    def rows(self, size: int) -> dict[str, Any]:
        """Measure concurrent requests of three cameras each."""
        seen = [observation(self.acting.sizes, 3, self.prompt, seed=n) for n in range(size)]
        self._warm(*seen)
        samples = self._timed(partial(self.acting.act, *seen))
        self._add(f"engines_{self.label}_rows_{size}", samples)
        self._add(f"engines_{self.label}_chunks_per_s_rows_{size}", [size / value for value in samples], "1/s")
        return {"counters": self.acting.counters()}

    def two_cameras(self) -> None:
        """Measure one request of two cameras."""
        seen = observation(self.acting.sizes, 2, self.prompt)
        self._warm(seen)
        self._add(f"engines_{self.label}_two_cameras", self._timed(partial(self.acting.act, seen)))

    def saturation(self) -> dict[str, Any]:
        """Measure closed-loop clients: responses per second between a quarter of them and all."""
        clients, answers = self.options.clients, 8 * self.options.clients
        seen = observation(self.acting.sizes, 3, self.prompt)
        for _ in range(2):
            self.acting.saturate(seen, clients, 2 * clients)
            self.acting.driver.capture()
        before = self.acting.counters()
        came = self.acting.saturate(seen, clients, answers)
        after, begun = self.acting.counters(), answers // 4
        rate = (answers - begun) / (came[-1] - came[begun - 1])
        self._add(f"engines_{self.label}_chunks_per_s_clients_{clients}", [rate], "1/s")
        return {"before": before, "after": after}

    def parts(self, rates: dict[str, float] | None) -> dict[str, Any]:
        """Measure cameras, prefix and flow, each started on an idle device and synchronised."""
        seen = observation(self.acting.sizes, 3, self.prompt)
        self._warm(seen)
        for _ in range(self.options.repeats):
            for name, run in self._begin(seen).items():
                self._add(f"part_{self.label}_{name}", timed(run, self.acting.place.device, 1, warm=0))
            self.acting.end()
        return {} if rates is None else {"floors_s": floors(self.acting.sizes, 3, self.prompt, 10, rates)}

    def profile(self, name: str) -> dict[str, Any]:
        """Profile the kernels and gaps of one part, or of a whole request."""
        seen, device = observation(self.acting.sizes, 3, self.prompt), self.acting.place.device
        self._warm(seen)
        if name == "request":
            return timeline(partial(self.acting.act, seen), device)
        found: dict[str, Any] = {}
        for part, run in self._begin(seen).items():
            found = timeline(run, device) if part == name else (run(), found)[1]
        return found

    def _begin(self, seen: Observation) -> dict[str, Any]:
        """Return the parts of one request, to be run in order."""
        acting, driver = self.acting, self.acting.driver
        handle = acting.submit(seen, is_flowing=False)

        def flow() -> None:
            acting.flow(handle, seen)
            driver.run()

        return {"cameras": partial(driver.once, "vit_encoder"), "prefix": driver.run, "flow": flow}

    def _warm(self, *seen: Observation) -> None:
        """Run a kind of batch uncaptured, capture it, and run it again."""
        self.acting.act(*seen)
        self.acting.driver.capture()
        self.acting.act(*seen)

    def _timed(self, run: Any) -> list[float]:
        return timed(run, self.acting.place.device, self.options.repeats)

    def _add(self, name: str, samples: list[float], unit: str = "s") -> None:
        self.sections.figures.add(name, samples, unit)


# -- the whole server ------------------------------------------------------------------------------------------------


def server(options: argparse.Namespace, sections: Sections, scratch: Path) -> None:
    """Measure `mstarctl up pi05` with robots over HTTP."""
    weights = None if options.tiny else options.folder or scratch / "pi05"
    if weights is not None and not weights.exists():
        command = [sys.executable, "-m", "bench.families.robots", str(weights)]
        made: dict[str, Any] = {}
        sections.run("checkpoint", partial(_make, made, "it", partial(subprocess.run, command, cwd=ROOT, check=True)))
        if not made:
            return
    load = Load(alone=options.alone, clients=options.clients, each=options.each, side=224 if not options.tiny else 28)
    for vision in options.vision:
        root = scratch / f"run-{vision}"
        root.mkdir()
        settings = (
            f"model_kwargs.vision_dtype={vision}",
            f"max_concurrent_requests={max(options.clients + 1, 4)}",
            *(("kv_cache.tokens=32768",) if not options.tiny else ()),
            *options.set,
        )
        run = partial(
            served,
            load,
            model="pi05:tiny" if options.tiny else "pi05",
            device=options.device,
            port=options.port,
            root=root,
            weights=weights,
            settings=settings,
            figures=sections.figures,
            label=vision,
        )
        sections.run(f"server_{vision}", run)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", default=["engines", "server"], choices=("engines", "server"))
    parser.add_argument("--vision", nargs="*", default=["bfloat16", "tf32", "float32"], help="the tower's precisions")
    parser.add_argument("--attention", nargs="*", help="backends of the cache; default both, on the CPU torch")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 8], help="requests at once at the engines")
    parser.add_argument("--quantization", default="none", choices=("none", "fp8"), help="of the engines' weights")
    parser.add_argument("--only", nargs="*", help="sections of each place at the engines, such as rows_1 or parts")
    parser.add_argument("--captured-only", action="store_true", help="no engines without CUDA graphs")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--alone", type=int, default=60, help="requests one after the other at the server")
    parser.add_argument("--clients", type=int, default=16, help="clients at saturation")
    parser.add_argument("--each", type=int, default=20, help="requests of each of them")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the miniature in place of the official shapes")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the server, as `up --set` takes it"
    )
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; written if missing, and kept")
    parser.add_argument("--port", type=int, default=18124)
    parser.add_argument("--out", type=Path, help="report file; raw samples are written beside it")
    options = parser.parse_args()
    options.attention = options.attention or (["flashinfer", "torch"] if options.device == "cuda" else ["torch"])
    return options


if __name__ == "__main__":
    sys.exit(main())
