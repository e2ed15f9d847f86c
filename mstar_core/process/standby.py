"""Standby process: imports ahead what a child needs, then waits until it takes the place of a child that died.

`python -m mstar_core.process.entry SUPERVISOR_PID mstar_core.process.standby SPEC PRELOAD`. PRELOAD, `module:function`,
is called with the deployment spec; it must open no device and no socket. Standard input is a socket of the supervisor:
`Preloaded` goes out once, an `Identity` comes in, `Taken` answers it, and the process runs the module of the identity.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.process.logs import start_logging
from mstar_core.process.system import keep_start
from mstar_core.targets import load_target

NAME: Final = "standby"
LINE_BYTES: Final = 64 * 1024


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The child to become. module, arguments: as on a command line."""

    module: str
    arguments: tuple[str, ...]


class Preloaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The standby process has imported everything. modules: their number."""

    modules: int


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process becomes the child."""


Answer = Preloaded | Taken


def encode(message: Identity | Answer) -> bytes:
    """Encode a message as one line."""
    return msgspec.json.encode(message) + b"\n"


def main() -> None:
    """Import, wait and become a child. The end of the supervisor's socket ends the process."""
    spec, preload = DeploymentSpec.load(Path(sys.argv[1])), sys.argv[2]
    start_logging(NAME, spec.log_level, secrets=spec.api.secrets)
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as supervisor:
        load_target(preload)(spec)
        keep_start()  # later collections pass over the imported modules
        supervisor.sendall(encode(Preloaded(modules=len(sys.modules))))
        with supervisor.makefile("rb") as lines:
            line = lines.readline(LINE_BYTES)
        if not line:
            return
        identity = msgspec.json.decode(line, type=Identity)
        close_input()
        supervisor.sendall(encode(Taken()))
    sys.argv = [identity.module, *identity.arguments]
    runpy.run_module(identity.module, run_name="__main__", alter_sys=True)


def close_input() -> None:
    """Replace standard input by the empty file, which other children have from their start."""
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, sys.stdin.fileno())
    os.close(empty)


if __name__ == "__main__":
    main()
