"""Errors of the api about a field name the flag that sets it."""

from __future__ import annotations

import pytest

from mstar_core.client import ClientError
from mstarctl.call.ask import Card
from mstarctl.call.flags import flags_named

WORLD = Card(
    name="vjepa2_ac",
    inputs=("image", "video", "tensor"),
    outputs=("tensor",),
    parameters=frozenset({"states", "samples", "task"}),
)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ClientError("states is missing", hint="send states", param="states", code="missing_field"), "--state FILE"),
        (ClientError("no media was uploaded", param="video", code="missing_field"), "--image FILE or --video FILE"),
        (ClientError("samples is 0", param="samples", code="invalid_value"), "--param samples=VALUE"),
        (ClientError("bad frame", param="video", code="bad_media"), "--video FILE"),
        (ClientError("the queue is full", code="overloaded", hint="wait"), "wait"),
    ],
)
def test_the_hint_starts_with_the_flag(error: ClientError, hint: str) -> None:
    with pytest.raises(ClientError) as raised, flags_named(WORLD):
        raise error
    assert raised.value.hint.startswith(hint)
