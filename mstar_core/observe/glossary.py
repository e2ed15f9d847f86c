"""Glossary of times and loads: one meaning for each word, in the docs, in `top`, on the web page and in reports.

The page docs/metrics.md is generated from this table, and the help of `top` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One word. unit: of its figures, empty without one. short: meaning in a few words. meaning: the definition."""

    word: str
    unit: str = ""
    short: str
    meaning: str


GLOSSARY: Final = (
    Term(
        word="compute",
        unit="ms",
        short="time in steps: of the device, or of the CPU",
        meaning="Sum of the durations of the steps that a node ran for a request. A step takes the time of the "
        "device if it was measured, else from its launch to its result, without the node's step before it. A step of "
        "several requests counts in full for each. If several nodes of one request share a step, each has an equal "
        "part.",
    ),
    Term(
        word="queue",
        unit="ms",
        short="ready, but other requests ran",
        meaning="A job of the request was ready at a node, or the request was ready for admission, and no step of "
        "the request ran on that rank. The queue of a node, as a number, counts sequences and jobs that are ready "
        "to run, and jobs without a slot or pages.",
    ),
    Term(
        word="wait",
        unit="ms",
        short="no input yet",
        meaning="A node had no job because its next input had not come, such as the next chunk of a stream: "
        "`snac_decoder waits for LLM`. It is normal for a node that is faster than its source.",
    ),
    Term(
        word="starving",
        short="a loop that waits",
        meaning="State of an engine loop whose next input has not come. Its time is `wait`.",
    ),
    Term(
        word="transfer",
        unit="ms",
        short="on its way to another rank",
        meaning="Time from the sending of a tensor to its arrival on another rank; of a stream, from the first item"
        " sent to the last one received.",
    ),
    Term(
        word="stall",
        unit="ms",
        short="silence that the listener heard",
        meaning="Playback had no audio left although the answer went on. The server estimates it from the steps of "
        "the node that makes the sound; a load test measures it at the client.",
    ),
    Term(
        word="between steps",
        unit="ms",
        short="none of these",
        meaning="Time of a request in which nothing of it ran, was in a queue, waited for a stream or was on its "
        "way: messages between processes, and work of the host outside steps.",
    ),
    Term(
        word="in parallel",
        unit="ms",
        short="computed at the same time",
        meaning="Compute of one request that ran at the same time on several ranks or streams of a device. It is "
        "subtracted, so that the parts of a request add up to its time.",
    ),
    Term(
        word="network and client",
        unit="ms",
        short="outside the server",
        meaning="Time that a client of a load test measured beyond the time of the request in the server.",
    ),
    Term(
        word="WAIT",
        unit="ms",
        short="queue of a request, all nodes",
        meaning="Part of the time of a request in which it was in a queue and nothing of it ran. Admission is "
        "included.",
    ),
    Term(
        word="AGE, TOOK",
        short="since arrival; of ended ones, to the end",
        meaning="Time from the arrival of a request until now, or until its end.",
    ),
    Term(
        word="TTFT, TTFA",
        unit="ms",
        short="time to first output, first audio",
        meaning="Time from the arrival of a request to its first output, and to its first audio.",
    ),
    Term(
        word="TICK",
        short="of the client's control loop",
        meaning="A request whose client names a period is `late` if it takes longer, or fails. `late +2` says that two "
        "more ticks passed meanwhile. Missed ticks are the late ones and those without a request. Without a "
        "period from the client, it is unknown and nothing is missed.",
    ),
    Term(
        word="SPEED",
        short="audio per second, or tokens per second",
        meaning="Of one request: seconds of audio divided by its time, or its tokens after the first one divided by "
        "the time since the first one.",
    ),
    Term(
        word="RTF",
        short="seconds per second of audio",
        meaning="Real-time factor: duration of a request divided by the duration of its audio. Below 1 it is faster"
        " than playback.",
    ),
    Term(
        word="busy",
        unit="share",
        short="share of the last second in steps",
        meaning="Compute of a node, or of all nodes of a rank, divided by the time that passed, over the last "
        "second. A follower of a tensor-parallel group is as busy as its leader. A rank whose process has "
        "ended is not busy.",
    ),
    Term(
        word="step",
        unit="ms",
        short="one batch through one node",
        meaning="One run of a node on a batch. p50 and p99 are of its last 256 steps.",
    ),
    Term(
        word="core",
        unit="share",
        short="CPU time of the process",
        meaning="CPU time of a process divided by the time that passed; 1 is one core.",
    ),
)
"""All words, in the order in which they are shown."""
