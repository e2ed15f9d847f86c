"""Log lines of an agent's children: batches, their bound, and the count of lines that were dropped."""

from __future__ import annotations

from mstar_core.agent.log_lines import BATCH_BYTES, MOST_BYTES, LogBuffer
from mstar_core.errors import PeerStalled
from mstar_core.messages.hosts import LogLines


def test_lines_leave_in_order_and_in_batches() -> None:
    sent: list[LogLines] = []
    filled: list[int] = []
    buffer = LogBuffer(7, sent.append, lambda: filled.append(1))
    lines = [b"%06d" % number + b"x" * 1000 for number in range(600)]
    for line in lines:
        buffer.add(line + b"\n")
    while buffer.flush():
        pass
    assert [line for message in sent for line in message.lines] == lines
    assert len(sent) == 3 and all(sum(map(len, message.lines)) <= BATCH_BYTES for message in sent)
    assert {(message.key, message.dropped) for message in sent} == {(7, 0)} and buffer.is_empty
    assert len(filled) == 1, "one call for all lines until they have left"


def test_the_oldest_lines_are_dropped_and_counted_while_none_can_leave() -> None:
    sent: list[LogLines] = []
    is_stalled = True

    def send(message: LogLines) -> None:
        if is_stalled:
            raise PeerStalled("full")
        sent.append(message)

    buffer, size = LogBuffer(1, send, lambda: None), 100_000
    count = MOST_BYTES // size + 5
    for number in range(count):
        buffer.add(b"%06d" % number + b"x" * (size - 6))
        buffer.flush()
    is_stalled = False
    while buffer.flush():
        pass
    kept = [int(line[:6]) for message in sent for line in message.lines]
    assert kept == list(range(count - MOST_BYTES // size, count))
    assert [message.dropped for message in sent if message.dropped] == [count - len(kept)]
