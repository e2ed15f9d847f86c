"""Parts of a request's time: compute is exact, and the parts add up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.observe.parts import BETWEEN, PARALLEL, parts


def total(process: str, node: str, kind: str, start: float, end: float, busy: float | None = None) -> dict[str, Any]:
    spent = end - start if busy is None else busy
    return {"process": process, "node": node, "kind": kind, "start_ms": start, "end_ms": end, "busy_ms": spent}


def found(total_ms: float, *records: dict[str, Any]) -> dict[str, float]:
    return {part.name: round(part.ms, 6) for part in parts(records, total_ms)}


def test_nodes_that_take_turns_have_the_time_of_their_own_steps() -> None:
    llm = total("worker-0", "LLM", "compute", 0, 1000, 600)
    codec = total("worker-0", "codec", "compute", 100, 1000, 300)
    assert found(1000, llm, codec) == {"LLM": 600, "codec": 300, BETWEEN: 100}


def test_a_bursty_node_is_not_cut_by_another_on_its_rank() -> None:
    """Both computed for 500 ms, one after the other, although their spans overlap."""
    assert found(
        1000, total("worker-0", "LLM", "compute", 0, 1000, 500), total("worker-0", "flow", "compute", 500, 1000, 500)
    ) == {"LLM": 500, "flow": 500}


def test_a_wait_beside_the_compute_of_another_node_takes_no_time() -> None:
    llm = total("worker-0", "LLM", "compute", 0, 900)
    assert found(1000, llm, total("worker-0", "codec", "wait", 0, 1000)) == {"LLM": 900, "codec wait": 100}


def test_queues_of_several_nodes_are_one_part() -> None:
    llm = total("worker-0", "LLM", "compute", 500, 1000)
    queues = [total("worker-0", node, "queue", 0, 500) for node in ("LLM", "vit")]
    assert found(1000, llm, *queues) == {"LLM": 500, "queue": 500}


def test_a_ready_job_takes_idle_time_before_a_wait_does() -> None:
    """The LLM was ready for all of the time in which nothing ran; the codec had no input for most of the request."""
    found_ms = found(
        1000,
        total("worker-0", "LLM", "compute", 0, 1000, 700),
        total("worker-0", "LLM", "queue", 0, 1000, 300),
        total("worker-0", "codec", "wait", 0, 1000, 900),
    )
    assert found_ms == {"LLM": 700, "queue": 300}


def test_a_stall_is_a_wait_that_was_heard() -> None:
    codec = [total("worker-0", "codec", "wait", 0, 400), total("worker-0", "codec", "stall", 400, 1000)]
    assert found(1000, *codec) == {"codec wait": 1000}


def test_ranks_that_compute_at_the_same_time_are_subtracted_once() -> None:
    both = [total(f"worker-{rank}", node, "compute", 0, 800) for rank, node in enumerate(("LLM", "LLM_cfg"))]
    assert found(1000, *both) == {"LLM": 800, "LLM_cfg": 800, PARALLEL: -800, BETWEEN: 200}


def test_a_request_without_spans_is_between_steps() -> None:
    assert found(250) == {BETWEEN: 250}
    assert found(0) == {}


KINDS = st.sampled_from(["compute", "queue", "wait", "transfer"])
RECORDS = st.lists(
    st.builds(
        lambda rank, node, kind, start, length, share: total(
            f"worker-{rank}", node, kind, start, start + length, length * share
        ),
        st.integers(0, 2),
        st.sampled_from(["LLM", "codec", "flow"]),
        KINDS,
        st.floats(0, 900),
        st.floats(0.01, 400),
        st.floats(0, 1),
    ),
    max_size=8,
)


@given(RECORDS, st.floats(1, 1000))
def test_parts_add_up_to_the_time_of_the_request(records: list[dict[str, Any]], total_ms: float) -> None:
    actual = parts(records, total_ms)
    assert sum(part.ms for part in actual) == pytest.approx(total_ms, rel=1e-6, abs=1e-3)
    assert {part.node for part in actual if part.kind == "compute"} == {
        record["node"] for record in records if record["kind"] == "compute"
    }
    for part in actual:
        assert part.ms <= 0 if part.kind == PARALLEL else part.ms >= 0
