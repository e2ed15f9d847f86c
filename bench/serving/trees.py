"""Alternating measurement of two source trees by one script: one process each, idle while the other is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.serving.figures import ROOT


class Tree:
    """Process that imports the packages of one source tree, and missing ones from this tree.

    It runs `script --serve` with the arguments of this command line and its name in BENCH_TREE. It prints `{}` when it
    is ready, and then one JSON object for each line of its standard input.
    """

    def __init__(self, name: str, folder: Path, script: str) -> None:
        self.name = name
        command = [sys.executable, str(Path(script).resolve()), "--serve", *sys.argv[1:]]
        own = [folder.resolve(), *sorted(folder.resolve().glob("plugins/*/src")), ROOT]
        others = filter(None, [os.environ.get("PYTHONPATH")])  # libraries may come from there
        env = {**os.environ, "BENCH_TREE": name, "PYTHONPATH": os.pathsep.join([*map(str, own), *others])}
        self._process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def window(self, word: str) -> dict[str, Any]:
        """Run one measurement, selected by `word`."""
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)
        found = self._answer()
        print(self.name, found, file=sys.stderr, flush=True)
        return {"tree": self.name, **found}

    def close(self) -> None:
        """End the process."""
        self._process.communicate("")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found
