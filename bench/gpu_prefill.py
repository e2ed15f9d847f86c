"""Prefill of Orpheus' language model on one GPU, with random bfloat16 weights in the official 3B shapes.

Run from the repository root: `python bench/gpu_prefill.py [--out FILE]`. Two engines share the weights; one has
captured prefill, and both have captured decode. Prints JSON: time from a prompt's submission to its first id (and to
the second, sampled by the decode loop), host time of launch, delay of decoding rows when prompts arrive, and device
time of each captured bucket and of its attention.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_orpheus import SAMPLING, SPEC, VOCAB, captured, environment, event_ms, random_llama, spread

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec, StepResult
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.cuda_graphs.kinds import StepFamily
from mstar_core.engine.cuda_graphs.passes import CapturedPasses
from mstar_core.engine.device import prepare_device
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings

SHAPES = ((1, 40), (1, 128), (8, 40), (32, 45), (1, 512), (1, 2048))
FIRST, LATER = CaptureSizes(decode=(1, 8, 32), prefill=(128, 512)), (64, 256, 384, 768, 1024, 1536, 2048)
DECODE_LATER = (2, 4, 16, 48, 64)


class Bench:
    """One engine with counters for handles and keys, and the times of its launches."""

    def __init__(self, engine: KVCacheEngine) -> None:
        self.engine = engine
        self.next = 1
        self.flight: list[Any] = []
        self.launch_s: list[float] = []

    def prompt(self, tokens: int, iterations: int) -> tuple[int, int]:
        """Open a request and submit its prompt and loop (0 iterations: none). Return handle and prompt key."""
        handle, self.next = self.next, self.next + 1
        self.engine.open(Handle(handle), SAMPLING, tokens + iterations + 8)
        ids = torch.randint(0, 128000, (tokens,), generator=torch.Generator().manual_seed(handle))
        self.engine.submit(
            Job(key=JobKey(2 * handle), handle=Handle(handle), inputs={"tokens": ids}, outputs=("token",))
        )
        if iterations:
            loop = LoopSpec(max_iters=iterations, carry={"token": "token"}, stop_port="token", stop_ids=())
            self.engine.submit(Job(key=JobKey(2 * handle + 1), handle=Handle(handle), loop=loop, outputs=("token",)))
        return handle, 2 * handle

    def turn(self) -> StepResult | None:
        """Run one iteration of the worker loop, with one step of lookahead."""
        start = time.perf_counter()
        running = self.engine.launch()
        self.launch_s.append(time.perf_counter() - start)
        if running is not None:
            self.flight.append(running)
        if not self.flight or (len(self.flight) < 2 and running is not None):
            return None
        result = self.engine.collect(self.flight.pop(0))
        assert not result.failed, result.failed
        return result

    def drain(self) -> None:
        """Run until no work is left."""
        while self.turn() is not None or self.flight:
            pass


def first_ids(bench: Bench, rows: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Measure milliseconds from submission to the last prompt's first two ids, and host time of prefill launches."""
    first: list[float] = []
    second, host, steps = [], [], []
    for repeat in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = [bench.prompt(tokens, 2) for _ in range(rows)]
        waiting, looping = {key for _, key in made}, {key + 1 for _, key in made}
        bench.launch_s.clear()
        counted = 0
        while waiting or looping:
            result = bench.turn()
            if result is None:
                continue
            waiting -= {int(done.job.key) for done in result.done}
            if not waiting and len(first) <= repeat:
                first.append((time.perf_counter() - start) * 1e3)
                counted = len(bench.launch_s)
            if result.loop is not None:
                looping -= {int(key) for key in result.loop.keys}
        second.append((time.perf_counter() - start) * 1e3)
        host.append(max(bench.launch_s) * 1e3)
        steps.append(counted)
        bench.drain()
        for handle, _ in made:
            bench.engine.close(Handle(handle))
    return {
        "rows": rows,
        "tokens": tokens,
        "first_id_ms": spread(first[3:]),
        "second_id_ms": spread(second[3:]),
        "longest_launch_ms": spread(host[3:]),
        "turns_to_first": spread([float(each) for each in steps[3:]]),
    }


