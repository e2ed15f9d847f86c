"""Benchmark of the Orpheus server: streamed HTTP `/generate` requests under several loads. Writes one report.

Run from the repository root on a machine with a GPU: `python bench/gpu_server.py --out bench/results/gpu/server.json`.
The weights are random bf16 numbers in the official shapes, written once. The head gives audio ids only, so that every
request has its full length. Each load option takes SIZE:AMOUNT pairs; an empty string skips that load.
`--compare KEY=VALUE` also runs a second deployment with that setting, in turn with the first, and reports the ratios;
`--compare-tree FOLDER` does the same with the sources of another tree, such as a branch.
`--tiny --device cpu` uses the miniature, to test the benchmark itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.serving.compare import order_of, ratios
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import ROOT, Figures, head, write
from bench.serving.load import Storm, Target, closed_loop
from bench.serving.sections import Run
from bench.serving.tables import tables

WARM_IDS: Final = 140
IDS, TINY_IDS = 574, 120


def write_checkpoint(folder: Path) -> None:
    """Write the checkpoint in a separate process, so that this one has no device context. Needs a GPU."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted run
    subprocess.run([sys.executable, "-m", "bench.serving.checkpoint", str(part)], cwd=ROOT, check=True)
    os.rename(part, folder)


def main() -> int:
    """Run the benchmark. Returns 1 if a request failed or a resource is still held."""
    options = read_options()
    scratch = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    try:
        report, samples = measured(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.commit:
        report["commit"] = options.commit
    if options.out:
        write(report, samples, options.out)
    print(tables(report), flush=True)
    return 1 if report["errors"] or report["held"] else 0


def measured(options: argparse.Namespace, scratch: Path) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Measure all deployments of one call in turn. Returns the report and the raw samples by metric."""
    begun, weights = head(), options.folder
    start = time.monotonic()
    if not options.tiny:
        weights = weights or scratch / "orpheus"
        if not weights.exists():
            write_checkpoint(weights)
    written_s = time.monotonic() - start
    found: dict[str, Figures] = {"base": Figures()}
    if options.compare or options.compare_tree or options.compare_config:
        found["changed"] = Figures()
    last: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(order_of(list(found), options.repeats)):
        settings = (*settings_of(options), *(options.compare if name == "changed" else ()))
        root = scratch / f"run{number}"
        root.mkdir()
        plan = Plan(
            model="orpheus:tiny" if options.tiny else "orpheus",
            device=options.device,
            port=options.port,
            root=root,
            weights=weights,
            settings=settings,
            tree=options.compare_tree.resolve() if options.compare_tree and name == "changed" else ROOT,
            config=(options.compare_config if name == "changed" else None) or options.config,
        )
        try:
            one = one_deployment(plan, options, found[name], first_seed=1 + 100_000 * (number // len(found)))
        except Exception as error:  # noqa: BLE001 isolation boundary: one deployment; the others' results are kept
            traceback.print_exc()
            one = not_measured(plan, error)
        last[name] = merged(last.get(name), one)
        print(f"{name} {number}: ready {one['ready_s']} s, errors {one['errors']}", file=sys.stderr, flush=True)
    report = {**begun, **last["base"], "write_checkpoint_s": round(written_s, 1)}
    report["metrics"] = found["base"].summary()
    samples = dict(found["base"].samples)
    if "changed" in found:
        tree = options.compare_tree.name if options.compare_tree else None
        config = options.compare_config.name if options.compare_config else None
        changed = {
            "settings": options.compare,
            "tree": tree,
            "file": config,
            **last["changed"],
            "metrics": found["changed"].summary(),
        }
        report["compare"] = {**changed, "ratios": ratios(report["metrics"], changed["metrics"])}
        report["errors"] = {**report["errors"], **{f"changed_{k}": v for k, v in changed["errors"].items()}}
        report["held"] = {**report["held"], **{f"changed_{k}": v for k, v in changed["held"].items()}}
        samples |= {f"changed.{name}": values for name, values in found["changed"].samples.items()}
    return report, samples


def one_deployment(plan: Plan, options: argparse.Namespace, figures: Figures, first_seed: int) -> dict[str, Any]:
    """Start, warm up, run every section and stop. Adds to `figures`; returns the conditions and single values."""
    target = Target(port=plan.port, ids=options.ids, kwargs=options.param)
    with Served(plan) as served:
        at_ready, began = served.resident_bytes(), served.snapshot()
        figures.add("ready_s", [served.ready_s])
        run = Run(served=served, target=target, figures=figures, next_seed=first_seed)
        warm_up(run, [streams for streams, _ in options.closed])
        captured = served.wait_captured()
        for section in sections_of(run, options):
            try:
                section()
            except Exception:  # noqa: BLE001 isolation boundary: one section; the others' figures are kept
                traceback.print_exc()
                run.errors["section"] += 1
        held, memory, ended = served.wait_clean(), served.resident_bytes(), served.snapshot()
    counts = [len(values) for name, values in figures.samples.items() if name.startswith("request_")]
    return {
        "model": plan.model,
        "dims": "orpheus:tiny" if options.tiny else "Orpheus 3B and SNAC 24 kHz, official shapes",
        "placement": began["ranks"],
        "config": {"device": plan.device, "settings": list(plan.settings), "request": target.body(0)["model_kwargs"]},
        "workload": workload(options),
        "n": sum(counts),
        "ready_s": round(served.ready_s, 2),
        "warmup": f"3 requests alone, then one of {WARM_IDS} ids at every number of streams; captures waited for",
        "phases": began["deployment"]["phases_s"],
        "graphs_captured": captured,
        "mem": memory,
        "mem_at_ready": at_ready,
        "gpu_at_end": gpu_state(),
        "restarts": ended["deployment"]["restarts"],
        "sections": run.sections,
        "held": held,
        "errors": dict(run.errors),
    }


def not_measured(plan: Plan, error: Exception) -> dict[str, Any]:
    """Return the report of a deployment that did not start or ended early."""
    return {
        "model": plan.model,
        "config": {"device": plan.device, "settings": list(plan.settings)},
        "ready_s": None,
        "phases": {},
        "sections": {},
        "errors": {"deployment": 1},
        "held": {},
        "error": str(error)[-3000:],
    }


def sections_of(run: Run, options: argparse.Namespace) -> list[Callable[[], None]]:
    """Return the requested sections, in order."""
    found = [partial(run.closed, int(streams), int(rounds)) for streams, rounds in options.closed]
    found += [partial(run.open, streams, span_s) for streams, span_s in options.open]
    found += [partial(run.bursts, int(count), int(rounds)) for count, rounds in options.burst]
    storms = [Storm(requests=int(n), at_once=int(most), most_ids=options.storm_ids) for n, most in options.storm]
    return [*found, *(partial(run.storm, storm) for storm in storms)]


def warm_up(run: Run, streams: list[float]) -> None:
    """Send warm-up requests. Only the first is recorded, as the latency right after ready."""
    first = run.drive(closed_loop(run.target, 1, 1, run.numbers(1))).heard[0]
    if first.marks:
        run.figures.add("first_request_first_audio", [first.marks[0] - first.sent_s])
    short = Target(port=run.target.port, ids=min(WARM_IDS, run.target.ids), kwargs=run.target.kwargs)
    for count, rounds in ((1, 2), *((int(each), 1) for each in streams)):
        heard = run.drive(closed_loop(short, count, rounds, run.numbers(count * rounds))).heard
        run.errors.update(f"warm_up_{each.code}" for each in heard if each.code)


def settings_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the settings of every deployment of this call: room for the largest load, then the given ones."""
    sizes = [streams for streams, _ in options.closed + options.burst] + [at_once for _, at_once in options.storm]
    most = int(max([*sizes, *(2 * streams for streams, _ in options.open), 1]))
    memory = () if options.tiny else ("kv_cache.tokens=200000",)
    return (f"max_concurrent_requests={most}", "max_seq_len=2048", *memory, *options.set)


def merged(before: Mapping[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Return the later deployment's facts with the errors of both; the earlier one's facts if it did not start."""
    errors = dict(before["errors"]) if before else {}
    for code, count in now["errors"].items():
        errors[code] = errors.get(code, 0) + count
    return {**(before or {}), **now, "errors": errors} if "error" in now else {**now, "errors": errors}


def workload(options: argparse.Namespace) -> str:
    """Describe the requested load in words."""
    parts = [f"closed loop of {s:g} streams, {n:g} requests each" for s, n in options.closed]
    parts += [f"Poisson arrivals for {s:g} streams in real time over {n:g} s" for s, n in options.open]
    parts += [f"{s:g} at once, {n:g} times" for s, n in options.burst]
    parts += [f"{s:g} requests by {n:g} clients of which half go away" for s, n in options.storm]
    return f"/generate, lines of JSON, {options.ids} ids a request, all prompts different; " + "; ".join(parts)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--closed", type=pairs, default="1:20,8:4,32:4,64:3", help="STREAMS:REQUESTS of each stream")
    parser.add_argument("--open", type=pairs, default="32:30", help="STREAMS:SECONDS of Poisson arrivals")
    parser.add_argument("--burst", type=pairs, default="32:4", help="REQUESTS:TIMES of simultaneous arrivals")
    parser.add_argument("--storm", type=pairs, default="", help="REQUESTS:CLIENTS with random lengths and disconnects")
    parser.add_argument("--storm-ids", type=int, default=60, help="most ids of a request of the storm")
    parser.add_argument("--ids", type=int, help=f"ids of a request; default {IDS}, with --tiny {TINY_IDS}")
    parser.add_argument("--param", type=parameter, action="append", default=[], help="NAME=JSON for every request")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for `mstarctl up`; may be repeated")
    parser.add_argument("--compare", action="append", default=[], help="KEY=VALUE of a second deployment, in turn")
    parser.add_argument("--compare-tree", type=Path, help="folder with the sources of that second deployment")
    parser.add_argument("--config", type=Path, help="deployment file; default: the model's own")
    parser.add_argument("--compare-config", type=Path, help="deployment file of that second deployment")
    parser.add_argument("--repeats", type=int, default=1, help="number of starts of each deployment of a comparison")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the miniature in place of the official shapes")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; written if missing, and kept")
    parser.add_argument("--port", type=int, default=18123)
    parser.add_argument("--commit", help="commit of the source, for a tree without history")
    parser.add_argument("--out", type=Path, help="report file; raw samples are written beside it")
    options = parser.parse_args()
    options.ids = options.ids or (TINY_IDS if options.tiny else IDS)
    options.param = dict(options.param)
    return options


def pairs(text: str) -> list[tuple[float, float]]:
    """Parse `1:20,8:4` as pairs of numbers."""
    found = [part.partition(":") for part in text.split(",") if part]
    return [(float(size), float(amount)) for size, _, amount in found]


def parameter(text: str) -> tuple[str, Any]:
    """Parse `name=1.5` as a name and a JSON value."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


if __name__ == "__main__":
    sys.exit(main())
