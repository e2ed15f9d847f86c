"""Miniatures that the outside programs speak to, started by the command line as an operator starts them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Servers:
    """Running deployments by model name. Each is started at first use and ends with the context."""

    def __init__(self) -> None:
        self._runtime = ""
        self._ports: dict[str, int] = {}
        self._names: dict[str, str] = {}

    def __enter__(self) -> Servers:
        self._runtime = tempfile.mkdtemp(prefix="mstar-outside-")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names.values():
            self.command("down", name)
        shutil.rmtree(self._runtime, ignore_errors=True)

    def url(self, model: str) -> str:
        """Return the address of a deployment of `model`, such as `orpheus:mini`, that answers to every model name."""
        if model not in self._ports:
            self._start(model)
        return f"http://127.0.0.1:{self._ports[model]}"

    def name(self, model: str) -> str:
        """Return the name of the deployment of a model."""
        self.url(model)
        return self._names[model]

    def command(self, *arguments: str, check: bool = False) -> str:
        """Run `mstarctl` with these arguments and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "mstarctl", *arguments],
            cwd=ROOT,
            env={**os.environ, "MSTAR_RUNTIME_DIR": self._runtime},
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"mstarctl {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def _start(self, model: str) -> None:
        name, port = "outside-" + model.replace(":", "-").replace("_", "-"), _free_port()
        print(f"starting {model}", file=sys.stderr)
        options = ("--device", "cpu", "--port", str(port), "--name", name, "--alias", "*", "--detach")
        self.command("up", model, *options, check=True)
        self._ports[model], self._names[model] = port, name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
