"""Two hosts on this machine: namespaces with their own network, host name and shared memory, joined by a link."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.hosts.link import enter

ROOT: Final = Path(__file__).resolve().parents[2]
ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
NAMES: Final = ("host-a", "host-b")
PORT: Final = 6379

_PREPARE: Final = """
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
hostname "$1"
exec sleep infinity
"""


class Machine(NamedTuple):
    """A host. keeper: process whose namespaces it is. folder: of its files."""

    name: str
    address: str
    keeper: int
    folder: Path

    def words(self, *words: str) -> list[str]:
        """Return the command that runs `words` on this host."""
        return [*self.inside, *words]

    def environment(self) -> dict[str, str]:
        """Return the environment of a program on this host, with its own run and cache directories."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MSTAR_", "XDG_"))}
        self.runs.mkdir(mode=0o700, exist_ok=True)
        variables = {"MSTAR_RUNTIME_DIR": str(self.runs), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        return {**kept, **variables}

    @property
    def runs(self) -> Path:
        """Folder of the run directories of this host."""
        return self.folder / "run"

    @property
    def inside(self) -> tuple[str, ...]:
        """Words before a command that runs it on this host."""
        return ("nsenter", "-t", str(self.keeper), "-n", "-u", "-m", "-i")

    def enter_network(self) -> None:
        """Open the sockets of this thread on this host from now on."""
        enter(self.keeper)

    def run(self, *words: str, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end and return what it wrote. Raises CalledProcessError."""
        return subprocess.run(
            self.words(*words), env=self.environment(), cwd=ROOT, text=True, timeout=timeout, check=True, **options
        )

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a program."""
        return subprocess.Popen(self.words(*words), env=self.environment(), cwd=ROOT, **options)


class Link:
    """The cable between two machines, a process of its own. Owned by `machines`."""

    def __init__(self, first: int, second: int, delay_ms: float, loss: float) -> None:
        options = ["--delay-ms", str(delay_ms), "--loss", str(loss)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.hosts.link", str(first), str(second), *options],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._answer("ready")

    def cut(self) -> None:
        """Lose all frames from now on."""
        self._tell("down")

    def mend(self) -> None:
        """Carry frames again."""
        self._tell("up")

    def close(self) -> None:
        """End the link."""
        self._process.communicate()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        self._answer(word)

    def _answer(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != word:
            raise RuntimeError(f"the link answered {line!r} instead of {word!r}")


@contextmanager
def machines(folder: Path, *, delay_ms: float, loss: float) -> Iterator[tuple[Machine, Machine, Link]]:
    """Make two hosts and a link between them. Needs root and /dev/net/tun."""
    with ExitStack() as stack:
        made = [
            stack.enter_context(_machine(folder / name, name, address))
            for name, address in zip(NAMES, ADDRESSES, strict=True)
        ]
        link = Link(made[0].keeper, made[1].keeper, delay_ms, loss)
        stack.callback(link.close)
        for machine in made:
            _set_up(machine, "tap0", machine.address)
        yield made[0], made[1], link


@contextmanager
def neighbours(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Make two hosts that share everything but their address and files: the cost of a second host without a network."""
    with _machine(folder / NAMES[0], NAMES[0], ADDRESSES[0]) as first:
        second = first._replace(address=ADDRESSES[1], folder=folder / NAMES[1])
        second.folder.mkdir()
        _set_up(first, "lo", *ADDRESSES)
        yield first, second


def _set_up(machine: Machine, device: str, *addresses: str) -> None:
    for address in addresses:
        machine.run("ip", "addr", "add", f"{address}/24", "dev", device)
    for name in {device, "lo"}:
        machine.run("ip", "link", "set", name, "up")


@contextmanager
def _machine(folder: Path, name: str, address: str) -> Iterator[Machine]:
    folder.mkdir(parents=True)
    words = ["unshare", "-n", "-u", "-m", "-i", "sh", "-c", _PREPARE, "sh", name]
    # A session of its own, so that Ctrl-C ends this program first, which stops what runs in the namespaces.
    keeper = subprocess.Popen(words, start_new_session=True)
    try:
        end = time.monotonic() + 10
        while Path(f"/proc/{keeper.pid}/comm").read_text().strip() != "sleep":
            if keeper.poll() is not None or time.monotonic() > end:
                raise RuntimeError("this user or kernel cannot make namespaces")
            time.sleep(0.01)
        yield Machine(name, address, keeper.pid, folder)
    finally:
        keeper.kill()
        keeper.wait()


class RayNode:
    """Ray on one host, as `ray start` makes it. Owned by `ray_cluster`."""

    def __init__(self, machine: Machine, head: str = "", gpus: str | None = None) -> None:
        """head: its address, empty for the head itself. gpus: as CUDA_VISIBLE_DEVICES; None leaves all to Ray."""
        self.machine = machine
        variables = [] if gpus is None else ["env", f"CUDA_VISIBLE_DEVICES={gpus}"]
        self.folder = machine.folder / "ray"
        place = [f"--address={head}"] if head else ["--head", f"--port={PORT}", "--include-dashboard=false"]
        self._words = [
            *(*variables, sys.executable, "-m", "ray.scripts.scripts", "start", *place),
            f"--node-ip-address={machine.address}",
            *(f"--temp-dir={self.folder}", "--object-store-memory=80000000", "--num-cpus=4", "--disable-usage-stats"),
        ]

    def start(self) -> None:
        """Start the node, again after `kill`. Raises RuntimeError with the words of Ray."""
        try:
            self.machine.run(*self._words, capture_output=True)
        except subprocess.CalledProcessError as error:
            self.kill()
            raise RuntimeError(f"Ray did not start: {error.stdout}{error.stderr}") from None

    def kill(self, program: str = "") -> None:
        """Kill the processes of the node that run a program, such as `raylet/raylet`; all without a name."""
        for pid in self.pids(program):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self, program: str = "") -> list[int]:
        """Return the processes of the node: their command lines name its folder."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
                if str(self.folder) in line and program in line.partition("\0")[0]:
                    found.append(int(entry.name))
        return found


@contextmanager
def ray_cluster(
    first: Machine, second: Machine, gpus: Sequence[str | None] = (None, None)
) -> Iterator[tuple[RayNode, RayNode]]:
    """Run a head of Ray on the first host, and a node on the second. gpus: of each, as CUDA_VISIBLE_DEVICES."""
    nodes = RayNode(first, gpus=gpus[0]), RayNode(second, f"{first.address}:{PORT}", gpus[1])
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.kill()
