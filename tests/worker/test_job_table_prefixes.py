"""Keys of the prefix cache from the worker's jobs to the engine's pages: numbers that are not ids share none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle
from mstar_core.graph.declare.nodes import KV_CACHE, KVSpec, NodeSpec, Sampling
from mstar_core.layers.kv_view import KVView
from mstar_core.worker.job_table import Jobs
from mstar_core.worker.state.playback import Sound
from tests.engine.tiny_engine import LAYERS, VOCAB, Driver, TinyLM, make_engine, prompt

TAGGED = NodeSpec(
    name="LM",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]", "classes": "i64[n]"},
    kv=KVSpec(layers=LAYERS, kv_heads=2, head_dim=8),
    sampling=Sampling(port="token"),
)
LENGTH = 13


class TaggedLM(TinyLM):
    """TinyLM whose tokens may have classes, or consist of classes alone."""

    def forward(  # type: ignore[override]
        self, kv: KVView, positions: Tensor, tokens: Tensor | None = None, classes: Tensor | None = None
    ) -> dict[str, Tensor]:
        if classes is None:
            return super().forward(kv, positions, tokens)
        embeds = self.embed((classes + 1) % VOCAB)
        return super().forward(kv, positions, embeds=embeds if tokens is None else embeds + self.embed(tokens))


def ask(driver: Driver, handle: int, inputs: dict[str, list[int]], content: bytes | None = None) -> tuple[int, int]:
    """Run one job as the worker makes it. Returns the drawn id and the tokens that the cache supplied."""
    jobs = Jobs({}, cast(Any, None), lambda: 0.0, cast(Any, None))
    request: Any = SimpleNamespace(handle=Handle(handle), salt=b"", sound=Sound())
    task: Any = SimpleNamespace(node=SimpleNamespace(spec=TAGGED, attend=None), edges=frozenset(("token",)))
    tensors = {port: torch.tensor(values) for port, values in inputs.items()}
    job = jobs.make(request, task, tensors, ("token",), "main", sample=True, content=content)
    job.key = cast(Any, handle)
    driver.open(handle)
    driver.engine.submit(job)
    driver.run()
    assert not driver.failed
    driver.engine.close(Handle(handle))
    done = driver.done[handle]
    return int(done.outputs["token"]), done.cached_tokens


def fresh(inputs: dict[str, list[int]]) -> int:
    return ask(driver_of(prefix_cache=False), 1, inputs)[0]


def driver_of(**changes: object) -> Driver:
    return Driver(make_engine(spec=TAGGED, module=TaggedLM(), **changes))


@pytest.mark.parametrize("ports", [("classes",), ("tokens", "classes")])
def test_numbers_beside_ids_share_no_pages_by_their_length(ports: tuple[str, ...]) -> None:
    driver = driver_of()
    for handle in (1, 2, 3):
        inputs = {port: prompt(10 * handle + number, LENGTH) for number, port in enumerate(ports)}
        assert ask(driver, handle, inputs) == (fresh(inputs), 0)


def test_numbers_with_a_content_key_share_pages_if_it_is_equal() -> None:
    driver = driver_of()
    cached = []
    for handle, seed in enumerate((1, 1, 2), start=1):
        inputs = {"classes": prompt(seed, LENGTH)}
        drawn, tokens = ask(driver, handle, inputs, b"classes %d" % seed)
        assert drawn == fresh(inputs)
        cached.append(tokens)
    assert cached == [0, 12, 0]


def test_ids_alone_share_pages_without_a_content_key() -> None:
    driver = driver_of()
    inputs = {"tokens": prompt(1, LENGTH)}
    assert [ask(driver, handle, inputs) for handle in (1, 2)] == [(fresh(inputs), 0), (fresh(inputs), 12)]
