"""Capabilities of a model's text beyond plain answers. Listed by /v1/models; checked before a request uses one."""

from __future__ import annotations

import dataclasses
from typing import Final

from mstar_core.errors import RequestError
from mstar_core.plugin.spec import ModelSpec

CONSTRAINT: Final = "constraint"
"""Sampling parameter with the grammar of an answer. The api sets it; clients do not."""

LOGPROBS: Final = "logprobs"
"""Sampling parameter for log-probabilities."""


def capabilities_of(spec: ModelSpec) -> list[str]:
    """Return the names of the capabilities of a model."""
    names = {field.name for field in dataclasses.fields(spec.params)}
    has_text_head = any(node.sampling is not None and node.sampling.is_text for node in spec.nodes)
    is_chat = "chat" in spec.routes
    offered = {
        "tools": is_chat and spec.chat.tools is not None,
        "reasoning": is_chat and spec.chat.reasoning is not None,
        "reasoning_effort": is_chat and spec.chat.reasoning is not None and bool(spec.chat.reasoning.efforts),
        "structured_outputs": has_text_head and CONSTRAINT in names,
        "logprobs": has_text_head and LOGPROBS in names,
    }
    return [name for name, is_offered in offered.items() if is_offered]


def check_capability(spec: ModelSpec, capability: str, field: str) -> None:
    """Raise RequestError (`unsupported_parameter`) if a model lacks a capability that `field` needs."""
    offered = capabilities_of(spec)
    if capability not in offered:
        listed = ", ".join(offered) or "none"
        raise RequestError(
            f"{field} needs the capability {capability}, which the model does not have",
            hint=f"omit it; capabilities of the model: {listed}",
            field=field,
            code="unsupported_parameter",
        )
