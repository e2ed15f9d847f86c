"""Link between the leader of a tensor-parallel group and its followers: plans one way, checksums the other.

Stream sockets carry length-prefixed frames: Unix sockets on one host, TCP between hosts. The kernel wakes a waiting
follower, reports the end of a member at once, and blocks a leader that runs too far ahead.
"""

from __future__ import annotations

import select
import struct
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from mstar_core.closing import Closing
from mstar_core.engine.group.connection import connect
from mstar_core.engine.group.listener import open_listener
from mstar_core.engine.group.plans import Checksum, Frame, FrameDecoder, FrameEncoder, Plan
from mstar_core.errors import WorkerLost

if TYPE_CHECKING:
    import socket

    from torch import Tensor

    from mstar_core.parallel.groups import GroupPlace

_LENGTH: Final = struct.Struct("<I")


class GroupEnded(BaseException):
    """A member of the group is lost, or a published plan failed here: this process must end.

    Not an `Exception`, because no isolation boundary may keep a process whose group has lost its lockstep.
    """

    def __init__(self, error: WorkerLost) -> None:
        super().__init__(str(error))
        self.error = error


class PlanSender(Closing):
    """The leader's end. Owned by the leader's main and used from its thread.

    sequence: number of the last frame.
    """

    def __init__(self, place: GroupPlace) -> None:
        self._place = place
        self._plans: list[Plan] = []
        self._encoder = FrameEncoder()
        self._decode = msgspec.msgpack.Decoder(Checksum).decode
        self._followers: list[socket.socket] = []
        self._input: list[bytearray] = []
        self._answers: list[Checksum] = []
        self.sequence = 0
        self._listener = open_listener(place)

    def accept(self) -> None:
        """Wait for all followers. Raises StartError after a time limit."""
        self._followers = self._listener.gather()
        self._input = [bytearray() for _ in self._followers]

    def add(self, plan: Plan) -> None:
        """Add a plan to the next frame."""
        self._plans.append(plan)

    def publish(self, plan: Plan) -> list[Tensor]:
        """Send the pending plans and this one. Raises GroupEnded if a follower is gone.

        Returns the device tensors in them, which the caller must broadcast in this order.
        """
        self._plans.append(plan)
        self.sequence += 1
        data = self._encoder.encode(Frame(self.sequence, self._plans))
        self._plans = []
        frame = _LENGTH.pack(len(data)) + data
        for index, follower in enumerate(self._followers, start=1):
            try:
                follower.sendall(frame)
            except OSError as error:
                raise self._lost(index, str(error)) from error
        return self._encoder.shared

    def answers(self, node: str) -> list[Checksum]:
        """Return the checksums of a node that have arrived. Raises GroupEnded if a follower is gone."""
        for index, (follower, held) in enumerate(zip(self._followers, self._input, strict=True), start=1):
            while select.select([follower], [], [], 0)[0]:
                try:
                    data = follower.recv(1 << 16)
                except OSError as error:
                    raise self._lost(index, str(error)) from error
                if not data:
                    raise self._lost(index, "it closed its connection")
                held += data
            self._answers += [self._decode(each) for each in _frames(held)]
        found = [each for each in self._answers if each.node == node]
        self._answers = [each for each in self._answers if each.node != node]
        return found

    def failed(self, why: str) -> GroupEnded:
        """Return the end of the group with this cause."""
        ranks = ", ".join(map(str, self._place.ranks))
        return GroupEnded(WorkerLost(f"the tensor-parallel group of ranks {ranks} ended", why, rank=self._place.rank))

    def close(self) -> None:
        """Close the sockets. Safe to call twice."""
        for each in self._followers:
            each.close()
        self._listener.close()

    def _lost(self, index: int, why: str) -> GroupEnded:
        return self.failed(f"{self._place.member(index)} is lost: {why}")


class PlanReceiver(Closing):
    """A follower's end. Owned by the follower's main."""

    def __init__(self, place: GroupPlace) -> None:
        """Connect to the leader. Raises StartError after a time limit."""
        self._place = place
        self._decoder = FrameDecoder()
        self._encode = msgspec.msgpack.Encoder().encode
        self._held = bytearray()
        self._frames: deque[bytes] = deque()
        self.sequence = 0
        self._socket = connect(place)

    def receive(self, timeout_s: float) -> Frame | None:
        """Return the next frame, None after the time. Raises GroupEnded if the leader is gone or skipped a frame."""
        if not self._frames:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            try:
                data = self._socket.recv(1 << 20)
            except OSError as error:
                raise self.failed(f"the leader is lost: {error}") from error
            if not data:
                raise self.failed("the leader closed its connection")
            self._held += data
            self._frames += _frames(self._held)
            if not self._frames:
                return None
        frame = self._decoder.decode(self._frames.popleft())
        if frame.sequence != self.sequence + 1:
            raise self.failed(f"frame {frame.sequence} follows frame {self.sequence}")
        self.sequence = frame.sequence
        return frame

    @property
    def shared(self) -> list[Tensor]:
        """Device tensors of the last frame, to be filled by broadcasts in this order before its plans run."""
        return self._decoder.shared

    def answer(self, checksum: Checksum) -> None:
        """Send a checksum to the leader. Raises GroupEnded if it is gone."""
        data = self._encode(checksum)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise self.failed(f"the leader is lost: {error}") from error

    def failed(self, why: str) -> GroupEnded:
        """Return the end of the group with this cause."""
        ranks = ", ".join(map(str, self._place.ranks))
        return GroupEnded(
            WorkerLost(
                f"rank {self._place.rank} left the tensor-parallel group of ranks {ranks}", why, rank=self._place.rank
            )
        )

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        self._socket.close()


def _frames(held: bytearray) -> list[bytes]:
    """Take the complete frames off the received bytes."""
    found: list[bytes] = []
    while len(held) >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(held)
        if len(held) < _LENGTH.size + size:
            break
        found.append(bytes(held[_LENGTH.size : _LENGTH.size + size]))
        del held[: _LENGTH.size + size]
    return found
