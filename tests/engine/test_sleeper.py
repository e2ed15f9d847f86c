"""Memory of nodes that sleep on a CPU: storages are really empty, and everything computes as before after a wake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mstar_core.engine.base import Handle
from mstar_core.engine.memory.cpu import CpuSleeper
from mstar_core.engine.memory.node_memory import MemoryContent, NodeMemory, is_covered, loaded_again
from mstar_core.errors import EngineError
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.lora import AdapterLimits
from mstar_core.layers.transformer import adapt_layers
from mstar_core.weights.adapter import Adapter
from tests.engine.tiny_engine import Driver, TinyLM, make_engine, prompt
from tests.fakes.adapters import write_adapter

CPU = torch.device("cpu")


def sizes(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def again(sleeper: CpuSleeper, old: nn.Module, new: nn.Module, tag: str = "LM") -> int:
    return sleeper.resume([tag], loaded_again(old, new, sleeper.dropped([tag])))


def draw(driver: Driver, handle: int, adapter: int = -1) -> list[int]:
    driver.engine.open(Handle(handle), SamplingParams(), 52, adapter=adapter)
    first = driver.prefill(handle, prompt(3, 21), tokens_hash_seed=b"x")
    then = driver.decode(handle, 12)
    driver.run()
    assert not driver.failed
    driver.engine.close(Handle(handle))
    return [int(driver.done[first].outputs["token"]), *driver.ids[then]]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_draws_the_same_ids_after_a_wake(tmp_path: Path, level: int) -> None:
    module = TinyLM()
    bank = adapt_layers(module, AdapterLimits.of(2, 8))
    bank.load(1, Adapter.read(write_adapter(tmp_path / "a", TinyLM(), 1)))
    engine = make_engine(module=module, adapters=bank)
    sleeper = CpuSleeper(CPU)
    sleeper.hold("LM", engine.node_memory())
    driver = Driver(engine)
    before = [draw(driver, 1), draw(driver, 2, adapter=1)]
    assert before[0] != before[1] and engine.memory().pages_cached
    engine.sleeps()
    held = [*module.parameters(), *engine.node_memory().scratch, *bank.stacks()]
    whole = sum(region.size_bytes for region in sleeper.regions("LM"))
    assert sleeper.pause("LM", level) == whole >= sum(size for size in sizes(*held) if size)
    assert not any(sizes(*held))
    stacks = sum(region.size_bytes for region in sleeper.regions("LM") if region.content is MemoryContent.KEPT)
    assert (sleeper.kept_bytes < whole) if level == 1 else (sleeper.kept_bytes == stacks)
    fresh = TinyLM()
    adapt_layers(fresh, AdapterLimits.of(2, 8))
    assert again(sleeper, module, fresh) == whole
    assert sleeper.kept_bytes == sleeper.asleep_bytes == 0
    assert not any(pool.any() for pool in engine.node_memory().scratch)
    assert not engine.memory().pages_cached
    assert [draw(driver, 3), draw(driver, 4, adapter=1)] == before


def test_a_deeper_sleep_drops_the_copies_on_the_host() -> None:
    module = TinyLM()
    sleeper = CpuSleeper(CPU)
    sleeper.hold("LM", NodeMemory(module=module))
    expected = {name: value.clone() for name, value in module.named_parameters()}
    sleeper.pause("LM", 1)
    assert sleeper.kept_bytes and not sleeper.dropped(["LM"])
    assert sleeper.pause("LM", 2) == 0
    assert not sleeper.kept_bytes and sleeper.dropped(["LM"])
    again(sleeper, module, TinyLM())
    assert all(torch.equal(value, expected[name]) for name, value in module.named_parameters())


def test_memory_that_two_nodes_share_sleeps_with_the_last_and_wakes_with_the_first() -> None:
    one, two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    two.weight = one.weight
    sleeper = CpuSleeper(CPU)
    sleeper.hold("one", NodeMemory(module=one))
    sleeper.hold("two", NodeMemory(module=two))
    expected = one.weight.detach().clone()
    assert sleeper.pause("one", 1) == 0 and sizes(one.weight) == [64]
    assert sleeper.pause("two", 1) == 64 and sizes(one.weight) == [0]
    assert sleeper.resume(["one"], []) == 64
    assert torch.equal(two.weight, expected)
    assert sleeper.resume(["two"], []) == 0


def test_views_of_a_storage_stay_valid_and_tensors_outside_the_parameters_keep_their_values() -> None:
    module = nn.Linear(4, 4, bias=False)
    module.table = torch.arange(6.0)  # type: ignore[assignment]
    row, part = module.weight.detach()[1], torch.zeros(8)[2:6]
    sleeper = CpuSleeper(CPU)
    sleeper.hold("n", NodeMemory(module=module, kept=(part,)))
    expected = row.clone()
    sleeper.pause("n", 2)
    fresh = nn.Linear(4, 4, bias=False)
    fresh.load_state_dict({"weight": torch.cat([torch.zeros(1, 4), expected[None], torch.zeros(2, 4)])})
    fresh.table = torch.zeros(6)  # type: ignore[assignment]
    again(sleeper, module, fresh, "n")
    assert torch.equal(row, expected) and row.data_ptr() == module.weight[1].data_ptr()
    assert torch.equal(module.table, torch.arange(6.0))


def test_parameters_that_cover_only_a_part_of_a_storage_are_kept() -> None:
    whole = torch.arange(12.0)
    assert is_covered([whole[:5], whole[5:]]) and not is_covered([whole[:5], whole[6:]])
    module = nn.Module()
    module.weight = nn.Parameter(whole[:5], requires_grad=False)
    sleeper = CpuSleeper(CPU)
    sleeper.hold("n", NodeMemory(module=module))
    sleeper.pause("n", 2)
    assert not sleeper.dropped(["n"])
    sleeper.resume(["n"], [])
    assert torch.equal(whole, torch.arange(12.0))


def test_a_second_load_with_other_tensors_is_refused_by_their_name() -> None:
    module = nn.Linear(4, 4)
    sleeper = CpuSleeper(CPU)
    sleeper.hold("n", NodeMemory(module=module))
    sleeper.pause("n", 2)
    with pytest.raises(EngineError, match="differ") as refused:
        loaded_again(module, nn.Linear(4, 4, bias=False), sleeper.dropped(["n"]))
    assert refused.value.detail.startswith("bias:")