def stall(bench: Bench, running: int, arriving: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Measure gaps between decode steps, without prompts and in the ten steps after prompts arrive."""
    rows = [bench.prompt(40, 4000) for _ in range(running)]
    for _ in range(60):
        bench.turn()
    quiet, worst, lost = [], [], []
    for _ in range(repeats):
        gaps = []
        made: list[tuple[int, int]] = []
        last = time.perf_counter()
        for step in range(40):
            if step == 20:
                made = [bench.prompt(tokens, 0) for _ in range(arriving)]
            result = bench.turn()
            if result is not None and result.loop is not None:
                now = time.perf_counter()
                gaps.append((now - last) * 1e3)
                last = now
        usual = float(np.median(gaps[3:19]))
        quiet.append(usual)
        worst.append(max(gaps[19:]))
        lost.append(sum(gap - usual for gap in gaps[19:] if gap > 1.2 * usual))
        for handle, _ in made:
            bench.engine.close(Handle(handle))
    for handle, _ in rows:
        bench.engine.close(Handle(handle))
    bench.drain()
    return {
        "running": running,
        "arriving": arriving,
        "tokens": tokens,
        "quiet_step_ms": spread(quiet),
        "longest_gap_ms": spread(worst),
        "time_lost_ms": spread(lost),
    }


def replays(passes: CapturedPasses, engine: KVCacheEngine) -> dict[str, Any]:
    """Measure device time of a replay of each bucket, full of 45-token prompts, and of one layer's attention."""
    found: dict[str, Any] = {}
    (ids,) = (kind for kind in passes.kinds if kind.family is StepFamily.IDS)
    for bucket_size in passes.kinds[ids]:
        size, bucket = bucket_size[0], passes.buckets_of(ids)[bucket_size]
        rows = size // 45
        tables = np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)
        wide = np.zeros((rows, engine._memory.tables.ids.shape[1]), dtype=np.int32)
        wide[:, :3] = tables
        from mstar_core.engine.steps.attention import AttentionMetadata

        even = np.full(rows, 45, dtype=np.int64)
        packed = AttentionMetadata.of(np.arange(rows), np.zeros(rows, dtype=np.int64), wide, even)
        bucket.buffers.prepare(packed)
        query = torch.randn(size, 24, 128, device="cuda", dtype=torch.bfloat16)
        pair = torch.randn(2, size, 8, 128, device="cuda", dtype=torch.bfloat16)

        def attend(bucket: Any = bucket, query: torch.Tensor = query, pair: torch.Tensor = pair) -> None:
            for layer in range(28):
                bucket.buffers.view.attend(layer, query, pair[0], pair[1])

        attention = event_ms(captured(attend), 20)
        found[str(size)] = {
            "prompts": rows,
            "replay_ms": event_ms(bucket.graph.replay, 20),
            "attention_28_layers_ms": attention,
            "library_28_layers_ms": event_ms(captured(library(engine, packed, query)), 20),
        }
    return found


def library(engine: KVCacheEngine, packed: Any, query: torch.Tensor) -> Any:
    """Measure the same attention by FlashInfer, planned outside of the graph for these prompts."""
    attention: Any = engine._runner._attention
    starts = torch.from_numpy(packed.query_starts.astype(np.int32))
    pages = torch.from_numpy(packed.tables[:, :3].reshape(-1).copy())
    rows = len(packed.page_rows)
    wrapper = attention._library.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", backend="fa2"
    )
    kind = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    counts = torch.arange(0, 3 * rows + 1, 3, dtype=torch.int32)
    last = torch.full((rows,), 13, dtype=torch.int32)
    wrapper.plan(starts, counts, pages, last, 24, 8, 128, 16, causal=True, **kind)
    part = query[: int(starts[-1])]
    return lambda: [wrapper.run(part, pool) for pool in attention.pools]


def made(module: Any, device: torch.device, *, prompts: bool, budget: int) -> KVCacheEngine:
    """Build an engine with captured decode, with or without captured prefill."""
    later = CaptureSizes(
        decode=FIRST.decode,
        prefill=FIRST.prefill if prompts else (),
        decode_later=DECODE_LATER,
        prefill_later=LATER if prompts else (),
    )
    settings = KVSettings(
        device=device,
        dtype=torch.bfloat16,
        num_pages=6000,
        page_size=16,
        max_slots=64,
        max_seq_len=4096,
        vocab=VOCAB,
        token_budget=budget,
        attention="flashinfer",
        lookahead=1,
        prefix_cache=False,
        graphs=later,
    )
    return KVCacheEngine(SPEC, module, settings)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    prepare_device(device)
    report: dict[str, Any] = {"what": "prompts, Orpheus 3B shapes, random bf16", "env": environment(), "runs": []}
    module = random_llama(device)
    lines = []
    for name, prompts, budget in (("captured", True, 512), ("captured", True, 2048), ("plain", False, 2048)):
        start = time.perf_counter()
        engine = made(module, device, prompts=prompts, budget=budget)
        run: dict[str, Any] = {"name": name, "token_budget": budget, "start_s": round(time.perf_counter() - start, 2)}
        run["first_set"] = engine.counters()
        idle = []
        while True:
            start = time.perf_counter()
            more = engine.idle()
            idle.append(round(time.perf_counter() - start, 3))
            if not more:
                break
        run["idle_captures_s"], run["all_sets"] = idle, engine.counters()
        bench = Bench(engine)
        run["first_ids"] = [first_ids(bench, rows, tokens, options.repeats) for rows, tokens in SHAPES]
        run["stall"] = [stall(bench, 32, arriving, 45, options.repeats) for arriving in (1, 8, 32)]
        run["counters"], run["pages_left"] = engine.counters(), engine.memory().pages_used
        graphs = engine._runner.graphs
        if prompts and graphs is not None and budget == 2048:
            run["replays"] = replays(graphs.passes, engine)
        report["runs"].append(run)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
        for each in run["first_ids"]:
            lines.append(
                f"{name} {budget}: {each['rows']}x{each['tokens']} first {each['first_id_ms']['p50']:.2f} ms"
                f" second {each['second_id_ms']['p50']:.2f} launch {each['longest_launch_ms']['p50']:.2f} ms"
                f" turns {each['turns_to_first']['p50']:.0f}"
            )
        for each in run["stall"]:
            lines.append(
                f"{name} {budget}: 32 rows + {each['arriving']}: quiet {each['quiet_step_ms']['p50']:.2f}"
                f" longest {each['longest_gap_ms']['p50']:.2f} lost {each['time_lost_ms']['p50']:.2f} ms"
            )
        del engine, bench, graphs
        torch.cuda.empty_cache()
    print(json.dumps({"replays": [run.get("replays") for run in report["runs"]]}))
    print(json.dumps([run["counters"] for run in report["runs"]]))
    print(json.dumps([(run["start_s"], run["idle_captures_s"]) for run in report["runs"]]))
    print("\n".join(lines))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
