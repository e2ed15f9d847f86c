"""What a module expects is run and captured before the first request. Nothing is captured on the CPU, but recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.families.policy import Acting, Place, observation, random_modules
from mstar_core.engine.rehearsal import Act, Rehearsal, Rehearses, rehearse
from mstar_core.errors import MstarError
from mstar_core.graph.nodes import Attend
from mstar_pi05.policy import Policy
from mstar_pi05.sizes import Sizes, Tower, Vision
from tests.engine.recorded import RecordedCaptures
from tests.engine.tiny_engine import make_engine

SMALL = Sizes(
    vocab=100, horizon=5,
    vision=Vision(width=32, layers=1, heads=2, mlp=32, image_size=28, patch_size=14),
    language=Tower(width=32, layers=2, mlp=32, heads=2, kv_heads=1, head_dim=16),
    expert=Tower(width=16, layers=2, mlp=32, heads=2, kv_heads=1, head_dim=16),
)  # fmt: skip


def acting(made: list[RecordedCaptures]) -> Acting:
    def captures() -> RecordedCaptures:
        made.append(RecordedCaptures())
        return made[-1]

    here = Place(device=torch.device("cpu"), dtype=torch.float32, max_tokens=64, requests=2)
    return Acting(SMALL, random_modules(SMALL, here), here, captures)


def test_the_first_request_of_an_expected_kind_is_replayed() -> None:
    made: list[RecordedCaptures] = []
    engines, told = acting(made), list[str]()
    policy = engines.modules["LLM"]
    assert isinstance(policy, Policy)
    policy.expected_steps = (4,)
    for name, runner in engines.turner.runners.items():
        module = engines.modules[name]
        assert isinstance(module, Rehearses)
        rehearse(runner, module.rehearsals(), told.append)
    assert told[0] == "one camera" and "a flow of 4 steps" in told and told.count("captures") > 2
    before = engines.counters()
    seen = [observation(SMALL, cameras, 7, seed=cameras, steps=4) for cameras in (2, 3)]
    found = engines.act(seen[0])
    after = engines.counters()
    for name, replays in (("vit_encoder", 1), ("LLM", 2)):  # the prefix, and its flow
        assert after[name]["graph_hits"] == before[name]["graph_hits"] + replays, name
        assert after[name]["graph_misses"] == before[name]["graph_misses"], name
    memory = engines.turner.runners["LLM"].memory()
    assert (memory.pages_used, memory.slots_used) == (0, 0), "nothing of the rehearsal is held"
    here = replace(engines.place, is_captured=False)
    expected = Acting(SMALL, random_modules(SMALL, here), here).act(seen[0])
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-4)


def test_what_fails_in_a_rehearsal_fails_the_start_and_holds_nothing() -> None:
    engine = make_engine()
    wrong = Act(inputs={"tokens": torch.tensor([10_000])}, attend=Attend(mask="full"))
    with pytest.raises(MstarError, match="vocabulary"):
        rehearse(engine, [Rehearsal(what="a wrong id", tokens=4, acts=(wrong,))], lambda what: None)
    assert engine.memory().slots_used == 0 and not engine._state.requests
    with pytest.raises(MstarError):
        rehearse(engine, [Rehearsal(what="too long", tokens=1 << 20, acts=())], lambda what: None)
