"""Filter language for requests, shared by the admin socket, `mstarctl requests --filter` and `top`.

Adjacent terms are joined by AND; `OR` separates alternatives; a leading `!` negates a term. Brackets are not supported.

    state:queue  model:qwen*  node:talker  rank:1  host:node-b  id:r-7f*    a glob on a field
    state:fin                                                               the start of a state
    ttft>500  age>=2s  tokens<100  pages>64  rtf>0.8                        a comparison, with units for times
    err                                                                     a flag
    speech                                                                  a substring of the row
    /r-7f[0-9]/                                                             a regular expression, in clients only
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import UsageError, did_you_mean
from mstar_core.observe.frames import LOCAL, RequestStatus

LIMIT_CHARS: Final = 1024
LIMIT_TERMS: Final = 32

Test = Callable[[RequestStatus, float], bool]
"""Whether a request matches, at a time of the deployment's clock."""

Texts = Callable[[RequestStatus], Iterable[str | None]]
Number = Callable[[RequestStatus, float], float | None]

TEXT_FIELDS: Final[dict[str, Texts]] = {
    "id": lambda r: (r.id,),
    "handle": lambda r: (str(r.handle),),
    "state": lambda r: (r.state,),
    "model": lambda r: (r.model,),
    "route": lambda r: (r.route,),
    "walk": lambda r: (r.walk, *r.active),
    "node": lambda r: (r.node,),
    "rank": lambda r: (None if r.rank is None else str(r.rank),),
    "host": lambda r: (None if r.rank is None else r.host or LOCAL,),
    "in": lambda r: r.inputs,
    "out": lambda r: r.outputs,
    "why": lambda r: (r.why,),
    "error": lambda r: (r.error,),
}
NUMBER_FIELDS: Final[dict[str, Number]] = {
    "age": lambda r, t: r.age_s(t),
    "ttft": lambda r, t: r.ttft_ms,
    "ttfa": lambda r, t: r.ttfa_ms,
    "wait": lambda r, t: r.waited_ms,
    "tokens": lambda r, t: r.tokens,
    "prompt": lambda r, t: r.prompt_tokens,
    "cached": lambda r, t: r.cached_tokens,
    "audio": lambda r, t: r.audio_s,
    "pages": lambda r, t: r.pages,
    "rtf": lambda r, t: r.rtf(t),
}
FLAGS: Final[dict[str, Test]] = {
    "err": lambda r, t: bool(r.error),
    "ended": lambda r, t: r.has_ended,
}
STATES: Final = ("prepare", "queue", "run", "resume", "finished", "failed", "cancelled")
_MS: Final = frozenset({"ttft", "ttfa", "wait"})
_SECONDS: Final = frozenset({"age", "audio"})
_TIMED: Final = frozenset({"age", "rtf"})
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_COMPARISONS: Final = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_COMPARE: Final = re.compile(r"(?P<field>\w+)(?P<how>>=|<=|>|<|=)(?P<value>.*)", re.DOTALL)
_NUMBER: Final = re.compile(r"(?P<number>-?\d+(?:\.\d+)?)(?P<unit>[a-z]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A parsed filter. An empty one matches everything. is_timed: the result depends on the time."""

    text: str = ""
    alternatives: tuple[tuple[Test, ...], ...] = ()
    is_timed: bool = False

    @classmethod
    def parse(cls, text: str, *, expressions: bool = False) -> Filter:
        """Parse a filter. expressions: accept `/regular expressions/`, which a server must not.

        Raises UsageError for an unknown field (with the nearest name), a bad value or a text that is too long.
        """
        words = text.split()
        if len(text) > LIMIT_CHARS or len(words) > LIMIT_TERMS:
            raise _wrong(
                "the filter is too long",
                f"{len(text)} characters in {len(words)} terms; at most {LIMIT_CHARS} in {LIMIT_TERMS}",
                "remove some terms",
            )
        alternatives: list[list[Test]] = [[]]
        timed = False
        for word in words:
            if word == "OR":
                alternatives.append([])
                continue
            test, depends = _term(word, expressions)
            alternatives[-1].append(test)
            timed = timed or depends
        if len(alternatives) > 1 and not all(alternatives):
            raise _wrong("OR has nothing on one side", text, "write a term on both sides of OR")
        conditions = tuple(tuple(tests) for tests in alternatives if tests)
        return cls(text=" ".join(words), alternatives=conditions, is_timed=timed)

    def takes(self, request: RequestStatus, t: float) -> bool:
        """Return whether the request matches. t: the current time of the deployment's clock, as in frames."""
        if not self.alternatives:
            return True
        return any(all(test(request, t) for test in tests) for tests in self.alternatives)


def row_text(request: RequestStatus) -> str:
    """Return the text that words and regular expressions are matched against: the row of the request."""
    r = request
    parts: list[str | None] = [r.id, r.state, r.model, r.route, *r.inputs, *r.outputs, r.node, r.walk]
    parts += [*r.active, *r.walks, r.why, r.error]
    if "audio" in r.outputs:
        parts.append("speech")
    return " ".join(part for part in parts if part)


def _term(word: str, expressions: bool) -> tuple[Test, bool]:
    if word.startswith("!") and len(word) > 1:
        test, timed = _term(word[1:], expressions)
        return (lambda r, t: not test(r, t)), timed
    if len(word) > 2 and word.startswith("/") and word.endswith("/"):
        return _expression(word[1:-1], expressions), False
    name, colon, pattern = word.partition(":")
    if colon and name.isidentifier():
        return _glob(name, pattern), False
    compared = _COMPARE.fullmatch(word)
    if compared is not None:
        return _comparison(compared["field"], compared["how"], compared["value"])
    if word in FLAGS:
        return FLAGS[word], False
    text = word.casefold()
    return (lambda r, t: text in row_text(r).casefold()), False


def _expression(source: str, allowed: bool) -> Test:
    if not allowed:
        raise _wrong("the server does not accept regular expressions", f"/{source}/", "use a glob, such as id:r-7f*")
    try:
        pattern = re.compile(source)
    except re.error as error:
        raise _wrong(
            "this is not a regular expression", f"/{source}/: {error}", "escape its special characters"
        ) from error
    return lambda r, t: pattern.search(row_text(r)) is not None


def _glob(name: str, pattern: str) -> Test:
    if name not in TEXT_FIELDS:
        raise _unknown(name, TEXT_FIELDS if name not in NUMBER_FIELDS else {}, f"{name}>0")
    if name == "state" and not set("*?[") & set(pattern):
        return _state(pattern)
    texts, matches = TEXT_FIELDS[name], re.compile(fnmatch.translate(pattern)).match
    return lambda r, t: any(text is not None and matches(text) is not None for text in texts(r))


def _state(text: str) -> Test:
    """Match the states that start with the text, and the one that the text starts with, such as `running`."""
    states = frozenset(state for state in STATES if state.startswith(text) or (text and text.startswith(state)))
    if not states:
        raise _wrong(f"no request has the state {text!r}", hint=did_you_mean(text, STATES))
    return lambda r, t: r.state in states


def _comparison(name: str, how: str, value: str) -> tuple[Test, bool]:
    if name not in NUMBER_FIELDS:
        raise _unknown(name, NUMBER_FIELDS if name not in TEXT_FIELDS else {}, f"{name}:{value or '*'}")
    number, compare, bound = NUMBER_FIELDS[name], _COMPARISONS[how], _number(name, value)

    def test(request: RequestStatus, t: float) -> bool:
        value = number(request, t)
        return value is not None and bool(compare(value, bound))

    return test, name in _TIMED


def _number(name: str, text: str) -> float:
    parsed = _NUMBER.fullmatch(text)
    if parsed is None:
        raise _wrong(f"{name} is compared with {text!r}, which is not a number", hint=f"such as {name}>100")
    number, unit = float(parsed["number"]), parsed["unit"]
    if not unit:
        return number
    if unit not in _UNITS_S or name not in _MS | _SECONDS:
        has_units = name in _MS | _SECONDS
        raise _wrong(
            f"{name} has no unit {unit!r}", hint="use ms, s, m or h" if has_units else "write the number alone"
        )
    seconds = number * _UNITS_S[unit]
    return seconds * 1000 if name in _MS else seconds


def _unknown(name: str, among: Iterable[str], other_form: str) -> UsageError:
    names = list(among)
    hint = did_you_mean(name, names) if names else f"write {other_form}"
    title = f"filters have no field {name!r}" if names else f"{name} cannot be compared this way"
    return _wrong(title, hint=hint)


def _wrong(title: str, detail: str = "", hint: str = "") -> UsageError:
    return UsageError(title, detail, hint, code="invalid_filter")
