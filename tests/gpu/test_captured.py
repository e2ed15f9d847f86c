"""What happens around a capture: it must not be ended by what the interpreter, or another thread, does meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from mstar_core.engine.captured import recording

pytestmark = pytest.mark.gpu


class Gone:
    """A captured node in a cycle, as one that knows its own methods is: only the collector frees it."""

    def __init__(self, cuda: torch.device) -> None:
        self.me = self
        self.given = torch.zeros(1 << 20, device=cuda)
        torch.add(self.given, 1)
        with recording() as self.graph:
            self.made = self.given + 1


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """Collects all generations at almost every allocation."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager_collector")
def test_a_graph_that_is_garbage_does_not_end_a_capture(cuda: torch.device) -> None:
    value, node = torch.zeros(8, device=cuda), Gone(cuda)
    gone = weakref.ref(node)
    with recording() as graph:
        del node  # from here on it is the collector's, which would take it at once
        held = [[number] for number in range(1000)]
        made = value + 1
        assert gone() is not None
    assert len(held) == 1000 and gc.isenabled()
    gc.collect()
    assert gone() is None
    graph.replay()
    assert made.tolist() == [1.0] * 8


def test_a_thread_that_gets_memory_does_not_end_a_capture(cuda: torch.device) -> None:
    value, sizes = torch.zeros(8, device=cuda), list[int]()

    def other() -> None:
        sizes.append(torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True).numel())

    with recording() as graph:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        made = value + 2
    graph.replay()
    assert made.tolist() == [2.0] * 8 and sizes == [64 << 20]
