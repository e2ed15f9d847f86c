"""Run what is printed: the tour of README.md, the `try:` lines and samples of every miniature, and all examples.

Commands come from the text that a reader sees: the blocks of README.md, the output of `mstarctl up` and
`mstarctl sample`, and the first lines of each example. A port and the CPU are all that is added. Each deployment has a
directory of its own, and two run at a time. Exits with 1 if a command fails. `--only NAME` runs one deployment.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import demo

EXAMPLES: Final = demo.ROOT / "examples"
MINIATURES: Final = ("qwen3_omni:mini", "bagel:mini", "orpheus:mini", "pi05:mini", "vjepa2_ac:mini", "llm:mini")
README: Final = "README"
SECTION: Final = "## A tour in five minutes"
FENCE: Final = re.compile(r"^```\n(.*?)^```", re.DOTALL | re.MULTILINE)
TRY: Final = re.compile(r"^ +try: +(mstarctl .+)$", re.MULTILINE)
UP: Final = re.compile(r"^(?:// )?mstarctl up (\S+)", re.MULTILINE)
RUN: Final = re.compile(r"^(?:// )?((?:python|node) examples/\S+ .+)$", re.MULTILINE)
ADDRESS: Final = "localhost:8000"
LIMIT_S: Final = 240
REFUSED: Final = '"voice":"unknown"'
"""Part of the command whose error the README shows on purpose."""

SKIPPED: Final = ("mstarctl doctor", "mstarctl up", "mstarctl down")
"""Commands of the README that are about this host, or that run apart, at the start and end of the tour."""


class TourFailed(Exception):
    """A command failed, or left out what it says that it wrote."""


@dataclass(slots=True)
class Stop:
    """One deployment of the tour: its directory, its port, and the commands that ran. Owned by `visited`."""

    name: str
    home: Path
    port: int = field(default_factory=demo.free_port)
    log: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        runtime = {"MSTAR_RUNTIME_DIR": str(self.home), "XDG_STATE_HOME": str(self.home / "state")}
        return {**os.environ, **runtime, "PATH": path, "OMP_NUM_THREADS": "1"}

    @property
    def folder(self) -> Path:
        """Working directory of the commands, with the example files beside it."""
        return self.home / "work"

    def run(self, line: str) -> tuple[str, str]:
        """Run one printed line in a shell. Returns stdout and stderr. Raises TourFailed."""
        begun = time.monotonic()
        typed = line.replace(ADDRESS, f"127.0.0.1:{self.port}")
        try:
            done = subprocess.run(
                ["bash", "-c", typed],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TourFailed(f"{line}\n  no end after {LIMIT_S} s") from error
        self.log.append(f"{time.monotonic() - begun:6.1f} s  {line}")
        if done.returncode:
            raise TourFailed(f"{line}\n  exit {done.returncode}\n{done.stdout}{done.stderr}")
        for name in written(line, done.stdout):
            path = self.folder / name
            if not path.is_file() or not path.stat().st_size:
                raise TourFailed(f"{line}\n  says that it wrote {name}, which is missing or empty")
        if line.startswith("curl") and '"error"' in done.stdout and REFUSED not in line:
            raise TourFailed(f"{line}\n{done.stdout}")
        return done.stdout, done.stderr

    def start(self, model: str, options: str = "-d") -> str:
        """Start a deployment on the CPU. Returns what `up` said."""
        return self.run(f"mstarctl up {model} {options} --device cpu --host 127.0.0.1 --port {self.port}")[1]


def written(line: str, stdout: str) -> list[str]:
    """Return the files that a command names: those that `mstarctl call` prints, and the one of `curl -o`."""
    if line.startswith("mstarctl call"):
        return stdout.splitlines() if "--out" in line else []
    return re.findall(r" -o (\S+)", line) if line.startswith("curl") else []


def readme_commands() -> list[str]:
    """Return the mstarctl and curl commands of the README's tour, continued lines joined."""
    text = (demo.ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition(f"{SECTION}\n")[2].partition("\n## ")[0]
    lines = [line for block in FENCE.findall(section) for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith(("mstarctl ", "curl "))]


def examples() -> Iterator[tuple[str, Path, str]]:
    """Yield the model, the file and the command of each example, as its first lines state them.

    Optional words, in brackets, are left out. Raises TourFailed for an example that states neither.
    """
    for path in sorted(EXAMPLES.iterdir()):
        if path.suffix not in (".py", ".mjs"):
            continue
        text = path.read_text(encoding="utf-8")
        up, line = UP.search(text), RUN.search(text)
        if up is None or line is None:
            raise TourFailed(f"{path.name} does not state `mstarctl up MODEL` and its own command")
        command = re.sub(r"\[ws://HOST:PORT\]", f"ws://{ADDRESS}", line[1].replace("[URL]", f"http://{ADDRESS}"))
        yield up[1], path, re.sub(r" \[[^\]]*\]", "", command)


def walk_readme(stop: Stop) -> None:
    """Run the tour of the README."""
    (stop.folder / "configs").symlink_to(demo.ROOT / "configs")
    commands = readme_commands()
    model, options = commands[[line.startswith("mstarctl up") for line in commands].index(True)].split(maxsplit=3)[2:]
    stop.start(model, options)
    for line in commands:
        if not line.startswith(SKIPPED):
            stop.run(line)
    stop.run(next(line for line in commands if line.startswith("mstarctl down")))


def walk_model(stop: Stop) -> None:
    """Start a model, run the line that `up` suggests, every printed sample, and the examples that name the model."""
    said = stop.start(stop.name)
    suggested = TRY.search(said)
    if suggested is None:
        raise TourFailed(f"mstarctl up {stop.name} suggests no call\n{said}")
    stop.run(suggested[1])
    model = stop.name.partition(":")[0]
    printed, _ = stop.run(f"mstarctl sample {model} --out .")
    for line in printed.splitlines():
        stop.run(line)
    for wanted, path, command in examples():
        if wanted == stop.name and can_run(path):
            stop.run(command)


def can_run(path: Path) -> bool:
    """Whether the program of an example is installed: node with the package openai is optional."""
    if path.suffix == ".py":
        return True
    return shutil.which("node") is not None and (node_modules() / "openai").is_dir()


def node_modules() -> Path:
    """Return the folder of JavaScript packages for the examples, which may be missing."""
    return Path(os.environ.get("MSTAR_NODE_MODULES", demo.ROOT / "build" / "node" / "node_modules"))


def visited(name: str) -> tuple[Stop, str]:
    """Run one stop of the tour and end its deployment. Returns it with what failed, empty if nothing did."""
    home = Path(tempfile.mkdtemp(prefix="mstar-tour-", dir=demo.short_root()))
    stop = Stop(name=name, home=home)
    stop.folder.mkdir()
    shutil.copytree(EXAMPLES, stop.folder / "examples")
    if node_modules().is_dir():
        (stop.folder / "node_modules").symlink_to(node_modules())
    problem = ""
    try:
        (walk_readme if name == README else walk_model)(stop)
    except TourFailed as failed:
        problem = str(failed)
    finally:
        command = [*demo.tool(), "down", "--all", "--now"]
        subprocess.run(command, env=stop.environment, capture_output=True, timeout=demo.STOP_S, check=False)
        shutil.rmtree(home, ignore_errors=True)
    return stop, problem


def stops() -> tuple[str, ...]:
    """Return the names of all stops: the README, the miniatures, and other models that an example names."""
    named = (model for model, _, _ in examples())
    return tuple(dict.fromkeys((*MINIATURES, README, *named)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", choices=stops(), help=f"one of {', '.join(stops())}")
    chosen = parser.parse_args().only
    begun, failed = time.monotonic(), 0
    with ThreadPoolExecutor(2) as pool:
        for stop, problem in pool.map(visited, stops() if chosen is None else (chosen,)):
            print(f"{stop.name}", *stop.log, sep="\n", flush=True)
            if problem:
                failed += 1
                print(f"FAILED   {problem}", flush=True)
    print(f"{failed or 'no'} failed, {time.monotonic() - begun:.0f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
