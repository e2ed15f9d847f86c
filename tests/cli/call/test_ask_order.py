"""Order of files in a request: that of their kinds on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mstarctl.call.ask import Card
from mstarctl.client.realtime import RealtimeAddress
from mstarctl.commands import call
from mstarctl.main import run


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        (("--video", "--image"), ["video", "image"]),
        (("--image", "--video", "--image"), ["image", "image", "video"]),
        (("--audio", "--image", "--video"), ["audio", "image", "video"]),
    ],
)
def test_kinds_keep_their_order(
    options: tuple[str, ...], kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    @contextmanager
    def served(*_: object, **__: object) -> Iterator[Any]:
        card = Card(name="m", inputs=("text", "image", "audio", "video"), outputs=("text",), parameters=frozenset())
        address = RealtimeAddress(url="http://localhost")
        client: Any = None  # nothing is sent
        yield call.Server(name="m", client=client, address=address, card=card, facts={})

    monkeypatch.setattr(call, "served", served)
    monkeypatch.setattr(call, "call_once", lambda server, ask, *_, **__: asked.append(ask))
    for option in options:
        (tmp_path / option[2:]).write_bytes(option.encode())
    words = [word for option in options for word in (option, str(tmp_path / option[2:]))]
    assert run(["call", "m", *words]) == 0
    assert [content.decode()[2:] for _, content in asked[0].files] == kinds
