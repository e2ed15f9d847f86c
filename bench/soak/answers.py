"""Answers of /generate: read as they arrive, and judged against the answer of an undisturbed run."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

JOINED: Final = ("text", "audio")
"""Modalities of which a client sees one sequence of bytes, however it is cut into lines."""

PASSING: Final = ("progress", "partial_image")
"""Modalities of lines about outputs in the making."""

VARYING: Final = ("queue_ms", "ttft_ms", "ttfa_ms", "total_ms", "prompt_tokens_details")
"""Entries of `usage` that depend on the time and on what is cached."""


@dataclass(slots=True)
class Answer:
    """Everything that one client received. Times are monotonic seconds.

    lines: all lines in order, data as bytes. refused: no connection could be opened. cut: the connection ended before
    the stream.
    """

    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    line_s: list[float] = field(default_factory=list)
    is_refused: bool = False
    is_cut: bool = False
    has_left: bool = False
    cause: str = ""

    @property
    def ports(self) -> dict[str, list[bytes]]:
        """Return the outputs by modality and name: one entry for text and for sound, one for each other output."""
        ports: dict[str, list[bytes]] = {}
        for line in self.outputs:
            port = f"{line['modality']} {line['metadata'].get('name', '')}".strip()
            values = ports.setdefault(port, [])
            if values and (line["modality"] in JOINED or line["metadata"].get("part", 0) > 0):
                values[-1] += line["data"]
            else:
                values.append(line["data"])
        return ports

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Return the lines that are outputs."""
        others = ("start", "done", "error", *PASSING)
        return [line for line in self.lines if line["modality"] not in others]

    @property
    def ends(self) -> list[dict[str, Any]]:
        """Return the lines that end the stream; there must be one."""
        return [line for line in self.lines if line["modality"] in ("done", "error")]

    @property
    def is_whole(self) -> bool:
        """Whether the stream has ended well."""
        return self.status == 200 and not self.is_cut and [line["modality"] for line in self.ends] == ["done"]

    @property
    def code(self) -> str:
        """Return the code of the error, from the body or the stream; empty without one."""
        errors = [line["metadata"]["code"] for line in self.ends if line["modality"] == "error"]
        if errors:
            return str(errors[0])
        error = self.body.get("error")
        return str(error["code"]) if isinstance(error, dict) else ""

    @property
    def sentence(self) -> str:
        """Return the words of the error, with the status of the response."""
        said = [line["data"].decode() for line in self.ends if line["modality"] == "error"]
        error = self.body.get("error")
        words = said[0] if said else str(error["message"]) if isinstance(error, dict) else self.cause
        return f"{self.status}: {words}"

    @property
    def longest_pause_s(self) -> float:
        """Return the longest time between two lines."""
        return max((b - a for a, b in zip(self.line_s, self.line_s[1:], strict=False)), default=0.0)

    def take(self, text: str) -> None:
        """Add one line of the stream; blank ones keep the connection alive."""
        if not text.strip():
            return
        line = json.loads(text)
        line["data"] = base64.b64decode(line.get("data") or "")
        line.setdefault("metadata", {})
        self.lines.append(line)
        self.line_s.append(time.monotonic())


async def ask(
    client: httpx.AsyncClient,
    body: Mapping[str, Any],
    answer: Answer | None = None,
    leave: Callable[[Answer], bool] | None = None,
) -> Answer:
    """Send one request to /generate and read its answer to the end, or until `leave` returns true for a line."""
    answer = answer if answer is not None else Answer()
    answer.sent_s = time.monotonic()
    try:
        async with client.stream("POST", "/generate", json={**body, "stream_events": "full"}) as response:
            answer.status, answer.headers = response.status_code, dict(response.headers)
            if response.status_code != 200:
                answer.body = json.loads(await response.aread())
            else:
                async for text in response.aiter_lines():
                    answer.take(text)
                    if leave is not None and leave(answer):
                        answer.has_left = True
                        break
    except httpx.ConnectError as error:
        answer.is_refused, answer.cause = True, str(error)
    except (httpx.TransportError, json.JSONDecodeError) as error:
        answer.is_cut, answer.cause = True, f"{type(error).__name__}: {error}"
    except asyncio.CancelledError:
        answer.has_left = True
        raise
    finally:
        answer.ended_s = time.monotonic()
    return answer


