"""Settings of the requests of a chat: model, parameters, tools, format, thinking and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.client.chat import chat_fields
from mstar_core.errors import UsageError, did_you_mean
from mstarctl.call.ask import Card

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
FIELDS: Final = frozenset(
    {"frequency_penalty", "ignore_eos", "logit_bias", "max_completion_tokens", "max_output_tokens", "max_tokens"}
    | {"min_p", "parallel_tool_calls", "presence_penalty", "priority", "repetition_penalty", "seed", "stop"}
    | {"temperature", "timeout_s", "tool_choice", "top_k", "top_p"}
)
"""Fields that the chat route takes from every model, beside the model's own parameters."""

JSON_OBJECT: Final = {"type": "json_object"}


@dataclass(slots=True, kw_only=True)
class ChatSettings:
    """Fields of requests beside their messages. Owned by the session; commands change it.

    effort: `reasoning_effort`, None for the default of the model. format: `response_format`.
    """

    card: Card
    params: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    format: dict[str, Any] | None = None
    effort: str | None = None
    modalities: tuple[str, ...] = ()
    voice: str | None = None

    def body(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the body of a request."""
        is_spoken = "audio" in self.modalities
        given: dict[str, Any] = {
            "model": self.card.name,
            "response_format": self.format,
            "reasoning_effort": self.effort,
            "modalities": list(self.modalities) or None,
            "audio": {"format": "pcm16", **({"voice": self.voice} if self.voice else {})} if is_spoken else None,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return chat_fields(messages, self.tools, {**given, **self.params})

    def check(self, capability: str, what: str) -> None:
        """Raise UsageError if the model lacks a capability. A server that lists none is asked."""
        known = self.card.capabilities
        if known is not None and capability not in known:
            raise UsageError(
                f"{self.card.name} does not support {what}",
                f"it lacks the capability {capability}; it has {', '.join(sorted(known)) or 'none'}",
            )

    def set_outputs(self, outputs: Sequence[str]) -> None:
        """Set the modalities of answers; none means text. Raises UsageError for one that the model lacks."""
        for output in outputs:
            if output not in self.card.outputs:
                raise UsageError(
                    f"{self.card.name} has no output {output!r}", hint=did_you_mean(output, self.card.outputs)
                )
        self.modalities = tuple(outputs)

    def unknown(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names that the model does not list as parameters, each with the nearest one that it does."""
        known = self.card.parameters | FIELDS
        strange = [name for name in names if name not in known] if self.card.parameters else []
        return {name: did_you_mean(name, known) for name in strange}
