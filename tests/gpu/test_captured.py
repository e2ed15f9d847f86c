"""CUDA graph capture: the interpreter and other threads must not invalidate it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from mstar_core.engine.cuda_graphs.cache import GraphCache, capturing
from mstar_core.engine.cuda_graphs.compilation import apart, compiling_only

pytestmark = pytest.mark.gpu


class Gone:
    """A captured node in a cycle, as one that knows its own methods is: only the collector frees it."""

    def __init__(self, cuda: torch.device) -> None:
        self.me = self
        self.given = torch.zeros(1 << 20, device=cuda)
        torch.add(self.given, 1)
        with capturing() as self.graph:
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
    with capturing() as graph:
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

    with capturing() as graph:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        made = value + 2
    graph.replay()
    assert made.tolist() == [2.0] * 8 and sizes == [64 << 20]


def test_kernels_that_are_gone_through_are_compiled_and_do_not_run(
    cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mstar_core.engine.attention.kernels.page_copies import _append_kernel, append
    from mstar_core.layers.kernels.elementwise import _rms_norm_kernel, rms_norm

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in (_append_kernel, _rms_norm_kernel):
        kernel.device_caches.clear()  # what earlier tests compiled
    pool = torch.zeros(4, 2, 24, 1, 24, device=cuda)
    key, places = torch.ones(3, 1, 24, device=cuda), torch.arange(3, device=cuda)
    x, weight = torch.ones(3, 24, dtype=torch.bfloat16, device=cuda), torch.ones(24, device=cuda)
    noted: list[int] = []

    def step() -> None:
        append(pool, 24, places, key, key)
        rms_norm(x, weight, 1e-6)

    def go() -> None:
        with compiling_only() as compiling:
            for _ in range(3):
                step()
            assert compiling.has_missed
            noted.append(compiling.count)

    apart(go)
    torch.cuda.synchronize()
    assert not pool.any() and noted == [2], "the launcher of the first, and the second"
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert sum(name.endswith(".cubin") for name in files) == 2
    assert sum("launcher" in name for name in files) == 2
    step()
    torch.cuda.synchronize()
    assert float(pool.sum()) == 2 * 3 * 24
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == files, "nothing was left to compile"


def test_graphs_of_two_nodes_run_at_the_same_time(cuda: torch.device) -> None:
    """Products of the library share a workspace where they were captured on one stream: they hang, or are wrong."""
    torch.manual_seed(0)
    weights = [torch.randn(1280, 5120, device=cuda).bfloat16() / 72 for _ in range(32)]
    streams = [torch.cuda.Stream(cuda) for _ in range(2)]
    steps, rows = [], [torch.randn(count, 5120, device=cuda).bfloat16() for count in (64, 1500)]
    for given in rows:

        def products(given: Tensor = given) -> list[Tensor]:
            return [linear(given, weight) for weight in weights]

        graph, outputs = GraphCache(cuda).capture(products)
        assert outputs is not None
        graph.replay()
        torch.cuda.synchronize(cuda)
        steps.append((graph, outputs, [each.clone() for each in outputs]))
    for _ in range(200):
        for stream, (graph, _, _) in zip(streams, steps, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    done = [stream.record_event() for stream in streams]
    until = time.monotonic() + 60
    while not all(event.query() for event in done):
        assert time.monotonic() < until, "a product never ends"
        time.sleep(0.01)
    for _, outputs, expected in steps:
        for found, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(found, wanted)
