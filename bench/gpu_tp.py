"""Orpheus' language model by tensor parallelism on two GPUs against one GPU, with random weights of official sizes.

Run from the repository root on a machine with two GPUs:
`python -m bench.gpu_tp [--batches 1,32] [--steps 300] [--out FILE]`. One process per rank; the second one follows.
Prints JSON: times of all-reduce inside a CUDA graph by size (one-shot and NCCL), and per batch those of a decode step
on one GPU and on two, as `bench/gpu_orpheus.py` measures them. Nothing uses NVLink multicast.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu_orpheus import CONFIG, LAYERS, SPEC, VOCAB, captured, decode, event_ms
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.cuda_graphs.compilation import compile_in_parallel
from mstar_core.engine.device import prepare_device
from mstar_core.engine.group.link import PlanReceiver, PlanSender
from mstar_core.engine.group.plans import StopPlans
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.layers import frequencies
from mstar_core.layers.linear import fuse_projections
from mstar_core.parallel.collectives import ONE_SHOT_BYTES, TorchCollectives
from mstar_core.parallel.groups import GroupPlace, RankGroup
from mstar_core.parallel.shards import WHOLE, Shard
from mstar_core.weights.random_fill import fill_randomly
from mstar_core.worker.start.build import local_node
from mstar_orpheus.llama import Llama

SIZES = (4 << 10, 32 << 10, 128 << 10, 256 << 10, 2 << 20, 8 << 20)
RANKS = (0, 1)


def llama(device: torch.device, shard: Shard) -> Llama:
    """Build one rank's part of the decoder with random weights."""
    with torch.device("meta"):
        module = Llama(CONFIG, has_head=False, shard=shard)
    module = module.to(torch.bfloat16).to_empty(device=device).requires_grad_(False)
    fill_randomly(module, 1)
    module.model.rotary.frequencies = frequencies(CONFIG.rotary).to(device)
    fuse_projections(module)
    return module.eval()


def engine_of(device: torch.device, shard: Shard, slots: int) -> KVCacheEngine:
    """Make the engine of one rank, without captured steps."""
    settings = KVSettings(
        device=device,
        dtype=torch.bfloat16,
        num_pages=4096,
        page_size=16,
        max_slots=slots,
        max_seq_len=2048,
        vocab=VOCAB,
        token_budget=2048,
        attention="flashinfer",
        lookahead=1,
        graphs=CaptureSizes(decode=(1, slots), prefill=(512,)),
    )
    return KVCacheEngine(local_node(SPEC, shard.size), llama(device, shard), settings, is_captured=False)


class AloneCollectives:
    """Collectives of one process that stands for a whole group: shapes are right, values are not."""

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value as it is."""
        return value

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value once per rank."""
        return value.repeat(1, len(RANKS))

    def broadcast(self, value: torch.Tensor) -> None:
        """Leave the value as it is."""


def compile_ahead(device: torch.device, slots: int) -> None:
    """Compile the kernels of one rank of two in parallel: its processes then find them in the cache."""
    collectives: Any = AloneCollectives()
    engine = engine_of(device, Shard(index=0, size=len(RANKS), collectives=collectives), slots)
    compile_in_parallel(engine.trace, "one rank of two")


def measured(engine: KVCacheEngine, batches: list[int], steps: int) -> list[dict[str, Any]]:
    """Measure decode steps of each batch, after a short run that warms up."""
    graphs = engine._runner.graphs.decode if engine._runner.graphs is not None else None
    decode(engine, graphs, 1, 20, 1)
    return [decode(engine, graphs, batch, steps, 1000 * (1 + index)) for index, batch in enumerate(batches)]


def reductions(collectives: TorchCollectives, device: torch.device) -> dict[str, Any]:
    """Check and measure all-reduce of each size inside a CUDA graph: microseconds."""
    found: dict[str, Any] = {}
    for size in SIZES:
        value = torch.randn(size // 2, device=device, dtype=torch.bfloat16)
        wanted = value.clone()
        dist.all_reduce(wanted)
        eager = collectives.all_reduce(value.clone())
        each: dict[str, Any] = {"equals_nccl": bool(torch.equal(eager, wanted))}
        ways = {"ours": collectives}
        if size <= ONE_SHOT_BYTES:
            plain = TorchCollectives(dist.group.WORLD, device, uses_one_shot=False)  # type: ignore[arg-type]
            ways["nccl"] = plain
        for name, way in ways.items():
            replay = captured(lambda way=way, value=value: [way.all_reduce(value.clone()) for _ in range(20)])
            times = event_ms(replay, 30)
            each[name] = {key: round(each_ms * 1e3 / 20, 2) for key, each_ms in times.items() if key != "n"}
        found[f"{size >> 10} KiB"] = each
    return found


def lead(group: RankGroup, batches: list[int], steps: int) -> dict[str, Any]:
    """Run the leader: the collectives, then the decode steps of both ranks."""
    found: dict[str, Any] = {"all_reduce": reductions(group.collectives, group.device)}
    with PlanSender(group.place) as sender:
        engine = engine_of(group.device, group.shard, max(batches))
        sender.accept()
        engine.lead(sender, group.collectives, len(RANKS))
        started = time.monotonic()
        engine.capture()
        found["capture_s"] = round(time.monotonic() - started, 2)
        found["decode"] = measured(engine, batches, steps)
        sender.publish(StopPlans())
    return found


def follow(group: RankGroup, batches: list[int]) -> None:
    """Run the follower until the leader stops."""
    reductions(group.collectives, group.device)
    engine = engine_of(group.device, group.shard, max(batches))
    node = engine.follower(group.collectives)
    with PlanReceiver(group.place) as receiver:
        while True:
            frame = receiver.receive(1.0)
            for plan in frame.plans if frame is not None else ():
                if isinstance(plan, StopPlans):
                    return
                node.run(plan)


def main() -> None:
    """Measure one GPU, then two, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    batches = [int(part) for part in given.batches.split(",")]
    if given.rank is not None:
        device = torch.device("cuda", given.rank)
        prepare_device(device)
        place = GroupPlace(ranks=RANKS, rank=given.rank, epoch=1, folder=given.folder)
        with RankGroup(place, device) as group:
            if group.place.is_leader:
                (given.folder / "leader.json").write_text(json.dumps(lead(group, batches, given.steps)))
            else:
                follow(group, batches)
        return
    if torch.cuda.device_count() < len(RANKS):
        raise SystemExit(f"this benchmark needs 2 GPUs, and {torch.cuda.device_count()} are here")
    device = torch.device("cuda", 0)
    prepare_device(device)
    engine = engine_of(device, WHOLE, max(batches))
    compile_in_parallel(engine.trace, "one GPU")
    engine.capture()
    one = measured(engine, batches, given.steps)
    del engine
    compile_ahead(device, max(batches))
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        command = [sys.executable, "-m", "bench.gpu_tp", "--batches", given.batches, "--steps", str(given.steps)]
        ranks = [subprocess.Popen([*command, "--rank", str(rank), "--folder", folder]) for rank in RANKS]
        codes = [rank.wait(400) for rank in ranks]
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        two = json.loads((Path(folder) / "leader.json").read_text())
    result = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "layers": LAYERS,
        "one_gpu": one,
        "two_gpus": two,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
