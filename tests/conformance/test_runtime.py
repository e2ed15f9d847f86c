"""Fake runtime: serving on one rank and on two, and detection of held resources by its probe."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.conformance.endings import Fault
from mstar_core.conformance.equality import require_equal, require_same_bytes
from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.nodes import BuiltNode, build_nodes
from mstar_core.conformance.runtime import LocalRuntime, ended
from mstar_core.errors import EngineError, RequestError
from mstar_core.plugin.spec import ModelSpec
from mstar_orpheus.plugin import ORPHEUS
from mstar_orpheus.sources.tiny import write_tiny

SHORT = {"max_output_tokens": 36, "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "orpheus")


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return ORPHEUS.bound(folder, {})


@pytest.fixture(scope="module")
def built(spec: ModelSpec, folder: Path) -> dict[str, BuiltNode]:
    return build_nodes(spec, folder)


def test_a_request_gives_bytes_counts_and_nothing_is_left(
    spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]
) -> None:
    bench = LocalRuntime(spec, folder, built=built)
    outcome = bench.request(text="hello there", params=SHORT, outputs=["audio"])
    assert (outcome.status, outcome.reason, outcome.counts["decode_loop"]) == ("finished", "length", 35)
    assert len(outcome.outputs["audio"]) == 2 * 2048 * outcome.counts["windows"] > 0
    assert bench.leaks() == []


def test_two_ranks_give_what_one_gives(spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]) -> None:
    asks = [SampleRequest(text=text, params=SHORT) for text in ("hello there", "a")]
    one = LocalRuntime(spec, folder, built=built).ask(*asks)
    two = LocalRuntime(spec, folder, built=built, ranks=2, slow=[("worker-0", "worker-1")]).ask(*asks)
    for first, second in zip(one, two, strict=True):
        require_equal(first, second, "on two ranks")


def test_the_probe_sees_what_a_request_in_flight_holds(
    spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]
) -> None:
    bench = LocalRuntime(spec, folder, built=built)
    call = bench.send(SampleRequest(text="hello there", params=SHORT))
    for _ in range(5):
        bench.step()
    held = " ".join(bench.leaks())
    assert all(word in held for word in ("conductor", "pages", "slots", "tensors of api")) and not call.is_over


def test_a_cancelled_request_ends_at_once(spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]) -> None:
    bench = LocalRuntime(spec, folder, built=built)
    call = bench.send(SampleRequest(text="hello there", params=SHORT))
    bench.step()
    bench.cancel(call)
    assert ended(call).status == "cancelled"
    bench.run()
    assert bench.leaks() == []


def test_a_refused_request_never_enters(spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]) -> None:
    bench = LocalRuntime(spec, folder, built=built)
    with pytest.raises(RequestError):
        bench.request(text="", params=SHORT)
    assert bench.post.waiting == 0 and bench.leaks() == []


def test_a_fault_fails_its_request_alone(spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]) -> None:
    alone = LocalRuntime(spec, folder, built=built).request(text="a", params=SHORT)
    bench = LocalRuntime(spec, folder, built=built, faults=Fault("snac_decoder", at=1, victim=1))
    victim, other = bench.ask(SampleRequest(text="hello there", params=SHORT), SampleRequest(text="a", params=SHORT))
    assert victim.status == "failed" and "snac_decoder" in victim.cause
    require_equal(alone, other, "beside it")


def test_different_answers_are_told_apart(spec: ModelSpec, folder: Path, built: dict[str, BuiltNode]) -> None:
    bench = LocalRuntime(spec, folder, built=built)
    first, second = bench.ask(
        SampleRequest(text="hello there", params=SHORT), SampleRequest(text="something else", params=SHORT)
    )
    for compare in (require_equal, require_same_bytes):
        with pytest.raises(EngineError, match="differs"):
            compare(first, second, "another text")
