"""LoRA adapters in an engine: many in one batch, beside sequences without one, chunked, captured and preempted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mstar_core.engine.base import Handle
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.lora import AdapterLimits
from mstar_core.layers.transformer import adapt_layers
from mstar_core.weights.adapter import Adapter
from tests.engine.tiny_engine import Driver, TinyLM, make_engine, prompt
from tests.fakes.adapters import merge, write_adapter

ROWS = (0, -1, 2, 1, -1, 2, 0)
STEPS = 9


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("adapters")
    return [write_adapter(base / str(n), TinyLM(), n, rank=2 + n, alpha=2.0) for n in range(3)]


def adapted(folders: list[Path], **changes: object) -> KVCacheEngine:
    module = TinyLM()
    bank = adapt_layers(module, AdapterLimits.of(len(folders), 8))
    for row, folder in enumerate(folders):
        bank.load(row, Adapter.read(folder))
    return make_engine(module=module, adapters=bank, **changes)


def merged(folder: Path, rank: int) -> TinyLM:
    module = TinyLM()
    merge(module, folder, 2.0 / rank)
    return module


def ids(engine: KVCacheEngine, rows: tuple[int, ...], lookahead: int = 0, sampled: bool = False) -> list[list[int]]:
    """Ids that requests with these adapters draw after one prompt each."""
    driver, keys = Driver(engine, lookahead), []
    for handle, row in enumerate(rows):
        sampling = SamplingParams(temperature=0.8, seed=handle) if sampled else SamplingParams()
        engine.open(Handle(handle), sampling, 52, adapter=row)
        first = driver.prefill(handle, prompt(handle % 4, 5 + 3 * handle), tokens_hash_seed=b"%d" % row)
        keys.append((first, driver.decode(handle, STEPS)))
    driver.run()
    assert not driver.failed
    drawn = [[int(driver.done[first].outputs["token"]), *driver.ids[then]] for first, then in keys]
    for handle in range(len(rows)):
        engine.close(Handle(handle))
    return drawn


def expected(folders: list[Path], **changes: object) -> list[list[int]]:
    """The same from one engine per adapter with merged weights, each request in the place that it has in the batch."""
    found = {
        row: ids(make_engine(module=merged(folders[row], 2 + row) if row >= 0 else TinyLM()), (-1,) * len(ROWS))
        for row in set(ROWS)
    }
    return [found[row][place] for place, row in enumerate(ROWS)]


@pytest.mark.parametrize("budget", [64, 7], ids=["whole", "in chunks"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_mixed_batch_draws_what_merged_weights_draw(folders: list[Path], budget: int, lookahead: int) -> None:
    engine = adapted(folders, token_budget=budget, lookahead=lookahead)
    assert ids(engine, ROWS, lookahead) == expected(folders)


@pytest.mark.parametrize("buckets", [(8,), (2,), (1, 4, 8)])
def test_captured_steps_draw_the_same(folders: list[Path], buckets: tuple[int, ...]) -> None:
    engine = adapted(folders, graphs=CaptureSizes(decode=buckets, prefill=(32, 64)))
    assert ids(engine, ROWS) == expected(folders)
    assert engine.counters()["graph_hits"] > 0 and engine.counters()["prefill_hits"] > 0
    assert ids(engine, (-1,) * len(ROWS)) == ids(make_engine(), (-1,) * len(ROWS)), "nothing of the adapters is left"


def test_sequences_without_an_adapter_keep_their_bits_beside_others(folders: list[Path]) -> None:
    """Hidden states of prompts in one forward, with and without adapters of their neighbours."""

    def hidden(engine: KVCacheEngine, rows: tuple[int, ...]) -> list[torch.Tensor]:
        driver = Driver(engine)
        for handle, row in enumerate(rows):
            engine.open(Handle(handle), SamplingParams(), 40, adapter=row)
        keys = [
            driver.prefill(handle, prompt(handle, 6), outputs=("hidden", "token"), sample=True)
            for handle in range(len(rows))
        ]
        driver.run()
        return [driver.done[key].outputs["hidden"] for key in keys]

    beside = hidden(adapted(folders), (-1, 0, -1, 2))
    alone = hidden(make_engine(), (-1, -1, -1, -1))
    for place in (0, 2):
        assert torch.equal(beside[place], alone[place])
    for place in (1, 3):
        assert not torch.allclose(beside[place], alone[place], atol=0.05)


def test_a_preempted_sequence_is_computed_again_with_its_adapter(folders: list[Path]) -> None:
    engine = adapted(folders, num_pages=22, prefix_cache=False)
    assert ids(engine, ROWS) == expected(folders)


def test_an_engine_without_adapters_ignores_the_row() -> None:
    assert ids(make_engine(), (0, 1)) == ids(make_engine(), (-1, -1))
