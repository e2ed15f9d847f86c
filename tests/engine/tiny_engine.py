"""A tiny random transformer, an engine around it, and a driver that plays the worker. Used by the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mstar_core.engine.base import Done, Emission, Failed, Handle, Job, JobKey, LoopSpec, StepResult
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.graph.declare.nodes import KV_CACHE, Attend, KVSpec, NodeSpec, Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import AttentionSpec, DecoderBlock, Head, RMSNorm, Rotary, RotarySpec, TokenEmbedding
from mstar_core.layers.kv_view import KVView
from mstar_core.parallel.shards import WHOLE, Shard, module_slices

VOCAB, WIDTH, LAYERS = 53, 32, 2
LM = NodeSpec(
    name="LM",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]", "embeds": "f32[n,32]", "latents": "f32[m,32]", "hidden": "f32[n,32]"},
    kv=KVSpec(layers=LAYERS, kv_heads=2, head_dim=8, branches=("main", "side")),
    sampling=Sampling(port="token"),
)


class TinyLM(nn.Module):
    """Two decoder blocks with shared key heads; random weights of a fixed seed. shard: one rank's part of them."""

    def __init__(self, sharpness: float = 6.0, shard: Shard = WHOLE) -> None:
        super().__init__()
        spec = AttentionSpec(width=WIDTH, heads=4, kv_heads=2, head_dim=8)
        self.embed = TokenEmbedding(VOCAB, WIDTH, shard)
        self.rotary = Rotary(RotarySpec(width=8))
        self.blocks = nn.ModuleList([DecoderBlock(spec, 48, layer, 1e-5, shard) for layer in range(LAYERS)])
        self.norm = RMSNorm(WIDTH)
        self.out = Head(WIDTH, VOCAB, shard=shard)
        self.sharpness = sharpness
        if not shard.is_whole:
            fill_part(self, TinyLM(sharpness))
            return
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        self.embed.weight.mul_(6.0)

    def forward(
        self,
        kv: KVView,
        positions: Tensor,
        tokens: Tensor | None = None,
        embeds: Tensor | None = None,
        latents: Tensor | None = None,
        step: Tensor | None = None,
    ) -> dict[str, Tensor]:
        given = embeds if embeds is not None else latents
        x = self.embed(tokens) if given is None else given
        if step is not None:
            x = x + step[:, None].to(x.dtype) * 0.1
        rotation = self.rotary(positions)
        for block in self.blocks:
            x = block(x, kv, rotation)
        x = self.norm(x)
        return {"hidden": x, "velocity": x.tanh(), "latents_out": (0.5 * x).tanh()}

    def head(self, hidden: Tensor) -> Tensor:
        return self.out(hidden) * self.sharpness


HOOKS = ("clock", "faults", "report", "captures", "to_host", "is_captured", "share")
"""Arguments of the engine beside its settings."""


def fill_part(module: nn.Module, whole: nn.Module) -> None:
    """Fill one rank's module with its part of the weights of the whole one."""
    parts, values = module_slices(module), dict(whole.named_parameters())
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)
        part, value = parts.get(name), values[name]
        if part is None:
            parameter.copy_(value)
            continue
        (span,) = part.spans
        parameter.zero_().narrow(part.dim, 0, len(span)).copy_(value.narrow(part.dim, span.start, len(span)))


def make_engine(**changes: object) -> KVCacheEngine:
    """A small CPU engine around TinyLM; any constructor argument may be changed."""
    settings: dict[str, object] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "num_pages": 64,
        "page_size": 4,
        "max_slots": 16,
        "max_seq_len": 96,
        "vocab": VOCAB,
        "token_budget": 64,
    }
    settings.update(changes)
    spec = settings.pop("spec", LM)
    module = settings.pop("module", None) or TinyLM()
    return engine_of(spec, module, **settings)


def engine_of(spec: object, module: object, **settings: object) -> KVCacheEngine:
    """An engine from flat settings; `graphs` may be the sizes of decode batches alone."""
    hooks = {name: settings.pop(name) for name in set(HOOKS) & settings.keys()}
    graphs = settings.pop("graphs", ())
    buckets = graphs if isinstance(graphs, CaptureSizes) else CaptureSizes(decode=tuple(graphs))  # type: ignore[arg-type]
    return KVCacheEngine(spec, module, KVSettings(graphs=buckets, **settings), **hooks)  # type: ignore[arg-type]


