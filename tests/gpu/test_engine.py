"""The KV engine on CUDA: captured steps against plain ones and against the CPU, in float32 and in bfloat16."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.nodes import KV_CACHE, KVSpec, NodeSpec, Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import AttentionSpec, DecoderBlock, Head, RMSNorm, Rotary, RotarySpec, TokenEmbedding
from mstar_core.layers.kv_view import KVView
from mstar_core.layers.linear import fuse_projections
from tests.engine.tiny_engine import Driver, TinyLM, engine_of, generate, make_engine, prompt

pytestmark = pytest.mark.gpu

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=5),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=1.2, top_p=0.6, repetition_penalty=1.1, seed=-4),
    SamplingParams(temperature=1.1, top_k=9, top_p=0.9, min_p=0.02, seed=8),
)
REQUESTS = [(prompt(seed, 3 + 5 * seed), 20 + seed, SAMPLINGS[seed % len(SAMPLINGS)]) for seed in range(7)]
ADJUSTED = (
    SamplingParams(temperature=0.9, presence_penalty=1.2, frequency_penalty=0.7, seed=3),
    SamplingParams(logit_bias={7: 4.0, 11: -3.0}, frequency_penalty=2.0),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, logit_bias={5: 2.5}, seed=6),
    *SAMPLINGS,
)
WIDE = NodeSpec(
    name="LM",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]"},
    kv=KVSpec(layers=2, kv_heads=2, head_dim=128),
    sampling=Sampling(port="token"),
)


class WideLM(nn.Module):
    """Two blocks with heads of 128, three query heads to a key head, as the kernels are built for."""

    def __init__(self, vocab: int = 2000) -> None:
        super().__init__()
        spec = AttentionSpec(width=512, heads=6, kv_heads=2, head_dim=128)
        self.embed = TokenEmbedding(vocab, 512)
        self.rotary = Rotary(RotarySpec(width=128))
        self.blocks = nn.ModuleList([DecoderBlock(spec, 1024, layer, 1e-5) for layer in range(2)])
        self.norm = RMSNorm(512)
        self.out = Head(512, vocab)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        self.embed.weight.mul_(6.0)

    def forward(self, kv: KVView, positions: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        rotation = self.rotary(positions)
        for block in self.blocks:
            x = block(x, kv, rotation)
        return {"hidden": self.norm(x)}

    def head(self, hidden: Tensor) -> Tensor:
        return self.out(hidden) * 4


def wide_engine(cuda: torch.device, module: WideLM, **changes: object) -> KVCacheEngine:
    settings: dict[str, object] = {
        "device": cuda,
        "dtype": torch.bfloat16,
        "num_pages": 200,
        "page_size": 16,
        "max_slots": 8,
        "max_seq_len": 256,
        "vocab": 2000,
        "token_budget": 64,
        "attention": "flashinfer",
        "lookahead": 1,
    }
    return engine_of(WIDE, module, **(settings | changes))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_captured_equals_eager_equals_cpu_in_float32(cuda: torch.device, lookahead: int) -> None:
    expected = generate(REQUESTS)
    module = TinyLM().to(cuda)
    eager = make_engine(device=cuda, module=module, lookahead=lookahead)
    assert generate(REQUESTS, lookahead=lookahead, engine=eager) == expected
    captured = make_engine(device=cuda, module=module, lookahead=lookahead, graphs=(1, 8, 16))
    assert generate(REQUESTS, lookahead=lookahead, engine=captured) == expected
    counts = captured.graph_counts
    assert counts is not None and counts.hits > 20 and counts.misses == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_adjusted_logits_give_the_ids_of_the_cpu_before_and_after_the_capture(
    cuda: torch.device, lookahead: int
) -> None:
    """The first rounds run uncaptured and request the variants; the last one replays them."""
    requests = [(prompt(seed, 3 + 5 * seed), 20 + seed, each) for seed, each in enumerate(ADJUSTED)]
    expected = generate(requests)
    sizes = CaptureSizes(decode=(1, 8), prefill=(64,))
    engine = make_engine(device=cuda, module=TinyLM().to(cuda), lookahead=lookahead, graphs=sizes)
    for _ in range(3):
        assert generate(requests, lookahead=lookahead, engine=engine) == expected
        while engine.idle():
            pass
    before = engine.counters()["graph_misses"]
    assert generate(requests, lookahead=lookahead, engine=engine) == expected
    assert engine.counters()["graph_misses"] == before > 0


def short_steps(engine: KVCacheEngine) -> KVCacheEngine:
    """Return an engine as after measurements of short steps, so that it launches several at once from the start."""
    graphs = engine._runner.graphs
    assert graphs is not None and graphs.decode is not None
    for size in graphs.decode.buckets.sizes:
        graphs.decode.buckets[size].cost.base_s = 1e-5
    return engine


Requests = list[tuple[list[int], int, SamplingParams]]


def launches_of(engine: KVCacheEngine, requests: Requests) -> tuple[list[list[int]], int]:
    """Ids of requests that run together, and the results that it took."""
    driver, keys = Driver(engine, 1), []
    for handle, (ids, steps, sampling) in enumerate(requests):
        driver.open(handle, sampling, len(ids) + steps + 1)
        driver.prefill(handle, ids)
        keys.append(driver.decode(handle, steps))
    driver.run()
    assert not driver.failed
    return [driver.ids[key] for key in keys], len(driver.results)


def test_several_steps_at_once_give_the_ids_of_the_cpu(cuda: torch.device) -> None:
    expected, module = generate(REQUESTS), TinyLM().to(cuda)
    for buckets in ((1, 8, 16), (2,)):
        engine = make_engine(device=cuda, module=module, lookahead=1, graphs=buckets, steps_at_once=8)
        assert generate(REQUESTS, lookahead=1, engine=short_steps(engine)) == expected
        assert generate(REQUESTS, lookahead=1, engine=engine) == expected


@pytest.mark.parametrize("is_fused", [False, True], ids=["planned kernels", "own kernel"])
def test_several_steps_at_once_cross_pages_as_single_ones_do(cuda: torch.device, is_fused: bool) -> None:
    """Sequences that begin pages at different steps. All end together, so that equal steps give equal bits."""
    module = WideLM().to(cuda, torch.bfloat16)
    if is_fused:
        fuse_projections(module)
    requests = [(prompt(seed, 3 + 5 * seed), 90, SAMPLINGS[seed]) for seed in range(4)]
    single, single_count = launches_of(wide_engine(cuda, module, graphs=(4,)), requests)
    engine = short_steps(wide_engine(cuda, module, graphs=(4,), steps_at_once=8))
    several, count = launches_of(engine, requests)
    assert several == single and count < single_count / 2
    assert engine.counters()["graph_misses"] == 0


def test_captured_decode_gives_the_ports_that_loops_emit(cuda: torch.device) -> None:
    """Hidden states per token of a captured step equal those of the uncaptured step."""
    module, found = TinyLM().to(cuda), []
    for graphs in ((1, 4), ()):
        engine = make_engine(device=cuda, module=module, lookahead=1, graphs=graphs)
        driver, keys = Driver(engine, 1), []
        for handle, emit in enumerate([("hidden", "velocity"), (), ("velocity",)]):
            driver.open(handle, SAMPLINGS[handle])
            driver.prefill(handle, prompt(handle, 4 + handle))
            loop = LoopSpec(max_iters=12, carry={"token": "token"}, stop_port="token", emit=emit)
            keys.append(driver.submit(handle, loop=loop, outputs=("token",)))
        driver.run()
        found.append([value for key in keys[::2] for item in driver.emissions[key] for value in item.outputs.values()])
        if graphs:
            assert engine.graph_counts is not None and engine.graph_counts.misses == 0
    assert len(found[0]) == len(found[1]) == 36
    torch.testing.assert_close(torch.cat(found[0]), torch.cat(found[1]), atol=1e-4, rtol=1e-4)


def test_flashinfer_gives_the_logits_of_torch_attention(cuda: torch.device) -> None:
    module = WideLM().to(cuda, torch.bfloat16)
    fuse_projections(module)
    found = {}
    for name, dtype, own in (
        ("flashinfer", torch.bfloat16, module),
        ("torch", torch.bfloat16, module),
        ("reference", torch.float32, WideLM().to(cuda)),
    ):
        attention = "flashinfer" if name == "flashinfer" else "torch"
        engine = wide_engine(cuda, own, dtype=dtype, attention=attention, prefix_cache=False, token_budget=24)
        ids = torch.tensor(prompt(5, 53))
        engine.open(Handle(1), SamplingParams(), 200)
        engine.submit(Job(key=JobKey(1), handle=Handle(1), inputs={"tokens": ids}, outputs=("logits",)))
        rows = []
        while (running := engine.launch()) is not None:
            rows += [done.outputs["logits"] for done in engine.collect(running).done]
        found[name] = torch.cat(rows).float()
    scale = found["reference"].norm()
    assert (found["torch"] - found["reference"]).norm() / scale < 0.03
    assert (found["flashinfer"] - found["reference"]).norm() / scale < 0.03
    assert (found["flashinfer"] - found["torch"]).norm() / scale < 0.02


def test_captured_bfloat16_parts_from_the_plain_step_at_near_ties_alone(cuda: torch.device) -> None:
    """At the first difference of greedy ids, float32 logits of the two must be closer than bfloat16 can resolve."""
    module, exact = WideLM().to(cuda, torch.bfloat16), WideLM().to(cuda)
    fuse_projections(module)
    rows = [(prompt(seed, 5 + 9 * seed), 40, SamplingParams(repetition_penalty=1.1)) for seed in range(5)]
    plain = generate(rows, lookahead=1, engine=wide_engine(cuda, module))
    captured = generate(rows, lookahead=1, engine=wide_engine(cuda, module, graphs=(1, 8)))
    for (ids, _, sampling), one, two in zip(rows, plain, captured, strict=True):
        assert len(one) == len(two)
        pairs = zip(one, two, strict=True)
        parted = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
        if parted is not None:
            logits = next_logits(cuda, exact, ids + one[:parted], sampling.repetition_penalty)
            assert (logits[one[parted]] - logits[two[parted]]).abs() < 0.1 * logits.std(), parted


def next_logits(cuda: torch.device, module: WideLM, ids: list[int], penalty: float) -> Tensor:
    """Float32 [vocab] after these ids, with the penalty on each of them."""
    engine = wide_engine(cuda, module, dtype=torch.float32, attention="torch", prefix_cache=False, token_budget=256)
    engine.open(Handle(1), SamplingParams(), 200)
    engine.submit(Job(key=JobKey(1), handle=Handle(1), inputs={"tokens": torch.tensor(ids)}, outputs=("logits",)))
    running = engine.launch()
    assert running is not None
    (done,) = engine.collect(running).done
    logits = done.outputs["logits"][-1].float().clone()
    seen = torch.tensor(sorted(set(ids)), device=logits.device)
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return logits


def test_ids_do_not_depend_on_the_batch(cuda: torch.device) -> None:
    module = TinyLM().to(cuda)
    together = generate(
        REQUESTS, lookahead=1, engine=make_engine(device=cuda, module=module, lookahead=1, graphs=(16,))
    )
    engine = make_engine(device=cuda, module=module, lookahead=1, graphs=(1, 8, 16))
    for request, expected in zip(REQUESTS, together, strict=True):
        assert generate([request], lookahead=1, engine=engine) == [expected]


def test_no_page_is_left_after_many_cancels(cuda: torch.device) -> None:
    module = WideLM().to(cuda, torch.bfloat16)
    fuse_projections(module)
    engine = wide_engine(cuda, module, graphs=(1, 8), num_pages=40, prefix_cache=False)
    chance, keys, opened, running = random.Random(4), 0, set[int](), []
    for handle in range(400):
        engine.open(Handle(handle), SAMPLINGS[handle % 4], 100)
        keys += 2
        ids = torch.tensor(prompt(handle, 1 + handle % 30))
        engine.submit(Job(key=JobKey(keys), handle=Handle(handle), inputs={"tokens": ids}, outputs=("token",)))
        loop = LoopSpec(max_iters=1 + handle % 40, carry={"token": "token"}, stop_port="token")
        engine.submit(Job(key=JobKey(keys + 1), handle=Handle(handle), loop=loop, outputs=("token",)))
        opened.add(handle)
        for _ in range(chance.randrange(8)):
            if (launched := engine.launch()) is not None:
                running.append(launched)
            if running and (len(running) > 1 or launched is None):
                assert not engine.collect(running.pop(0)).failed
        while len(opened) > 12 or (opened and chance.random() < 0.2):
            gone = chance.choice(sorted(opened))
            opened.discard(gone)
            engine.close(Handle(gone))
    for handle in opened:
        engine.close(Handle(handle))
    while running:
        engine.collect(running.pop(0))
    memory = engine.memory()
    assert (memory.pages_used, memory.slots_used) == (0, 0)
    assert torch.isfinite(torch.stack([pool.float().abs().max() for pool in engine._runner._attention.pools])).all()
