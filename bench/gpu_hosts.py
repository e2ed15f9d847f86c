"""Qwen3-Omni on two GPUs, as one host and as two: what the path between the hosts costs.

Run from the repository root, as root, with two GPUs: `python -m bench.gpu_hosts --out FILE`. Each host is a
node of Ray on this machine with one GPU, so messages between them cross the loopback interface by TCP with encryption.
The deployments run one after the other; weights and requests are those of `bench/gpu_qwen3omni.py`. `--tiny` uses the
miniature on CPUs, to test the benchmark itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.gpu_qwen3omni import CONFIGS, Measured, pairs, random_checkpoint, run_workload, workloads
from bench.hosts.machines import PORT, Machine, neighbours, ray_cluster
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import head, write
from mstar_core.cluster.survey import survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A deployment to measure. config: its file; is_split: over two hosts; settings: beside the common ones."""

    config: str
    is_split: bool
    settings: tuple[str, ...] = ()


TENSOR_PARALLEL: Final = "thinker_tp2"
"""File of a Thinker over two ranks; the other nodes are on the first."""

WAYS: Final = {
    "one host": Way(config="qwen3omni_2gpu", is_split=False),
    "two hosts, ZeroMQ": Way(config="qwen3omni_2gpu", is_split=True),
    "two hosts, Mooncake TCP": Way(config="qwen3omni_2gpu", is_split=True, settings=("transport.protocol=TCP",)),
    "one host, NCCL": Way(config=TENSOR_PARALLEL, is_split=False),
    "two hosts, NCCL": Way(config=TENSOR_PARALLEL, is_split=True),
}
SPLIT_THINKER: Final = """\
model: qwen3_omni
max_seq_len: 8192
node_groups:
  - node_names: [Thinker]
    ranks: [0, 1]
    tp_size: 2
  - node_names: [audio_encoder, vision_encoder, Talker, Code2Wav]
    ranks: [0]
kv_cache:
  page_size: 16
"""


def main() -> int:
    """Run the benchmark. Returns 1 if a request failed or a resource is still held."""
    options = read_options()
    # /tmp, because the paths of Unix sockets are short.
    scratch = Path(tempfile.mkdtemp(prefix="mh-", dir="/tmp"))
    report: dict[str, Any] = {**head(), "deployments": {}, "errors": {}, "held": {}}
    samples: dict[str, list[float]] = {}
    try:
        for name, facts, figures in measured(options, scratch):
            report["deployments"][name] = {**facts, "metrics": figures.summary()}
            report["errors"] |= {f"{name}: {code}": count for code, count in facts["errors"].items()}
            report["held"] |= {f"{name}: {key}": value for key, value in facts.get("held", {}).items()}
            samples |= {f"{name}: {metric}": values for metric, values in figures.samples.items()}
            print(f"{name}: ready {facts.get('ready_s')} s, errors {facts['errors']}", flush=True)
            for metric, values in report["deployments"][name]["metrics"].items():
                print(f"  {metric:44} {values['p50']:10.4g} {values['unit']}  (n {values['n']})", flush=True)
            if options.out:
                write(report, samples, options.out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 1 if report["errors"] or report["held"] else 0


def measured(options: argparse.Namespace, scratch: Path) -> Any:
    """Start both hosts, and yield name, facts and figures of each way in turn."""
    with ExitStack() as stack:
        hosts = stack.enter_context(neighbours(scratch))
        hosts[0].enter_network()
        gpus = ("", "") if options.tiny else ("0", "1")
        names = [""]
        if any(WAYS[name].is_split for name in options.ways):
            stack.enter_context(ray_cluster(*hosts, gpus=gpus))
            names = [host.name for host in survey(f"{hosts[0].address}:{PORT}", ()).hosts]
        print(json.dumps({"hosts": names}), flush=True)
        weights = None if options.tiny else random_checkpoint(scratch / "weights")
        for number, name in enumerate(options.ways):
            made = Measured(options.port)
            plan = plan_of(WAYS[name], hosts[0], names, weights, options, number)
            yield name, one_way(plan, made, options), made.figures


def plan_of(
    way: Way, host: Machine, names: list[str], weights: Path | None, options: argparse.Namespace, number: int
) -> Plan:
    """Return the deployment of one way."""
    split = host.folder / f"{TENSOR_PARALLEL}.yaml"
    split.write_text(SPLIT_THINKER)
    config = split if way.config == TENSOR_PARALLEL else CONFIGS / f"{way.config}.yaml"
    devices = ["cpu", "cpu"] if options.tiny else ["0", "1"]
    places = ",".join(f"{name}:{device}" for name, device in zip(names, devices, strict=way.is_split))
    most = max(streams for streams, _ in options.closed)
    length = 2048 if options.tiny else 8192
    sizes = ("kv_cache.pages=1024",) if options.tiny else ()
    return Plan(
        model="qwen3_omni:tiny" if options.tiny else "qwen3_omni",
        device="cpu" if options.tiny else "cuda",
        port=options.port,
        root=host.runs,
        name=f"hosts{number}",
        weights=weights,
        config=config,
        settings=(
            *(f"max_concurrent_requests={most}", f"max_seq_len={length}", *sizes, *way.settings),
            *((f"ray.devices=[{places}]",) if way.is_split else ()),
        ),
        environment={} if options.tiny else {"CUDA_VISIBLE_DEVICES": "0" if way.is_split else "0,1"},
        ray=f"{host.address}:{PORT}" if way.is_split else "",
        inside=host.inside,
    )


def one_way(plan: Plan, made: Measured, options: argparse.Namespace) -> dict[str, Any]:
    """Start one deployment, run every workload and stop it. Returns its facts."""
    facts: dict[str, Any] = {
        "config": plan.config.stem if plan.config else "",
        "settings": plan.settings,
        "sections": {},
    }
    chosen = workloads(is_tiny=options.tiny)
    try:
        with Served(plan) as served:
            facts |= {"ready_s": round(served.ready_s, 2), "placement": served.snapshot()["ranks"]}
            for name in options.workloads:
                run_workload(served, made, name, chosen[name], options.closed, facts["sections"])
            facts |= {"gpu_at_end": gpu_state(), "held": served.wait_clean()}
    except Exception as error:  # noqa: BLE001 isolation boundary: one deployment; the others are still measured
        traceback.print_exc()
        made.errors["deployment"] += 1
        facts["error"] = str(error)[-3000:]
    return {**facts, "errors": dict(made.errors)}


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--workloads", nargs="+", default=["text_to_speech"], choices=[*workloads(is_tiny=True)])
    parser.add_argument("--closed", type=pairs, default="1:6,16:2", help="STREAMS:REQUESTS of each stream")
    parser.add_argument("--port", type=int, default=18127)
    parser.add_argument("--tiny", action="store_true", help="the miniature on CPUs")
    parser.add_argument("--out", type=Path, help="report file; raw samples are written beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
