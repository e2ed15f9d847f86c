"""Parser of answers: content, thinking and tool calls in the text of a model, as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Collection

from mstar_core.plugin.chat.call_reader import SPACE, CallReader, CallSyntax
from mstar_core.plugin.chat.format import ChatFormat
from mstar_core.plugin.chat.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning, merged


class AnswerParser:
    """Parser of one answer. Its parts, joined, do not depend on how the text was cut.

    A call is given once its JSON is complete and names a tool of the request. Text that only looks like a call stays
    content, and so does a call that is broken or cut off. White space around thinking and calls is left out.
    """

    def __init__(
        self,
        form: ChatFormat,
        *,
        tools: Collection[str] = (),
        begins_open: bool = False,
        is_single: bool = False,
        is_constrained: bool = False,
    ) -> None:
        """tools: names of the tools that the answer may call. begins_open: the prompt ends within the thinking.

        is_single: text behind the first call is left out. is_constrained: a grammar holds the calls, so their arguments
        are given as they arrive; a call that is cut off has no end.
        """
        self._tools = _Calls(form, tools, streams=is_constrained) if form.tools is not None and tools else None
        self._thought = form.reasoning
        self._begins_open = begins_open
        self._is_single = is_single
        self._text = ""  # not consumed
        self._raw = ""  # consumed as the start of a call, which may turn out to be content
        self._space = ""  # left out if a call, the end of the thinking or the end of the text follows
        self._has_thought = False
        self._calls = 0
        self._parts: list[Part] = []
        self._state: Callable[[bool], bool] = self._start

    @property
    def calls(self) -> int:
        """Return the number of calls so far."""
        return self._calls

    @property
    def is_thinking(self) -> bool:
        """Return whether the text goes on within the thinking."""
        return self._state == self._thinking or (self._begins_open and self._state == self._start)

    def push(self, text: str) -> list[Part]:
        """Return the parts that `text` completes."""
        self._text += text
        return self._run(is_end=False)

    def flush(self) -> list[Part]:
        """Return the parts held back, at the end of the text."""
        parts = self._run(is_end=True)
        if self._space and not self._calls and self._state == self._content:
            parts.append(Content(self._space))
        return merged(parts)

    def _run(self, *, is_end: bool) -> list[Part]:
        self._parts = []
        while self._state(is_end):
            pass
        return merged(self._parts)

    # States consume text. They return whether the state that follows goes on with the rest. At the end none may wait.

    def _start(self, is_end: bool) -> bool:
        """Look for the start of the thinking."""
        thought = self._thought
        if thought is None:
            return self._enter(self._answer)
        rest = self._text.lstrip(SPACE)
        if _is_prefix(rest, thought.begin) and not is_end:
            return False
        if rest.startswith(thought.begin):
            return self._enter(self._thinking, rest[len(thought.begin) :])
        return self._enter(self._thinking if self._begins_open else self._answer)

    def _thinking(self, is_end: bool) -> bool:
        assert self._thought is not None
        before, end, after = _split(self._text, self._thought.end, is_end=is_end)
        text = self._space + before
        if not self._has_thought:
            text = text.lstrip(SPACE)
        body = text.rstrip(SPACE)
        self._space = text[len(body) :]
        if body:
            self._has_thought = True
            self._parts.append(Reasoning(body))
        if end:
            self._space = ""
            return self._enter(self._thought_over, after)
        self._text = after
        return False

    def _thought_over(self, is_end: bool) -> bool:
        self._text = self._text.lstrip(SPACE)
        return bool(self._text) and self._enter(self._answer)

    def _answer(self, is_end: bool) -> bool:
        """Decide whether an answer in a format without a marker is a call."""
        if self._tools is None or self._tools.begin:
            return self._enter(self._content)
        rest = self._text.lstrip(SPACE)
        if not rest and not is_end:
            return False
        if not rest.startswith(self._tools.opener):
            return self._enter(self._content)
        self._raw = self._text[: len(self._text) - len(rest)]
        return self._enter(self._call_opening, rest)

    def _content(self, is_end: bool) -> bool:
        before, begin, after = _split(self._text, self._tools.begin if self._tools is not None else "", is_end=is_end)
        self._write(before)
        if begin:
            self._raw = begin
            return self._enter(self._call_opening, after)
        self._text = after
        return False

    def _write(self, text: str) -> None:
        """Give content, but hold white space at its end back if a call may follow."""
        text = self._space + text
        body = text.rstrip(SPACE) if self._tools is not None else text
        self._space = text[len(body) :]
        if body:
            self._parts.append(Content(body))

    def _call_opening(self, is_end: bool) -> bool:
        """Look for the bracket of a list of calls, if the format has one."""
        assert self._tools is not None
        return (
            self._found("[", self._object_opening, is_end) if self._tools.is_list else self._enter(self._object_opening)
        )

    def _object_opening(self, is_end: bool) -> bool:
        """Look for the brace of a call."""
        rest = self._text.lstrip(SPACE)
        if not rest and not is_end:
            return False
        if not rest.startswith("{"):
            return self._not_a_call(len(self._text) if is_end and not rest else 0)
        assert self._tools is not None
        self._raw += self._text[: len(self._text) - len(rest)]
        self._reader = self._tools.reader()
        return self._enter(self._call, rest)

    def _found(self, char: str, state: Callable[[bool], bool], is_end: bool) -> bool:
        rest = self._text.lstrip(SPACE)
        if not rest and not is_end:
            return False
        if not rest.startswith(char):
            return self._not_a_call(0)
        self._raw += self._text[: len(self._text) - len(rest) + 1]
        return self._enter(state, rest[1:])

    def _call(self, is_end: bool) -> bool:
        reader = self._reader
        has_begun = reader.name is not None
        arguments = reader.read(self._text)
        if reader.name is not None and not has_begun:
            self._space = ""
            self._parts.append(CallBegin(self._calls, reader.name))
            self._calls += 1
        if arguments:
            self._parts.append(CallArguments(self._calls - 1, arguments))
        if reader.state == "open" and not is_end:
            return False
        if reader.name is None:
            return self._not_a_call(reader.end if reader.state == "broken" else len(self._text))
        if reader.state == "open":
            return self._enter(self._nothing)
        self._raw = ""
        self._parts.append(CallEnd(self._calls - 1))
        return self._enter(self._nothing if self._is_single else self._call_over, self._text[reader.end :])

    def _not_a_call(self, count: int) -> bool:
        """Give what looked like a call back as content, with the first characters of the text that follows."""
        raw, self._raw = self._raw + self._text[:count], ""
        self._write(raw)
        return self._enter(self._content, self._text[count:])

    def _call_over(self, is_end: bool) -> bool:
        """Look for the next call of a list, or its end."""
        assert self._tools is not None
        if not self._tools.is_list:
            return self._enter(self._end_marker)
        rest = self._text.lstrip(SPACE)
        if rest.startswith("]"):
            return self._enter(self._end_marker, rest[1:])
        following = rest[1:].lstrip(SPACE)
        if not rest or (rest[0] == "," and not following):
            return self._wait(is_end)
        if rest[0] != "," or following[0] != "{":
            return self._enter(self._content)
        self._raw = self._text[: len(self._text) - len(following)]
        return self._enter(self._object_opening, following)

    def _end_marker(self, is_end: bool) -> bool:
        assert self._tools is not None
        rest, end = self._text.lstrip(SPACE), self._tools.end
        if rest.startswith(end):
            return self._enter(self._between, rest[len(end) :] if end else self._text)
        return self._wait(is_end) if _is_prefix(rest, end) else self._enter(self._between)

    def _between(self, is_end: bool) -> bool:
        """Decide whether another call follows in a format without a marker."""
        assert self._tools is not None
        rest = self._text.lstrip(SPACE)
        if self._tools.begin or (rest and not rest.startswith(self._tools.opener)):
            return self._enter(self._content)
        if not rest:
            return self._wait(is_end)
        self._raw = self._text[: len(self._text) - len(rest)]
        return self._enter(self._call_opening, rest)

    def _nothing(self, is_end: bool) -> bool:
        """Leave the rest out."""
        self._text = ""
        return False

    def _wait(self, is_end: bool) -> bool:
        """Wait for more text. At the end, leave out what is no more than the start of a marker behind a call."""
        return is_end and self._enter(self._nothing)

    def _enter(self, state: Callable[[bool], bool], text: str | None = None) -> bool:
        self._state = state
        if text is not None:
            self._text = text
        return True


class _Calls:
    """Markers of the calls of an answer, and readers for them."""

    def __init__(self, form: ChatFormat, names: Collection[str], *, streams: bool) -> None:
        assert form.tools is not None
        self.begin = form.tools.begin
        self.end = form.tools.end
        self.is_list = form.tools.is_list
        self.opener = "[" if form.tools.is_list else "{"
        self._syntax = CallSyntax(form.tools, names)
        self._streams = streams

    def reader(self) -> CallReader:
        return CallReader(self._syntax, streams=self._streams)


def _is_prefix(text: str, marker: str) -> bool:
    """Return whether more text could complete `marker`."""
    return len(text) < len(marker) and marker.startswith(text)


def _split(text: str, marker: str, *, is_end: bool) -> tuple[str, str, str]:
    """Return the text before a marker, the marker and the text behind it; without it, what may be its start."""
    before, found, after = text.partition(marker) if marker else (text, "", "")
    if found or is_end or not marker:
        return before, found, after
    keep = begun(text, marker)
    return text[: len(text) - keep], "", text[len(text) - keep :]


def begun(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the start of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
