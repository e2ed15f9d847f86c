"""Input items: what a request may send, in one form, with ids. Used to create responses and to list their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from mstar_core.api.responses.schema import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageContent,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from mstar_core.errors import RequestError

PREFIXES: Final[Mapping[type[Item], str]] = {
    MessageItem: "msg",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
    ReasoningItem: "rs",
}
KINDS: Final = ("message", "function_call", "function_call_output", "reasoning")

_ITEMS: Final = msgspec.json.Decoder(list[Item])


def with_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body whose input items all have a type, which messages may omit.

    Raises RequestError (`unsupported_parameter`) that names an item or a part that the server does not have.
    """
    items = fields.get("input")
    if not isinstance(items, list):
        return dict(fields)
    return {**fields, "input": [_typed(item, f"input[{number}]") for number, item in enumerate(items)]}


def _typed(item: Any, place: str) -> Any:
    if not isinstance(item, dict):
        return item
    kind = item.get("type") or ("message" if "role" in item else "item_reference" if "id" in item else None)
    if isinstance(kind, str) and kind not in KINDS:
        raise _unsupported(f"items of the type {kind[:60]!r} are", f"{place}.type", ", ".join(KINDS))
    for name in ("content", "output"):
        parts = item.get(name)
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            _check_part(part, f"{place}.{name}[{number}]")
    if kind == "reasoning" and item.get("encrypted_content") and not item.get("content"):
        raise _unsupported("encrypted thinking is", f"{place}.encrypted_content", "thinking as text in content")
    return {**item, "type": kind} if kind is not None else item


def _check_part(part: Any, place: str) -> None:
    if not isinstance(part, dict):
        return
    if part.get("type") == "input_file":
        raise _unsupported("files are", place, "input_text, input_image, input_audio")
    if part.get("type") == "input_image" and not part.get("image_url"):
        name = "file_id" if part.get("file_id") else "image_url"
        if name == "file_id":
            raise _unsupported("images by file_id are", f"{place}.file_id", "image_url")
        raise RequestError(f"{place}.image_url is missing", field=f"{place}.image_url", code="missing_field")


def _unsupported(what: str, field: str, allowed: str) -> RequestError:
    return RequestError(
        f"{what} not supported", hint=f"allowed: {allowed}", field=field, allowed=allowed, code="unsupported_parameter"
    )


def numbered(sent: str | Sequence[Item] | None, stem: str) -> list[Item]:
    """Return the input items of a response in one form: contents as lists, complete, with ids of their own."""
    if sent is None:
        return []
    items = [MessageItem(role="user", content=sent)] if isinstance(sent, str) else sent
    return [_numbered(item, f"{PREFIXES[type(item)]}_{stem}_in{number}") for number, item in enumerate(items)]


def _numbered(item: Item, item_id: str) -> Item:
    if isinstance(item, MessageItem):
        item = msgspec.structs.replace(item, content=_parts(item))
    return msgspec.structs.replace(item, id=item_id, status="completed")


def _parts(item: MessageItem) -> list[MessageContent]:
    """Return the parts of a message. Texts of answers are output, those of other roles are input."""
    parts = [InputText(text=item.content)] if isinstance(item.content, str) else item.content
    if item.role == "assistant":
        return [OutputText(text=part.text) if isinstance(part, InputText) else part for part in parts]
    return [InputText(text=part.text) if isinstance(part, OutputText) else part for part in parts]


def decoded(items: bytes) -> list[Item]:
    """Return the items of a stored list."""
    return _ITEMS.decode(items)
