"""Raw prompts of a request: texts or token ids, one or several. Used by completions, embeddings and /tokenize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.config.resolved import ApiConfig
from mstar_core.errors import RequestError, TooLarge

MOST_ID: Final = 2**31 - 1
ALLOWED: Final = "a string, a list of strings, a list of token ids, or a list of such lists"
RENAMED: Final = ("text", "ids", "messages")
"""Fields that processors name in their errors, for whatever the client sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompt:
    """A prompt without a template: a text, or ids if there are any. field: its place in the body."""

    text: str | None = None
    ids: tuple[int, ...] = ()
    field: str

    def renamed(self, error: Exception) -> Exception:
        """Return an error of the processor with the client's name of the field."""
        if not isinstance(error, RequestError) or error.facts.get("field") not in RENAMED:
            return error
        facts = {**error.facts, "field": self.field}
        return type(error)(error.title, error.detail, error.hint, code=error.code, **facts)


def read_prompts(value: Any, field: str, limits: ApiConfig) -> list[RawPrompt]:
    """Return the prompts of a field in order. Raises RequestError, TooLarge."""
    match value:
        case None:
            raise RequestError(f"{field} is missing", field=field, code="missing_field")
        case str():
            prompts = [RawPrompt(text=value, field=field)]
        case [first, *_] if _is_id(first):
            prompts = [RawPrompt(ids=read_ids(value, field), field=field)]
        case [str() | list(), *_] if len(value) <= limits.max_prompts:
            kind = type(value[0])
            prompts = [_prompt(item, f"{field}[{index}]", kind) for index, item in enumerate(value)]
        case [str() | list(), *_]:
            allowed = f"at most {limits.max_prompts}"
            title = f"{field} has {len(value)} entries, but {allowed} are allowed"
            raise RequestError(title, hint="send several requests", field=field, allowed=allowed)
        case _:
            raise RequestError(f"{field} must be {ALLOWED}", field=field, allowed=ALLOWED)
    size = sum(len((prompt.text or "").encode(errors="replace")) + len(prompt.ids) for prompt in prompts)
    if size > limits.max_text_bytes:
        raise TooLarge(
            f"{field} has more than {limits.max_text_bytes} bytes of text or token ids",
            field=field,
            code="body_too_large",
        )
    return prompts


def read_ids(value: Sequence[Any], field: str) -> tuple[int, ...]:
    """Return token ids. Raises RequestError for an empty list and for values that are not ids."""
    if not value:
        raise RequestError(f"{field} is empty", hint="send at least one token id", field=field)
    wrong = next((index for index, item in enumerate(value) if not _is_id(item)), None)
    if wrong is not None:
        raise RequestError(f"{field}[{wrong}] is not a token id", hint="send integers >= 0", field=f"{field}[{wrong}]")
    return tuple(value)


def _prompt(item: Any, field: str, kind: type[Any]) -> RawPrompt:
    if type(item) is not kind:
        raise RequestError(f"{field} must be {'a string' if kind is str else 'a list of token ids'}", field=field)
    return RawPrompt(text=item, field=field) if kind is str else RawPrompt(ids=read_ids(item, field), field=field)


def _is_id(item: Any) -> bool:
    return type(item) is int and 0 <= item <= MOST_ID
