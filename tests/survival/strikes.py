"""Strikes: SIGKILL of a process, or a wait, when a process of the deployment sends a chosen message.

The test writes strikes into the runtime folder of its deployment. `install` runs in each child and looks for the first
strike that is left whenever a message is sent. With `record`, children write down the messages that they send, so that
a sweep can strike at each of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final, Literal

import msgspec

from mstar_core.messages.flow import Outputs
from mstar_core.messages.requests import NewRequest
from mstar_core.messages.wire import Message
from mstar_core.messages.work import RunWalks
from mstar_core.transport.courier import Courier

FOLDER: Final = "strikes"
DELIVERY_S: Final = 0.03
"""Time in which ZMQ's thread delivers a message that was sent before its sender dies."""

TURN_S: Final = 0.01

Side = Literal["before", "after"]


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One kill. victim: name of the process that dies when `sender` sends the message; empty: none dies, and the
    sender waits until the test releases it. Messages that it has sent before arrive.

    message: name of its class. part: a walk of RunWalks, or a port of Outputs; empty for any. count: the how manieth
    matching message since the strike became the first, for Outputs the how manieth output. side: whether the victim
    dies before or after the message is sent. delay_s: further wait before the kill. attempt: that of a NewRequest, 0
    for any; the request that a new api sends for a dead one is its first.
    """

    sender: str
    message: str
    victim: str = ""
    part: str = ""
    count: int = 1
    side: Side = "after"
    delay_s: float = 0.0
    attempt: int = 0


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a child has sent, in the words of `Strike`. parts: walks or ports, one for each output."""

    sender: str
    message: str
    parts: list[str]


class Strikes:
    """The strikes of one deployment, as its test sees them. root: the runtime folder of the deployment."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._armed = 0

    def arm(self, *strikes: Strike) -> None:
        """Replace all strikes. They fall one after the other."""
        self.release()
        for path in self._folder.glob("*.json"):
            path.unlink(missing_ok=True)
        numbered = list(enumerate(strikes, start=self._armed))
        self._armed += len(strikes)
        for number, strike in reversed(numbered):  # a name is never used again: children count for each anew
            partial = self._folder / f"{number:08}.part"
            partial.write_bytes(msgspec.json.encode(strike))
            partial.rename(partial.with_suffix(".json"))

    @property
    def left(self) -> int:
        """Number of strikes that have not fallen."""
        return len(list(self._folder.glob("*.json")))

    @property
    def holds(self) -> bool:
        """Whether a process waits at the message of a strike without a victim."""
        return any(self._folder.glob("*.held"))

    def release(self) -> None:
        """Let that process go on."""
        for path in self._folder.glob("*.held"):
            path.unlink(missing_ok=True)

    def record(self) -> None:
        """Let the children write down what they send."""
        for path in self._folder.glob("*.sent"):
            path.unlink(missing_ok=True)
        (self._folder / "record").touch()

    def recorded(self) -> list[Sent]:
        """End the recording, and return what was sent, in order for each sender."""
        (self._folder / "record").unlink(missing_ok=True)
        lines = [line for path in sorted(self._folder.glob("*.sent")) for line in path.read_bytes().splitlines()]
        return [msgspec.json.decode(line, type=Sent) for line in lines]


def parts_of(message: Message) -> list[str]:
    """Return the walks of RunWalks, or the ports of Outputs, one for each output."""
    match message:
        case RunWalks():
            return [run.walk for run in message.runs]
        case Outputs():
            return [item.port for item in message.items]
    return []


def attempt_of(message: NewRequest) -> int:
    """Return the number of a request's attempt, 1 for the first."""
    return message.resume.attempt if message.resume is not None else 1


class _Child:
    """The strikes as one child sees them."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._path = Path()
        self._seen = 0
        (folder / f"{name}.pid").write_text(str(os.getpid()))

    def next(self) -> tuple[Path, Strike] | None:
        """Return the first strike that is left. Counting begins anew with each."""
        paths = sorted(self._folder.glob("*.json"))
        if not paths:
            return None
        if paths[0] != self._path:
            self._path, self._seen = paths[0], 0
        with contextlib.suppress(FileNotFoundError):
            return paths[0], msgspec.json.decode(paths[0].read_bytes(), type=Strike)
        return None

    def meets(self, strike: Strike, message: Message) -> bool:
        """Count a message, and return whether it is the one of the strike."""
        if strike.sender != self._name or strike.message != type(message).__name__:
            return False
        if isinstance(message, NewRequest) and strike.attempt not in (0, attempt_of(message)):
            return False
        parts = parts_of(message)
        before = self._seen
        if isinstance(message, Outputs):
            self._seen += sum(not strike.part or part == strike.part for part in parts)
        else:
            self._seen += not strike.part or strike.part in parts
        return before < strike.count <= self._seen

    def fall(self, path: Path, strike: Strike) -> None:
        """Kill the victim, or wait. The strike is over first, since the victim may be this process."""
        with contextlib.suppress(FileNotFoundError):
            if not strike.victim:
                held = path.rename(path.with_suffix(".held"))
                while held.exists():
                    time.sleep(TURN_S)
                return
            path.unlink()
            victim = int((self._folder / f"{strike.victim}.pid").read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

    def note(self, message: Message) -> None:
        """Write down a message if a recording is on."""
        if (self._folder / "record").exists():
            sent = Sent(sender=self._name, message=type(message).__name__, parts=parts_of(message))
            with (self._folder / f"{self._name}.sent").open("ab") as file:
                file.write(msgspec.json.encode(sent) + b"\n")


def install() -> None:
    """Let every Courier of this process look for strikes. Its runtime folder names the deployment."""
    folder = Path(os.environ["MSTAR_RUNTIME_DIR"]) / FOLDER
    if not folder.is_dir():
        return
    original, children = Courier.send, dict[tuple[int, str], _Child]()

    def send(self: Courier, name: str, message: Message) -> bool:
        # The name too: that of a standby's courier, which is gone, may be at the address of its successor's.
        key = id(self), self._encode.__self__.sender  # type: ignore[attr-defined]
        child = children.get(key)
        if child is None:
            child = children[key] = _Child(folder, key[1])
        child.note(message)
        found = child.next()
        if found is None or not child.meets(found[1], message):
            return original(self, name, message)
        if found[1].side == "before":
            child.fall(*found)
            return original(self, name, message)
        sent = original(self, name, message)
        time.sleep(DELIVERY_S + found[1].delay_s)
        child.fall(*found)
        return sent

    Courier.send = send  # type: ignore[method-assign]  # no process of ours offers this to anyone else