@dataclass
class Driver:
    """Plays the worker: submits, launches, collects with the engine's lookahead, and sorts what came."""

    engine: KVCacheEngine
    lookahead: int = 0
    done: dict[int, Done] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    emissions: dict[int, list[Emission]] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)
    keys: int = 0
    running: list[object] = field(default_factory=list)
    on_done: dict[int, Callable[[Done], None]] = field(default_factory=dict)

    def open(self, handle: int, sampling: SamplingParams | None = None, max_tokens: int = 52) -> None:
        self.engine.open(Handle(handle), sampling or SamplingParams(), max_tokens)

    def submit(self, handle: int, **fields: object) -> int:
        self.keys += 1
        self.engine.submit(Job(key=JobKey(self.keys), handle=Handle(handle), **fields))  # type: ignore[arg-type]
        return self.keys

    def prefill(self, handle: int, ids: list[int] | Tensor, **fields: object) -> int:
        fields.setdefault("outputs", ("token",))
        return self.submit(handle, inputs={"tokens": torch.as_tensor(ids)}, **fields)

    def decode(
        self, handle: int, steps: int, stop: tuple[int, ...] = (), known: tuple[int, ...] = (), **fields: object
    ) -> int:
        loop = LoopSpec(max_iters=steps, carry={"token": "token"}, stop_port="token", stop_ids=stop, known=known)
        return self.submit(handle, loop=loop, outputs=("token",), **fields)

    def turn(self) -> bool:
        """One turn of the worker, which launches where rows are ready. False when nothing was launched, nor was out."""
        launched = self.engine.launch() if self.engine.pressure().ready else None
        if launched is not None:
            self.running.append(launched)
        elif not self.running:
            return False
        if len(self.running) > self.lookahead or launched is None:
            self.collect()
        return True

    def run(self, limit: int = 2000) -> Driver:
        for _ in range(limit):
            if not self.turn():
                return self
        raise AssertionError(f"still running after {limit} turns")

    def collect(self) -> None:
        """Take the results of the oldest step in flight."""
        result = self.engine.collect(self.running.pop(0))  # type: ignore[arg-type]
        self.results.append(result)
        if result.loop is not None:
            for key, drawn in zip(result.loop.keys.tolist(), result.loop.ids.tolist(), strict=True):
                self.ids.setdefault(key, []).append(drawn)
        for item in result.emissions:
            self.emissions.setdefault(int(item.job.key), []).append(item)
        for failed in result.failed:
            assert int(failed.job.key) not in self.failed | self.done
            self.failed[int(failed.job.key)] = failed
        for done in result.done:
            assert int(done.job.key) not in self.failed | self.done
            self.done[int(done.job.key)] = done
            if int(done.job.key) in self.on_done:
                self.on_done[int(done.job.key)](done)


def prompt(seed: int, length: int) -> list[int]:
    """Random ids of a prompt."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(
    requests: list[tuple[list[int], int, SamplingParams]],
    *,
    lookahead: int = 0,
    seed: bytes | None = b"",
    engine: KVCacheEngine | None = None,
    **changes: object,
) -> list[list[int]]:
    """Ids of prefill and decode of several requests that share one engine, submitted together."""
    driver = Driver(engine or make_engine(lookahead=lookahead, **changes), lookahead)
    keys = []
    for handle, (ids, steps, sampling) in enumerate(requests):
        driver.open(handle, sampling)
        keys.append((driver.prefill(handle, ids, tokens_hash_seed=seed), driver.decode(handle, steps)))
    driver.run()
    assert not driver.failed, driver.failed
    for handle in range(len(requests)):
        driver.engine.close(Handle(handle))
    assert driver.engine.memory().pages_used == 0 and driver.engine.memory().slots_used == 0
    return [[int(driver.done[first].outputs["token"]), *driver.ids[loop]] for first, loop in keys]


def reference(ids: list[int], steps: int, sampling: SamplingParams | None = None) -> list[int]:
    """The ids of one request alone, whole prefill, no cache, plenty of pages."""
    plain = generate([(ids, steps, sampling or SamplingParams())], num_pages=256, token_budget=1000, prefix_cache=False)
    return plain[0]


CAUSAL = Attend()
