"""Requests of POST /v1/chat/completions for log-probabilities are checked before they run."""

from __future__ import annotations

import pytest

from mstar_core.api.parse.logprobs import chat_logprobs
from mstar_core.errors import RequestError
from tests.api.test_chat_tools import HELD, MODEL


def test_the_number_of_alternatives_is_that_of_top_logprobs() -> None:
    assert chat_logprobs(HELD, None, is_wanted=False) is None
    assert chat_logprobs(HELD, None, is_wanted=True) == 0
    assert chat_logprobs(HELD, 20, is_wanted=True) == 20


@pytest.mark.parametrize("count", [-1, 21])
def test_a_number_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(RequestError, match="0 to 20"):
        chat_logprobs(HELD, count, is_wanted=True)


def test_alternatives_without_log_probabilities_are_refused() -> None:
    with pytest.raises(RequestError, match="needs logprobs"):
        chat_logprobs(HELD, 2, is_wanted=False)


def test_a_model_without_a_text_head_names_the_missing_capability() -> None:
    with pytest.raises(RequestError, match="capability logprobs"):
        chat_logprobs(MODEL, 0, is_wanted=True)
