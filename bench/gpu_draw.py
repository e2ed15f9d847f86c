"""Device time of sampling in a CUDA graph on one GPU: penalty, temperature, softmax, top-p, draw.

Run from the repository root: `python bench/gpu_draw.py [--rows 1,8,32,64,128] [--before FILE] [--out FILE]`. Logits are
bfloat16 normals: `flat` with a deviation of 1.1, as random weights of Orpheus' shapes give them, `peaked` with 5.
Each graph draws from several sets of logits in turn; the time is that of a replay by events over its draws, the
median of the repetitions. `--before` names a file with another form of the module `top_p` that takes float32 logits; it
is timed in the same run with the conversion that it needs, and without.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mstar_core.engine.sampling import top_p
from mstar_core.engine.sampling.columns import UploadedColumns
from mstar_core.graph.declare.sampling import SamplingParams

VOCABULARIES = {"full": 156940, "restricted": 28673}
SPREADS = {"flat": 1.1, "peaked": 5.0}
TEMPERATURE, TOP_P, PENALTY = 0.6, 0.8, 1.3
SETS, DRAWS_SEEN, REPEATS = 4, 600, 40
BEFORE, CONVERTED = "before, float32 given", "before, with the conversion"


def inputs(rows: int, vocab: int, spread: float, device: torch.device) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Return sets of logits and the other arguments of a draw."""
    generator = torch.Generator(device).manual_seed(rows + vocab)
    logits = [torch.randn(rows, vocab, generator=generator, device=device) * spread for _ in range(SETS)]
    seen = torch.zeros(rows, vocab, dtype=torch.bool, device=device)
    seen.scatter_(1, torch.randint(0, vocab, (rows, DRAWS_SEEN), generator=generator, device=device), True)
    params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, repetition_penalty=PENALTY)
    columns = UploadedColumns.of([params] * rows, device).columns
    chance = torch.rand(rows, generator=generator, dtype=torch.float64, device=device)
    rest = (columns, chance, torch.arange(rows, device=device), seen, None)
    return [each.bfloat16() for each in logits], rest


def timed(work: Callable[[int], Any]) -> tuple[float, list[Any]]:
    """Measure microseconds per set in a CUDA graph over all sets. Also return the results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in range(SETS):
            work(index)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = [work(index) for index in range(SETS)]
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / SETS)
    return statistics.median(times), [each.clone() for each in given]


def parts(work: Callable[[int], Any]) -> dict[str, float]:
    """Measure microseconds of each kernel of one draw with the profiler, slowest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for index in range(SETS):
            work(index)
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in found.events():
        spent[event.name] = spent.get(event.name, 0.0) + event.device_time_total / SETS
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def sampler_of(path: Path) -> Any:
    """Return the module `top_p` of another file."""
    spec = importlib.util.spec_from_file_location("nucleus_before", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(rows: int, vocab: int, spread: float, before: Any, device: torch.device) -> dict[str, Any]:
    """Measure one size: microseconds per draw now and before, the fraction of equal ids, and the kernels."""
    logits, rest = inputs(rows, vocab, spread, device)
    found: dict[str, Any] = {}
    found["now_us"], ids = timed(lambda index: top_p.draw(logits[index], *rest))
    found["kernels_us"] = parts(lambda index: top_p.draw(logits[index], *rest))
    if before is not None:
        wide = [each.float() for each in logits]
        found["before_us"], old_ids = timed(lambda index: before.draw(wide[index], *rest))
        found["before_with_conversion_us"], _ = timed(lambda index: before.draw(logits[index].float(), *rest))
        found["equal_ids"] = float((torch.stack(ids) == torch.stack(old_ids)).double().mean())
    return found


def main() -> None:
    """Measure every size and print one JSON object, then a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,32,64,128")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device, before = torch.device("cuda", 0), None if asked.before is None else sampler_of(asked.before)
    results: dict[str, Any] = {}
    for name, vocab in VOCABULARIES.items():
        for shape, spread in SPREADS.items():
            for rows in map(int, asked.rows.split(",")):
                results[f"{name}, {shape}, {rows} rows"] = measure(rows, vocab, spread, before, device)
    report = {
        "schema": 1,
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "vocabularies": VOCABULARIES,
        "spreads": SPREADS,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "penalty": PENALTY,
        "repeats": REPEATS,
        "results": results,
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, row in results.items():
        print(name, {key: round(value, 3) for key, value in row.items() if isinstance(value, float)})


if __name__ == "__main__":
    main()
