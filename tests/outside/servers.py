"""Miniatures that the outside programs speak to, started by the command line as an operator starts them."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.outside.environment import FOLDER, ROOT

EMBEDDING = "llm (embedding)"
"""A checkpoint of `llm:tiny` in the layout of embedding models."""


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
        """Return the address of a deployment of `model`, such as `orpheus:mini`, that answers to every model name.

        model: may be EMBEDDING too.
        """
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
        name, port = "outside-" + re.sub("[^a-z0-9]+", "-", model).strip("-"), _free_port()
        print(f"starting {model}", file=sys.stderr)
        options = ("--device", "cpu", "--port", str(port), "--name", name, "--alias", "*", "--detach")
        weights = ("llm", "--weights", str(embedding_folder())) if model == EMBEDDING else (model,)
        self.command("up", *weights, *options, check=True)
        self._ports[model], self._names[model] = port, name


def tiny_folder() -> Path:
    """Return a folder with the checkpoint `llm:tiny`."""
    code = "import sys, pathlib; from mstar_llm.sources.tiny import write_tiny; write_tiny(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(FOLDER / "tiny")], cwd=ROOT, check=True)
    return FOLDER / "tiny"


def embedding_folder() -> Path:
    """Return a folder with the weights of `llm:tiny` as an embedding model."""
    folder = shutil.copytree(tiny_folder(), FOLDER / "embedding", dirs_exist_ok=True)
    (folder / "modules.json").write_text("[]\n")
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
