"""Functions that a model may call in a conversation: their declarations, and the program that computes results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.errors import ConfigError

LIMIT_S: Final = 60.0
"""Longest run of the program for one call."""

ERROR_CHARS: Final = 200
KEPT: Final = ("name", "description", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledFunction:
    """One call. arguments: JSON, as the model wrote it."""

    call_id: str
    name: str
    arguments: str

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> CalledFunction:
        """Return the call of an output item."""
        return cls(call_id=item["call_id"], name=item["name"], arguments=item["arguments"])

    def result(self, output: str) -> dict[str, Any]:
        """Return the item with its result."""
        return {"type": "function_call_output", "call_id": self.call_id, "output": output}


def realtime_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return functions of a file of `mstarctl chat` in the form of a session."""
    functions = [tool.get("function", tool) for tool in tools]
    return [{"type": "function", **{key: one[key] for key in KEPT if key in one}} for one in functions]


async def computed(command: Sequence[str], call: CalledFunction) -> str:
    """Run a program with the name of the function as its last argument, and the arguments as JSON on stdin.

    Returns its stdout; of a program that fails, a JSON object with `error`. Raises ConfigError if it cannot be started.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, call.name, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"{command[0]} cannot be started", why, "--run takes a program", key="run") from error
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate(call.arguments.encode())
    except TimeoutError:
        return json.dumps({"error": f"{call.name} took longer than {LIMIT_S:g} s"})
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = err.decode(errors="replace").strip().splitlines()
        return json.dumps({"error": said[-1][:ERROR_CHARS] if said else f"exit {process.returncode}"})
    return out.decode(errors="replace").strip()
