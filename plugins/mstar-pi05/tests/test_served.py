"""The reference's requests through the whole runtime: conductor, scheduler, both engines and their pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.nodes import RuntimeSettings, build_nodes
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin.check.spec_check import check_spec
from mstar_core.plugin.processor import Inputs, PromptRequest

from .conftest import ITEMS

OWN_TIMES = 2e-4


@dataclass
class GoldenProcessor:
    """Processor that returns the reference's arrays. The text is the number of the item."""

    golden: Any

    def process_prompt(self, request: PromptRequest) -> Inputs:
        item, horizon = int(request.text or ""), self.golden.horizon
        arrays = {
            "images": self.golden.images(item).numpy(),
            "tokens": self.golden.tokens(item).numpy(),
            "noise": self.golden.inputs["noise"][item].numpy(),
            "scale": np.ones((horizon, 32), np.float32),
            "offset": np.zeros((horizon, 32), np.float32),
        }
        return Inputs(arrays=arrays, prompt_tokens=len(arrays["tokens"]))

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        return output.tobytes(), {}


@pytest.fixture(scope="module")
def nodes(reference: Any) -> Any:
    return build_nodes(reference.spec, reference.folder)


def served(golden: Any, reference: Any, nodes: Any, settings: RuntimeSettings, ranks: int = 1) -> LocalRuntime:
    processor: Any = GoldenProcessor(golden)
    return LocalRuntime(reference.spec, reference.folder, settings, ranks=ranks, built=nodes, processor=processor)


def ask(item: int, golden: Any) -> SampleRequest:
    return SampleRequest(text=str(item), params={"num_steps": golden.steps}, outputs=("action",), name=f"item {item}")


def check(outcome: Any, golden: Any, item: int) -> None:
    assert outcome.status == "finished", outcome.cause
    (found,) = outcome.items
    assert (found.port, found.modality, found.array.dtype.name) == ("robot_actions", "action", "float32")
    torch.testing.assert_close(
        torch.from_numpy(found.array.copy()), golden.expected["actions"][item], atol=OWN_TIMES, rtol=0
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("item", ITEMS)
def test_a_request_alone_equals_the_reference(item: int, ranks: int, golden: Any, reference: Any, nodes: Any) -> None:
    bench = served(golden, reference, nodes, RuntimeSettings(), ranks)
    (outcome,) = bench.ask(ask(item, golden))
    check(outcome, golden, item)
    assert outcome.counts["flow"] == golden.steps
    assert bench.leaks() == []


@pytest.mark.parametrize(
    "settings",
    [
        RuntimeSettings(),
        RuntimeSettings(token_budget=32),
        RuntimeSettings(slots=2),
        RuntimeSettings(page_size=4, prefix_cache=False),
    ],
    ids=["whole", "small budget", "two slots", "small pages"],
)
def test_many_at_once_equal_the_reference(settings: RuntimeSettings, golden: Any, reference: Any, nodes: Any) -> None:
    bench = served(golden, reference, nodes, settings)
    items = [ITEMS[number % len(ITEMS)] for number in (0, 1, 1, 0, 2)]
    for item, outcome in zip(items, bench.ask(*(ask(item, golden) for item in items)), strict=True):
        check(outcome, golden, item)
    assert bench.leaks() == []


def test_a_prefix_that_lost_its_pages_is_read_again(golden: Any, reference: Any, nodes: Any) -> None:
    """Pages for one request and a half: preempted prefixes are recomputed and give the same results."""
    longest = max(golden.length(item) for item in ITEMS)
    pages = -(-longest // 8) * 3 // 2
    bench = served(golden, reference, nodes, RuntimeSettings(page_size=8, pages=pages, max_seq_len=pages * 8))
    items = (*ITEMS, ITEMS[0])
    for item, outcome in zip(items, bench.ask(*(ask(item, golden) for item in items)), strict=True):
        check(outcome, golden, item)
    assert bench.leaks() == []


def test_prefixes_of_two_requests_are_read_in_one_pass(golden: Any, reference: Any, nodes: Any) -> None:
    """Every port has one entry per token, so that any requests can share a pass."""
    passes: list[int] = []
    policy = nodes["LLM"].module
    true = policy.language.read

    def counted(x: Any, kv: Any, rotation: Any) -> None:
        passes.append(len(x))
        true(x, kv, rotation)

    policy.language.read = counted
    try:
        bench = served(golden, reference, nodes, RuntimeSettings())
        for outcome in bench.ask(ask(0, golden), ask(0, golden)):
            assert outcome.status == "finished"
    finally:
        del policy.language.read
    assert passes == [2 * golden.length(0)]


@dataclass
class FilledProcessor(GoldenProcessor):
    """The reference's prefix with noise of another horizon."""

    horizon: int

    def process_prompt(self, request: PromptRequest) -> Inputs:
        made, plan = super().process_prompt(request), np.ones((self.horizon, 32), np.float32)
        return replace(made, arrays={**made.arrays, "noise": plan, "scale": plan, "offset": 0 * plan})


@pytest.mark.parametrize(("horizon", "dim"), [(50, 14), (15, 8), (10, 7)])
def test_another_horizon_changes_only_the_number_of_rows(horizon: int, dim: int, golden: Any, reference: Any) -> None:
    spec = reference.spec.bound(reference.folder, {"action_horizon": horizon, "action_dim": dim})
    assert check_spec(spec) == []
    processor: Any = FilledProcessor(golden, horizon)
    bench = LocalRuntime(spec, reference.folder, built=build_nodes(spec, reference.folder), processor=processor)
    (outcome,) = bench.ask(ask(0, golden))
    assert outcome.status == "finished", outcome.cause
    assert outcome.items[0].array.shape == (horizon, dim)
