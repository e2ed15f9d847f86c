"""Warm-up runs and captures the requests that a module expects before the first real one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.families.policy import Acting, Place, observation, random_modules
from mstar_core.engine.cuda_graphs.compilation import SWITCH, Compiling, compile_in_parallel
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.module import NodeModule, WarmupRequest, WarmupStep
from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.warmup import run_warmup, trace_captures, trace_requests
from mstar_core.errors import EngineError, MstarError
from mstar_core.graph.declare.nodes import Attend
from mstar_pi05.checkpoint.config import Sizes, Tower, Vision
from mstar_pi05.nodes.policy import Policy
from tests.engine.recorded import RecordingCache, captured_kinds
from tests.engine.tiny_engine import make_engine
from tests.fakes import jit
from tests.fakes.jit import JITFunction

SMALL = Sizes(
    vocab=100,
    horizon=5,
    vision=Vision(width=32, layers=1, heads=2, mlp=32, image_size=28, patch_size=14),
    language=Tower(width=32, layers=2, mlp=32, heads=2, kv_heads=1, head_dim=16),
    expert=Tower(width=16, layers=2, mlp=32, heads=2, kv_heads=1, head_dim=16),
)


def compile_ahead(warmups: Sequence[tuple[NodeRunner, Sequence[WarmupRequest]]]) -> None:
    """Compile the kernels of these requests, and of the captures that they cause, as a worker does."""

    def trace(compiling: Compiling) -> None:
        trace_requests(warmups, compiling)
        trace_captures([runner for runner, _ in warmups], compiling)

    compile_in_parallel(trace, "the warm-up")


def acting(made: list[RecordingCache]) -> Acting:
    def captures() -> RecordingCache:
        made.append(RecordingCache())
        return made[-1]

    here = Place(device=torch.device("cpu"), dtype=torch.float32, max_tokens=64, requests=2)
    return Acting(SMALL, random_modules(SMALL, here), here, captures)


def test_the_first_request_of_an_expected_kind_is_replayed() -> None:
    made: list[RecordingCache] = []
    engines, told = acting(made), list[str]()
    policy = engines.modules["LLM"]
    assert isinstance(policy, Policy)
    policy.expected_steps = (4,)
    for name, runner in engines.driver.runners.items():
        module = engines.modules[name]
        assert isinstance(module, NodeModule)
        run_warmup(runner, module.warmup_requests(), told.append)
    assert told[0] == "one camera" and "a flow of 4 steps" in told and told.count("captures") > 2
    before = engines.counters()
    seen = [observation(SMALL, cameras, 7, seed=cameras, steps=4) for cameras in (2, 3)]
    found = engines.act(seen[0])
    after = engines.counters()
    for name, replays in (("vit_encoder", 1), ("LLM", 2)):  # the prefix, and its flow
        assert after[name]["graph_hits"] == before[name]["graph_hits"] + replays, name
        assert after[name]["graph_misses"] == before[name]["graph_misses"], name
    memory = engines.driver.runners["LLM"].memory()
    assert (memory.pages_used, memory.slots_used) == (0, 0), "nothing of the rehearsal is held"
    here = replace(engines.place, is_captured=False)
    expected = Acting(SMALL, random_modules(SMALL, here), here).act(seen[0])
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-4)


def test_what_fails_in_a_rehearsal_fails_the_start_and_holds_nothing() -> None:
    engine = make_engine()
    wrong = WarmupStep(inputs={"tokens": torch.tensor([10_000])}, attend=Attend(mask="full"))
    with pytest.raises(MstarError, match="vocabulary"):
        run_warmup(engine, [WarmupRequest(title="a wrong id", tokens=4, steps=(wrong,))], lambda what: None)
    assert engine.memory().slots_used == 0 and not engine._scheduler._requests.requests
    with pytest.raises(MstarError):
        run_warmup(engine, [WarmupRequest(title="too long", tokens=1 << 20, steps=())], lambda what: None)


@pytest.mark.parametrize(
    ("name", "ids", "told"),
    [
        ("tokens", torch.zeros(1, 4, dtype=torch.int64), "gives 'tokens' as i64[1,4]; declared is i64[n]"),
        ("tokens", torch.zeros(4), "gives 'tokens' as f32[4]; declared is i64[n]"),
        (
            "tokns",
            torch.zeros(4, dtype=torch.int64),
            "gives 'tokns', which is not among its ports; did you mean 'tokens'?",
        ),
    ],
)
def test_inputs_that_do_not_fit_their_ports_are_named_before_a_request_runs(
    name: str, ids: torch.Tensor, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jit.installed(monkeypatch)
    engine, begun = make_engine(), list[str]()
    good = WarmupRequest(title="a prompt", tokens=4, steps=(WarmupStep(inputs={"tokens": torch.zeros(4).long()}),))
    bad = replace(good, title="a batch", steps=(WarmupStep(inputs={name: ids}),), is_value_free=True)
    with pytest.raises(EngineError) as raised:
        run_warmup(engine, [good, bad], begun.append)
    assert f"warm-up 'a batch' of node LM {told}" in str(raised.value) and not begun
    compile_ahead([(engine, [good, bad])])
    assert f"warm-up 'a batch' of node LM {told}" in caplog.text, (
        "a pass that compiles kernels logs it and fails no start"
    )


class Watched:
    """Both nodes, each of whose passes launches a kernel for its sizes. plays: sizes of passes, in order."""

    def __init__(self) -> None:
        self.made: list[RecordingCache] = []
        self.engines = acting(self.made)
        self.kernels = {name: JITFunction(name) for name in self.engines.modules}
        self.plays: list[tuple[str, int]] = []
        policy = self.engines.modules["LLM"]
        assert isinstance(policy, Policy)
        policy.expected_steps = (4,)
        policy.register_forward_pre_hook(self._before_policy, with_kwargs=True)
        cameras = self.engines.modules["vit_encoder"]
        cameras.get_submodule("tower").register_forward_pre_hook(self._before_tower)
        self.cast: list[tuple[NodeRunner, Sequence[WarmupRequest]]] = []
        for name, runner in self.engines.driver.runners.items():
            module = self.engines.modules[name]
            assert isinstance(module, NodeModule)
            self.cast.append((runner, module.warmup_requests()))

    def run_warmup(self) -> dict[str, list[str]]:
        """Run the warm-up after `compile_ahead`. Returns the compiler of each kernel by node."""
        for runner, requests in self.cast:
            run_warmup(runner, requests, lambda what: None)
        return {name: [made.by for made in kernel.known.values()] for name, kernel in self.kernels.items()}

    @property
    def captured(self) -> list[object]:
        """Everything about the graphs that does not depend on time."""
        policy, cameras = self.engines.driver.runners["LLM"], self.engines.modules["vit_encoder"]
        assert isinstance(policy, KVCacheEngine)
        sizes = cameras._replayed.sizes  # type: ignore[union-attr]
        return [captured_kinds(policy), sizes, [len(each.graphs) for each in self.made]]

    def _before_policy(self, module: torch.nn.Module, args: object, given: dict[str, Any]) -> None:
        self._play("LLM", len(given["positions"]) + (10_000 if given.get("tokens") is None else 0))

    def _before_tower(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._play("vit_encoder", len(args[0]))

    def _play(self, name: str, size: int) -> None:
        self.plays.append((name, size))
        self.kernels[name].launch(size)


def test_kernels_of_rehearsals_and_captures_are_compiled_before_the_first_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = jit.installed(monkeypatch)
    plain = Watched()
    by = plain.run_warmup()
    disk.kernels.clear()
    watched = Watched()
    before = without_plans(watched.engines.counters())
    compile_ahead(watched.cast)
    known = {name: dict(kernel.known) for name, kernel in watched.kernels.items()}
    assert not any(kernel.runs for kernel in watched.kernels.values())
    assert without_plans(watched.engines.counters()) == before, "what is only gone through does not count"
    memory = watched.engines.driver.runners["LLM"].memory()
    assert (memory.pages_used, memory.pages_cached, memory.slots_used) == (0, 0, 0)
    ahead = watched.run_warmup()
    assert known == {name: kernel.known for name, kernel in watched.kernels.items()}, "nothing was left to compile"
    assert {name: len(made) for name, made in by.items()} == {name: len(made) for name, made in ahead.items()}
    threads = [each for made in ahead.values() for each in made if each.startswith("compile")]
    assert len(threads) == sum(map(len, ahead.values())) - 1, "all but the first, which told that they are missing"
    assert watched.captured == plain.captured
    counted = [engines.counters() for engines in (watched.engines, plain.engines)]
    for name in counted[0]:
        for field in ("graphs_captured", "graph_hits", "graph_misses"):
            assert counted[0][name][field] == counted[1][name][field], (name, field)
    seen = observation(SMALL, 2, 7, seed=2, steps=4)
    torch.testing.assert_close(watched.engines.act(seen), plain.engines.act(seen), atol=0, rtol=0)


def test_where_the_cache_has_the_first_kernels_nothing_more_is_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    jit.installed(monkeypatch)
    Watched().run_warmup()
    watched = Watched()
    compile_ahead(watched.cast)
    places = SMALL.vision.tokens
    assert watched.plays == [("vit_encoder", 1), ("LLM", places + 8)]


def test_what_must_see_its_numbers_is_not_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    jit.installed(monkeypatch)
    watched = Watched()
    compile_ahead([(runner, [replace(each, is_value_free=False) for each in given]) for runner, given in watched.cast])
    monkeypatch.setenv(SWITCH, "0")
    compile_ahead(watched.cast)
    assert not watched.plays


@pytest.mark.parametrize("fails", ["a pass", "a capture", "triton"])
def test_what_fails_when_it_is_gone_through_fails_no_start(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jit.installed(monkeypatch)
    watched, plain = Watched(), Watched()
    if fails == "triton":
        import triton

        monkeypatch.delattr(triton, "AsyncCompileMode")

    def fail(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if watched.kernels["vit_encoder"].runs:
            return
        if fails == "a pass" or (fails == "a capture" and len(args[0]) > 1):
            raise ValueError("numbers without a meaning")

    watched.engines.modules["vit_encoder"].get_submodule("tower").register_forward_pre_hook(fail)
    with caplog.at_level(logging.WARNING):
        compile_ahead(watched.cast)
    # The failure of the forward pass itself is reported too, if the node reports such failures.
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [each.startswith("kernels are compiled one by one") for each in told] == [True]
    watched.kernels["vit_encoder"].launch(0)
    watched.run_warmup()
    plain.run_warmup()
    assert watched.captured == plain.captured


def without_plans(counters: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return what has been counted: a pass that is only gone through plans captures."""
    return {name: {k: v for k, v in each.items() if k != "graphs_planned"} for name, each in counters.items()}
