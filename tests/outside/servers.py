"""Miniatures that the outside programs speak to, started by the command line as an operator starts them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal
from urllib.request import urlopen

from tests.outside.environment import FOLDER, ROOT

EMBEDDING = "llm (embedding)"
"""A checkpoint of `llm:tiny` in the layout of embedding models."""


Named = Literal["", "name", "path"]
"""Place where a program's requests name their model to a gateway: none, the field `model`, or the path."""

SEEN_S = 60.0
"""Time in which a gateway finds a deployment that is ready."""


class Servers:
    """Running deployments by model name. Each is started at first use and ends with the context.

    has_gateway: whether one gateway stands in front of all of them.
    """

    def __init__(self, has_gateway: bool = False) -> None:
        self.has_gateway = has_gateway
        self._gateway = ""
        self._runtime = ""
        self._ports: dict[str, int] = {}
        self._names: dict[str, str] = {}

    def __enter__(self) -> Servers:
        self._runtime = tempfile.mkdtemp(prefix="mstar-outside-")
        if self.has_gateway:
            port = _free_port()
            self.command("serve", "--detach", "--port", str(port), check=True)
            self._gateway = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names.values():
            self.command("down", name)
        if self._gateway:
            self.command("serve", "down")
        shutil.rmtree(self._runtime, ignore_errors=True)

    def url(self, model: str, named: Named = "") -> str:
        """Return the address of a deployment of `model`, such as `orpheus:mini`, that answers to every model name.

        model: may be EMBEDDING too. named: how the requests name it to a gateway, if there is one.
        """
        if model not in self._ports:
            self._start(model)
        if not self._gateway:
            return f"http://127.0.0.1:{self._ports[model]}"
        return self._gateway + (f"/m/{self._names[model]}" if named == "path" else "")

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
        if self._gateway:
            self._wait_seen(name)

    def _wait_seen(self, name: str) -> None:
        """Wait until the gateway serves the deployment. Raises TimeoutError."""
        end = time.monotonic() + SEEN_S
        while time.monotonic() < end:
            with urlopen(f"{self._gateway}/v1/models") as answer:
                if name in {card["id"] for card in json.load(answer)["data"]}:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"the gateway has not found {name} in {SEEN_S:.0f} s")


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
