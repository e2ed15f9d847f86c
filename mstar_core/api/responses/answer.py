"""The output of a response as it grows: items from the parts of an answer, and the events that tell of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mstar_core.api.errors import ErrorReply
from mstar_core.api.group import GroupPart
from mstar_core.api.output.token_scores import Likelihood, TokenScore
from mstar_core.api.responses.schema import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokenDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokenDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseErrorEvent,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    Status,
    TokenLogprob,
    TokenOption,
)
from mstar_core.api.text.answers import AnswerReader
from mstar_core.api.text.content_scores import ContentScores
from mstar_core.api.text.logprobs import finite
from mstar_core.plugin.chat.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning


class ResponseAnswer:
    """A response and its events. `response` is current after each call; one item is open at a time.

    number: of the next event.

    All methods return the events of what they change, in the order in which clients expect them.
    """

    def __init__(self, response: ResponseObject, *, has_logprobs: bool = False) -> None:
        """has_logprobs: texts have the log-probabilities of their tokens."""
        self.response = response
        self.number = 0
        self._scores = ContentScores() if has_logprobs else None
        self._open: OutputItem | None = None

    def begin(self) -> list[ResponseEvent]:
        """Announce the response."""
        return [
            self._whole("response.created"),
            *([self._whole("response.queued")] if self.response.status == "queued" else []),
        ]

    def run(self) -> list[ResponseEvent]:
        """Note that the response is generated."""
        self.response.status = "in_progress"
        return [self._whole("response.in_progress")]

    def of(self, reader: AnswerReader, piece: GroupPart) -> list[ResponseEvent]:
        """Append a part of the answer, and complete the response if it is the last one."""
        events: list[ResponseEvent] = []
        for each in reader.read(piece):
            if self._scores is not None and each.chunk is not None:
                self._scores.add(each.chunk)
            for part in each.parts:
                tokens = self._scores.of(part) if self._scores is not None else ()
                events += self._part(reader, part, tokens)
        if piece.done is not None:
            usage = usage_of(piece.done.usage, reader.reasoning_tokens)
            events += self.end(piece.done.finish_reason, usage)
        return events

    def _part(self, reader: AnswerReader, part: Part, tokens: Sequence[TokenScore]) -> list[ResponseEvent]:
        match part:
            case Content(text):
                return self.content(text, response_logprobs_of(tokens))
            case Reasoning(text):
                return self.reasoning(text)
            case CallBegin(index, name):
                return self.call(name, reader.call_id(index))
            case CallArguments(_, text):
                return self.arguments(text)
            case CallEnd():
                return self._close()

    def content(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[ResponseEvent]:
        """Append text to the message of the answer."""
        events = self._enter(MessageItem, lambda: MessageItem(role="assistant", content=[], id=self._id("msg")))
        part = self._text_part(events)
        part.text += text
        part.logprobs.extend(logprobs)
        return [*events, self._of("response.output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))]

    def reasoning(self, text: str) -> list[ResponseEvent]:
        """Append text to the thinking before the answer."""
        events = self._enter(ReasoningItem, lambda: ReasoningItem(content=[], id=self._id("rs")))
        item = self._open
        assert isinstance(item, ReasoningItem) and item.content is not None
        if not item.content:
            item.content.append(ReasoningText(text=""))
            events.append(self._of("response.content_part.added", content_index=0, part=ReasoningText(text="")))
        item.content[0].text += text
        return [*events, self._of("response.reasoning_text.delta", content_index=0, delta=text)]

    def call(self, name: str, call_id: str) -> list[ResponseEvent]:
        """Begin a call of a function."""
        events = self._close()
        return [*events, *self._add(FunctionCallItem(call_id=call_id, name=name, arguments="", id=self._id("fc")))]

    def arguments(self, text: str) -> list[ResponseEvent]:
        """Append to the arguments of the call that has begun."""
        item = self._open
        assert isinstance(item, FunctionCallItem)
        item.arguments += text
        return [self._of("response.function_call_arguments.delta", delta=text)]

    def end(self, reason: str, usage: ResponseUsage) -> list[ResponseEvent]:
        """Complete the response. reason: `length` if a limit has ended it."""
        self.response.usage = usage
        if reason == "length":
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            return self._finish("incomplete", "response.incomplete")
        events: list[ResponseEvent] = []
        if not any(isinstance(item, (MessageItem, FunctionCallItem)) for item in self.response.output):
            events = self._enter(MessageItem, lambda: MessageItem(role="assistant", content=[], id=self._id("msg")))
            self._text_part(events)
        self.response.completed_at = int(time.time())
        return [*events, *self._finish("completed", "response.completed")]

    def fail(self, reply: ErrorReply) -> list[ResponseEvent]:
        """End the response with an error, or as cancelled."""
        if reply.code == "cancelled":
            return self._finish("cancelled", "response.failed")
        self.response.error = error_of(reply)
        return self._finish("failed", "response.failed")

    def _finish(self, status: Status, event: str) -> list[ResponseEvent]:
        events = self._close("completed" if status == "completed" else "incomplete")
        self.response.status = status
        return [*events, self._whole(event)]

    def _enter(self, kind: type[OutputItem], make: Any) -> list[ResponseEvent]:
        """Let an item of a kind be open: the one that is, or a new one."""
        if isinstance(self._open, kind):
            return []
        return [*self._close(), *self._add(make())]

    def _add(self, item: OutputItem) -> list[ResponseEvent]:
        item.status = "in_progress"
        self._open = item
        self.response.output.append(item)
        return [self._of("response.output_item.added", item=item)]

    def _text_part(self, events: list[ResponseEvent]) -> OutputText:
        """Return the text of the open message. A new one is announced in `events`."""
        item = self._open
        assert isinstance(item, MessageItem) and isinstance(item.content, list)
        if not item.content:
            item.content.append(OutputText(text=""))
            events.append(self._of("response.content_part.added", content_index=0, part=OutputText(text="")))
        part = item.content[0]
        assert isinstance(part, OutputText)
        return part

    def _close(self, status: ItemStatus = "completed") -> list[ResponseEvent]:
        """End the open item."""
        item = self._open
        events: list[ResponseEvent] = []
        match item:
            case None:
                return []
            case MessageItem(content=[OutputText() as part]):
                facts: dict[str, Any] = {"content_index": 0, "text": part.text, "logprobs": part.logprobs}
                events.append(self._of("response.output_text.done", **facts))
                events.append(self._of("response.content_part.done", content_index=0, part=part))
            case ReasoningItem(content=[part]):
                events.append(self._of("response.reasoning_text.done", content_index=0, text=part.text))
                events.append(self._of("response.content_part.done", content_index=0, part=part))
            case FunctionCallItem():
                facts = {"name": item.name, "arguments": item.arguments}
                events.append(self._of("response.function_call_arguments.done", **facts))
        item.status = status
        events.append(self._of("response.output_item.done", item=item))
        self._open = None
        return events

    @property
    def _stem(self) -> str:
        return self.response.id.removeprefix("resp_")

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._stem}_{len(self.response.output)}"

    def _of(self, kind: str, *, item: OutputItem | None = None, **facts: Any) -> ResponseEvent:
        """Return an event about the open item. item: itself, in an event that has it in place of its id."""
        assert self._open is not None
        place = {"item_id": self._open.id} if item is None else {"item": copy.deepcopy(item)}
        index = len(self.response.output) - 1
        return self._numbered(ResponseEvent(type=kind, sequence_number=0, output_index=index, **place, **facts))

    def _whole(self, kind: str) -> ResponseEvent:
        response = copy.copy(self.response)
        response.output = list(response.output)
        return self._numbered(ResponseEvent(type=kind, sequence_number=0, response=response))

    def _numbered(self, event: ResponseEvent) -> ResponseEvent:
        event.sequence_number = self.number
        self.number += 1
        return event


def encoded(event: ResponseEvent) -> tuple[bytes]:
    """Return the server-sent event."""
    return (b"event: %s\ndata: %s\n\n" % (event.type.encode(), msgspec.json.encode(event)),)


def refused(reply: ErrorReply, number: int) -> tuple[bytes]:
    """Return the server-sent event that ends a stream whose request was refused. number: of the event."""
    last = ResponseErrorEvent(sequence_number=number, code=reply.code, message=reply.message, param=reply.param)
    return (b"event: error\ndata: %s\n\n" % msgspec.json.encode(last),)


def response_logprobs_of(tokens: Sequence[TokenScore]) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens of a text."""
    return [
        TokenLogprob(**_likely(score.token), top_logprobs=[TokenOption(**_likely(each)) for each in score.most_likely])
        for score in tokens
    ]


def _likely(token: Likelihood) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.data), "logprob": finite(token.logprob)}


def usage_of(usage: Mapping[str, Any], reasoning_tokens: int) -> ResponseUsage:
    """Return a usage object in the terms of responses."""
    read = usage["prompt_tokens_details"]
    return ResponseUsage(
        input_tokens=usage["prompt_tokens"],
        input_tokens_details=InputTokenDetails(cached_tokens=read["cached_tokens"]),
        output_tokens=usage["completion_tokens"],
        output_tokens_details=OutputTokenDetails(reasoning_tokens=reasoning_tokens),
        total_tokens=usage["total_tokens"],
    )


def error_of(reply: ErrorReply) -> ResponseError:
    """Return the error object of a failed response."""
    if reply.status == 429:
        return ResponseError(code="rate_limit_exceeded", message=reply.message)
    return ResponseError(code="server_error" if reply.status >= 500 else "invalid_prompt", message=reply.message)
