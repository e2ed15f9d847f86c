"""Errors of a failed node: the client sees the kind of cause and a way out, the log the exception's text."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from mstar_core.engine.failures import node_error
from mstar_core.errors import EngineError, OutOfMemory, TooLarge
from mstar_core.messages.requests import error_info
from tests.engine.test_stateless import player

FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 550.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 42.12 MiB is "
    "free. Process 77 has 78.00 GiB memory in use."
)
HOST = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 912 bytes.")
SIZES = {FULL: ": 550.00 MiB requested, 42.12 MiB free;", HOST: ": 912 bytes requested;"}


@pytest.mark.parametrize("error", [FULL, HOST, MemoryError()])
def test_out_of_memory_names_the_node_the_sizes_and_the_settings_to_lower(error: Exception) -> None:
    made = node_error("scorer", error)
    assert isinstance(made, OutOfMemory) and made.facts["node"] == "scorer"
    told = error_info(made, "")
    assert told.code == "out_of_memory" and told.status == 500
    assert "scorer ran out of memory" in told.message and "fewer candidates" in told.message
    assert "kv_cache.memory_fraction" in told.message
    assert SIZES.get(error, "") in told.message and "Process" not in told.message
    assert type(error).__name__ in told.detail


def test_other_failures_name_only_their_kind_and_log_the_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        try:
            raise ValueError("/secret/path")
        except ValueError as error:
            made = node_error("scorer", error)
    assert type(made) is EngineError and "ValueError" in made.public and "/secret" not in made.public
    assert "test_failures.py" in caplog.text and "/secret/path" in caplog.text


def test_mstar_errors_are_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    own = TooLarge("too many")
    assert node_error("scorer", own) is own and not caplog.records


class Greedy(nn.Module):
    """Has no memory for rows that sum to more than a hundred."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if bool((x.sum(-1) > 100).any()):
            raise FULL
        return {"y": x}


def test_a_step_without_memory_fails_its_request_alone() -> None:
    made = player(Greedy())
    small, large = made.submit(0, torch.ones(3)), made.submit(1, torch.full((3,), 99.0))
    made.run()
    assert set(made.done) == {small} and isinstance(made.failed[large].error, OutOfMemory)
    again = made.submit(2, torch.ones(3))
    made.run()
    assert again in made.done
