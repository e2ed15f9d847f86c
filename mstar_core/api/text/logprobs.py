"""Log-probabilities of tokens in the formats of OpenAI: of chats and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mstar_core.api.output.token_scores import Likelihood, TokenScore
from mstar_core.api.schema import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TokenAlternative

LEAST: Final = -9999.0
"""Log-probability of an impossible token: JSON has no infinity."""


def chat_logprobs_of(scores: Sequence[TokenScore]) -> ChatLogprobs:
    """Return the tokens of a part of an answer."""
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=score.token.text,
                logprob=finite(score.token.logprob),
                bytes=list(score.token.data),
                top_logprobs=[_alternative(other) for other in score.most_likely],
            )
            for score in scores
        ]
    )


def completion_logprobs_of(scores: Sequence[TokenScore], *, has_others: bool) -> CompletionLogprobs:
    """Return the tokens of a part of a completion. has_others: alternatives were asked for."""
    others = [{other.text: finite(other.logprob) for other in score.most_likely} for score in scores]
    return CompletionLogprobs(
        tokens=[score.token.text for score in scores],
        token_logprobs=[finite(score.token.logprob) for score in scores],
        top_logprobs=others if has_others else None,
        text_offset=[score.start for score in scores],
    )


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can hold it."""
    return max(logprob, LEAST)


def _alternative(likelihood: Likelihood) -> TokenAlternative:
    return TokenAlternative(token=likelihood.text, logprob=finite(likelihood.logprob), bytes=list(likelihood.data))