def flaws(answer: Answer, reference: Answer) -> list[str]:
    """Return the differences between an answer that must be whole and its reference; empty if there are none."""
    if not answer.is_whole:
        ends = [line["modality"] for line in answer.ends]
        return [
            f"not whole: status {answer.status}, ends {ends}, code {answer.code or 'none'}, {answer.cause or 'open'}"
        ]
    reasons = [f"line {n}: {why}" for n, why in gaps(answer)]
    ports, expected = answer.ports, reference.ports
    if list(ports) != list(expected) and sorted(ports) != sorted(expected):
        reasons.append(f"ports {sorted(ports)}, expected {sorted(expected)}")
    for port in expected.keys() & ports.keys():
        reasons += [f"{port}: {why}" for why in differences(ports[port], expected[port])]
    reasons += [f"{kind}: {why}" for kind in PASSING for why in differences(news(answer, kind), news(reference, kind))]
    done, usual = facts(answer), facts(reference)
    reasons += [
        f"done.{name} is {done.get(name)!r}, expected {usual.get(name)!r}"
        for name in sorted(done.keys() | usual.keys())
        if done.get(name) != usual.get(name)
    ]
    starts = [line["modality"] for line in answer.lines].count("start")
    return reasons if starts == 1 else [*reasons, f"{starts} start lines"]


def prefix_flaws(answer: Answer, reference: Answer) -> list[str]:
    """Return the differences between an answer that was ended early and the beginning of its reference."""
    reasons = [f"line {n}: {why}" for n, why in gaps(answer)]
    expected = reference.ports
    for port, values in answer.ports.items():
        begins = expected.get(port, [])
        if port.split()[0] in JOINED:
            same = bool(begins) and begins[0].startswith(values[0])
        else:
            same = values == begins[: len(values)]
        reasons += [] if same else [f"{port}: not the beginning of the reference"]
    return reasons


def news(answer: Answer, kind: str) -> list[bytes]:
    """Return the lines of one passing modality: their data, and their metadata as JSON."""
    return [
        line["data"] + json.dumps(line["metadata"], sort_keys=True).encode()
        for line in answer.lines
        if line["modality"] == kind
    ]


def gaps(answer: Answer) -> list[tuple[int, str]]:
    """Return the lines of sound that do not begin where the line before ended."""
    reasons, expected = [], dict[str, int]()
    for number, line in enumerate(answer.lines):
        facts_of = line["metadata"]
        if line["modality"] != "audio" or "offset_samples" not in facts_of:
            continue
        name = str(facts_of.get("name", ""))
        if facts_of["offset_samples"] != expected.get(name, 0):
            reasons.append((number, f"sound at {facts_of['offset_samples']}, expected {expected.get(name, 0)}"))
        expected[name] = facts_of["offset_samples"] + facts_of["samples"]
    return reasons


def differences(values: list[bytes], expected: list[bytes]) -> list[str]:
    """Return how two lists of outputs differ."""
    if len(values) != len(expected):
        return [f"{len(values)} outputs, expected {len(expected)}"]
    return [
        f"output {number} differs from byte {first_difference(a, b)} on, {len(a)} bytes, expected {len(b)}"
        for number, (a, b) in enumerate(zip(values, expected, strict=True))
        if a != b
    ]


def first_difference(a: bytes, b: bytes) -> int:
    """Return the index of the first byte that differs."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def facts(answer: Answer) -> dict[str, Any]:
    """Return the facts of the done line that depend on the request alone."""
    done = answer.ends[0]["metadata"]
    usage = {name: value for name, value in done.get("usage", {}).items() if name not in VARYING}
    return {**usage, "finish_reason": done.get("finish_reason"), "seed": done.get("seed")}
