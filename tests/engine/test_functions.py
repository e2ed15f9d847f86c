"""The captured part of a stateless module gives what the function gives. Nothing is captured on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mstar_core.engine.cuda_graphs.functions import CapturedFunction
from tests.engine.recorded import RecordingCache


def doubled(rows: Tensor) -> Tensor:
    return rows.float() * 2 + 1


def rows(count: int, width: int = 3) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def captured(graphs: CapturedFunction) -> CapturedFunction:
    while graphs.capture_next():
        pass
    return graphs


def test_the_first_of_a_shape_runs_plainly_and_later_ones_are_replayed() -> None:
    captures = RecordingCache()
    graphs = CapturedFunction(doubled, (4, 1, 2), captures)
    assert not graphs.capture_next(), "nothing is known yet"
    assert torch.equal(graphs(rows(2)), doubled(rows(2)))
    captured(graphs)
    assert graphs.sizes == {((torch.float32, (3,)),): [1, 2, 4]}
    kept = [graphs(rows(count)) for count in (1, 2, 3, 4)]
    assert all(torch.equal(made, doubled(rows(count))) for made, count in zip(kept, (1, 2, 3, 4), strict=True))
    assert [graph.replays for graph in captures.graphs] == [2, 1, 1]
    assert graphs.counters()["graph_hits"] == 4 and graphs.counters()["graph_misses"] == 1


def test_what_is_borrowed_is_right_until_the_next_call_and_costs_no_copy() -> None:
    graphs = CapturedFunction(doubled, (1, 2), RecordingCache())
    assert torch.equal(graphs.borrow(rows(2)), doubled(rows(2)))
    captured(graphs)
    first = graphs.borrow(rows(2))
    assert torch.equal(first, doubled(rows(2)))
    again = graphs.borrow(rows(2) + 5)
    assert again.data_ptr() == first.data_ptr() and torch.equal(first, doubled(rows(2) + 5))
    assert graphs.counters()["graph_hits"] == 2 and graphs.counters()["graph_misses"] == 1


def test_rows_of_a_list_are_a_batch() -> None:
    graphs = CapturedFunction(doubled, (2,), RecordingCache())
    assert torch.equal(graphs.borrow(list(rows(2))), doubled(rows(2))), "plainly"
    captured(graphs)
    assert torch.equal(graphs.borrow(list(rows(2) + 5)), doubled(rows(2) + 5)), "replayed"
    assert graphs.counters()["graph_hits"] == 1 and graphs.counters()["graph_misses"] == 1


@pytest.mark.parametrize("count", [5, 9])
def test_rows_that_would_be_padded_by_more_than_a_third_run_plainly(count: int) -> None:
    graphs = CapturedFunction(doubled, (8,), RecordingCache())
    graphs(rows(8))
    captured(graphs)
    assert torch.equal(graphs(rows(count)), doubled(rows(count)))
    assert graphs.counters()["graph_misses"] == 2 and graphs.counters()["graph_hits"] == 0
    assert torch.equal(graphs(rows(6)), doubled(rows(6))) and graphs.counters()["graph_hits"] == 1


def test_what_is_not_worth_a_graph_and_shapes_beyond_the_limit_stay_plain() -> None:
    captures = RecordingCache()
    graphs = CapturedFunction(doubled, (1, 4), captures, is_worth=lambda shape: shape[0] * shape[1] <= 12)
    for width in range(1, 12):
        graphs(rows(1, width))
    captured(graphs)
    assert len(graphs.sizes) == 8 and sum(map(len, graphs.sizes.values())) == len(captures.graphs) == 8 + 3
    missed = graphs.counters()["graph_misses"]
    assert torch.equal(graphs(rows(4, 5)), doubled(rows(4, 5)))
    assert graphs.counters()["graph_misses"] == missed, "what is not worth a graph is not missed"


def test_one_that_does_not_fit_is_said_and_runs_plainly(caplog: pytest.LogCaptureFixture) -> None:
    captures = RecordingCache()
    graphs = CapturedFunction(doubled, (1, 2), captures)
    graphs(rows(1))
    captures.fails = torch.OutOfMemoryError("tried to allocate")
    graphs.capture_next()
    captures.fails = None
    captured(graphs)
    assert "is left out" in caplog.text
    assert torch.equal(graphs(rows(2)), doubled(rows(2))) and graphs.counters()["graph_misses"] == 2


def test_a_function_that_cannot_be_captured_runs_plainly(caplog: pytest.LogCaptureFixture) -> None:
    captures = RecordingCache()
    captures.fails = RuntimeError("operation not permitted when stream is capturing")
    graphs = CapturedFunction(doubled, (1, 2, 4), captures)
    graphs(rows(1))
    assert not graphs.capture_next() and caplog.text.count("run uncaptured") == 1
    assert torch.equal(graphs(rows(1)), doubled(rows(1)))


def test_without_captures_it_is_the_function() -> None:
    graphs = CapturedFunction(doubled, (1, 2))
    assert torch.equal(graphs(rows(2)), doubled(rows(2)))
    assert not graphs.capture_next() and graphs.counters() == {} and graphs.sizes == {}


def test_several_inputs_share_their_batch_and_every_shape_has_its_own_graphs() -> None:
    def scaled(values: Tensor, by: Tensor) -> Tensor:
        return values * by[:, None]

    graphs = CapturedFunction(scaled, (1, 2), RecordingCache())
    by = torch.tensor([3, 5])
    graphs(rows(2), by)
    graphs(rows(2, 4), by)
    captured(graphs)
    assert [*graphs.sizes.values()] == [[1, 2], [1, 2]]
    assert torch.equal(graphs(rows(2), by), scaled(rows(2), by))
    assert torch.equal(graphs(rows(1, 4), by[1:]), scaled(rows(1, 4), by[1:]))
    assert graphs.counters()["graph_hits"] == 2
