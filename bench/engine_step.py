"""Host cost of a decode step of the KV engine, with a counter model that computes almost nothing.

Run from the repository root: `python bench/engine_step.py [--attention] [--sampling] [--steps 1000]`. Prints JSON:
microseconds of process CPU time per step at each batch size, and the slope per extra sequence. With --attention the
model also writes and reads a one-head cache; with --sampling the sequences use temperature and top-p.
"""

from __future__ import annotations

import argparse
import json
import platform
import time

import torch
from torch import Tensor, nn

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.device import prepare_device
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.graph.declare.nodes import KV_CACHE, KVSpec, NodeSpec, Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.kv_view import KVView

VOCAB = 64
BATCHES = (1, 8, 32, 64)
SPEC = NodeSpec(
    name="counter",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=8),
    sampling=Sampling(port="token"),
)


class Counter(nn.Module):
    """Model that returns its input id plus one; with `attends`, it also uses the cache."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.rows = torch.roll(torch.eye(VOCAB), 1, dims=1)

    def forward(self, *, kv: KVView, positions: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        if self.attends:
            vector = self.rows[tokens, :8][:, None]
            kv.attend(0, vector, vector, vector)
        return {"hidden": tokens}

    def head(self, hidden: Tensor) -> Tensor:
        return self.rows.index_select(0, hidden)


def measure(batch: int, steps: int, *, attends: bool, sampling: SamplingParams) -> float:
    """Measure CPU microseconds per decode step."""
    length = steps + 100
    settings = KVSettings(
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_pages=batch * (length // 16 + 2),
        page_size=16,
        max_slots=batch,
        max_seq_len=length + 32,
        vocab=VOCAB,
        token_budget=4096,
        prefix_cache=False,
    )
    engine = KVCacheEngine(SPEC, Counter(attends), settings)
    for handle in range(batch):
        engine.open(Handle(handle), sampling, length)
        engine.submit(Job(key=JobKey(2 * handle), handle=Handle(handle), inputs={"tokens": torch.tensor([1, 2, 3])}))
        loop = LoopSpec(max_iters=length, carry={"token": "token"}, stop_port="token", stop_ids=(VOCAB + 1,))
        engine.submit(Job(key=JobKey(2 * handle + 1), handle=Handle(handle), loop=loop))
    for _ in range(50):
        running = engine.launch()
        assert running is not None
        engine.collect(running)
    start = time.process_time()
    for _ in range(steps):
        running = engine.launch()
        assert running is not None
        result = engine.collect(running)
    spent = time.process_time() - start
    assert result.rows == batch
    return spent / steps * 1e6


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--sampling", action="store_true")
    options = parser.parse_args()
    prepare_device(torch.device("cpu"))
    drawn = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=3)
    sampling = drawn if options.sampling else SamplingParams()
    cost = {batch: measure(batch, options.steps, attends=options.attention, sampling=sampling) for batch in BATCHES}
    report = {
        "what": "host CPU per decode step, microseconds",
        "attention": options.attention,
        "sampling": options.sampling,
        "steps": options.steps,
        "per_step_us": {str(batch): round(value, 1) for batch, value in cost.items()},
        "per_extra_sequence_us": round((cost[BATCHES[-1]] - cost[1]) / (BATCHES[-1] - 1), 2),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
