"""Calls of the program that speaks to Ray: their records, and the subprocess that runs each of them.

`survey` and `RayPlacer` make them. Neither mstarctl nor a supervisor imports Ray, and no idle driver of Ray exists.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from typing import Final, TypeVar

import msgspec

from mstar_core.cluster.facts_program import HostQuery
from mstar_core.cluster.owner import Owner
from mstar_core.cluster.placer import AgentOrder, Bundle, StartedAgent
from mstar_core.errors import ConfigError, MstarError, StartError, Unreachable

MODULE: Final = "mstar_core.cluster.ray_program"
CALL_S: Final = 240.0
"""Longest call. Each wait inside the program is bounded by less; this ends a program that hangs in Ray."""

KINDS: Final[dict[str, type[MstarError]]] = {kind.__name__: kind for kind in (ConfigError, StartError, Unreachable)}

T = TypeVar("T")


class SurveyCall(msgspec.Struct, frozen=True, kw_only=True, tag="survey"):
    """Ask every host of the cluster at `address` for its facts. The answer is a ClusterView."""

    address: str
    query: HostQuery


class StartCall(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Reserve room in each bundle and start agents. The answer is a list of StartedAgent."""

    address: str
    owner: Owner
    bundles: tuple[Bundle, ...]
    order: AgentOrder


class ReplaceCall(msgspec.Struct, frozen=True, kw_only=True, tag="replace"):
    """Start another agent for a bundle, on its host or on another one. The answer is a NextAgent.

    wait_s: time that no more than one call waits for room; the reservation stays in Ray's queue between calls.
    """

    address: str
    owner: Owner
    bundle: Bundle
    order: AgentOrder
    wait_s: float


class ReleaseCall(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Give back the room of these hosts of a deployment, of all if there are no names.

    The program does it at the end of its standard input, so that it can import Ray and connect before the time.
    """

    address: str
    owner: Owner
    deployment: str
    hosts: tuple[str, ...] = ()


Call = SurveyCall | StartCall | ReplaceCall | ReleaseCall


class NextAgent(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a ReplaceCall: an agent, or why there is none yet."""

    agent: StartedAgent | None = None
    waits_for: str = ""


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A failed call. kind: name of a class of KINDS."""

    kind: str
    title: str
    detail: str = ""
    hint: str = ""


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of the program: the result as JSON, or an error."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    error: ErrorRecord | None = None


def run(call: Call, result: type[T]) -> T:
    """Make a call and return its result. Raises ConfigError, StartError or Unreachable."""
    command = _command()
    try:
        done = subprocess.run(command, input=msgspec.json.encode(call), capture_output=True, timeout=CALL_S)
    except subprocess.TimeoutExpired:
        raise _too_long(call) from None
    return _result(done.returncode, done.stdout, done.stderr, result)


async def call_ray(call: Call, result: type[T], *, when: asyncio.Event | None = None) -> T:
    """Make a call on an event loop. A cancelled call ends its program. when: ends the input. Raises as `run`."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*_command(), stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(CALL_S):
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(call) + b"\n")
            if when is not None:
                await when.wait()
            output, errors = await process.communicate(b"")
    except TimeoutError:
        raise _too_long(call) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _result(process.returncode or 0, output, errors, result)


def _command() -> list[str]:
    """Return the command of the program. Raises ConfigError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            "Ray is not installed", f"the Python of this process is {sys.executable}", "pip install 'mstarctl[ray]'"
        )
    return [sys.executable, "-m", MODULE]


def _result(code: int, output: bytes, errors: bytes, result: type[T]) -> T:
    try:
        answer = msgspec.json.decode(output, type=CallAnswer)
    except msgspec.DecodeError:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise StartError(
            "the call of Ray failed",
            f"it ended with status {code}: {' / '.join(lines[-3:]) or 'no message'}",
            "mstarctl doctor --ray ADDRESS",
            phase="hosts",
        ) from None
    if answer.error is not None:
        error = answer.error
        raise KINDS.get(error.kind, StartError)(error.title, error.detail, error.hint, phase="hosts")
    return msgspec.json.decode(answer.result, type=result)


def _too_long(call: Call) -> Unreachable:
    return Unreachable(
        f"Ray at {call.address} does not answer", f"{CALL_S:.0f} s have passed", f"ray status --address {call.address}"
    )
