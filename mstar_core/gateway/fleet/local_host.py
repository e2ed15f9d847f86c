"""Deployments of this host: started by `mstarctl up`, asked by their admin sockets, counted by the memory ledger."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from mstar_core.errors import MstarError, StartError, StateConflict
from mstar_core.gateway.fleet.admin_socket import call
from mstar_core.gateway.fleet.head import DeploymentHead, read_head
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.fleet.plans import KeptPlans, Plan, surveyed
from mstar_core.gateway.fleet.running import Found, read_running
from mstar_core.gateway.parts import Replica
from mstar_core.gateway.serve_file import ModelEntry
from mstar_core.host.gpu_locks import Holder, gpu_holders
from mstar_core.host.hardware.memory import memory_facts
from mstar_core.host.network import LOOPBACK, free_ports
from mstar_core.host.run_dir import RunDirectory

POLL_S: Final = 0.1
PLACED_S: Final = 120.0
"""Longest time from the start of the command until the deployment holds its memory."""

MOVE_S: Final = 300.0
"""Longest sleep or wake."""

END_S: Final = 120.0
"""Longest end of a deployment, its drain included."""

_HEAD: Final = re.compile(r"error: (?P<title>.*?)\s+\[(?P<code>[a-z0-9-]+), exit \d+\]")


class CommandStart:
    """A start by `mstarctl up -d`, which ends once the deployment serves. Owned by the fleet's task."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, old_pid: int | None) -> None:
        self._name = name
        self._process = process
        self._old_pid = old_pid
        self._result = asyncio.ensure_future(process.communicate())

    async def until_placed(self) -> None:
        """Return when the supervisor answers, which is after it has taken its memory. Raises StartError."""
        run = RunDirectory.of(self._name)
        end = time.monotonic() + PLACED_S
        while not self._result.done():
            head = await read_head(run.admin_socket) if run.admin_socket.exists() else None
            if head is not None and head.pid != self._old_pid:
                return
            if time.monotonic() > end:
                title, hint = f"{self._name} did not start", f"mstarctl logs {self._name}"
                raise StartError(title, f"no answer within {PLACED_S:g} s", hint, phase="start")
            await asyncio.wait([self._result], timeout=POLL_S)
        await self.until_ready()

    async def until_ready(self) -> None:
        """Return when the deployment serves. Raises StartError with the cause that the command prints."""
        _, said = await asyncio.shield(self._result)
        if self._process.returncode:
            raise command_error(said.decode("utf-8", "replace"), f"{self._name} did not start")


class LocalHost:
    """The deployments of this host. Owned by the fleet. command: words before `up` and `plan`. plans: of models."""

    def __init__(
        self, command: Sequence[str] = (sys.executable, "-m", "mstarctl"), plans: KeptPlans | None = None
    ) -> None:
        self._command = tuple(command)
        self._plans = plans
        self._found: dict[str, Found] = {}

    @property
    def fault(self) -> None:
        """Return None: this host can be used."""
        return

    async def start(self) -> None:
        """Do nothing: no connection is needed."""

    async def close(self) -> None:
        """Do nothing."""

    async def survey(self, entry: ModelEntry) -> Need:
        """Return the memory of one deployment as `mstarctl plan` counts it, or as it was planned before."""
        return await asyncio.to_thread(self._survey, entry)

    def _survey(self, entry: ModelEntry) -> Need:
        words = start_words(entry)
        need = None if self._plans is None else self._plans.find(entry, words)
        if need is None:
            need = surveyed(entry, lambda budget: self._plan(entry, words, budget))
            if self._plans is not None:
                self._plans.keep(entry, words, need)
        return need

    def _plan(self, entry: ModelEntry, words: Sequence[str], budget: str) -> Plan:
        """Plan in a process of its own. Raises the error that it prints."""
        command = [*self._command, "plan", *words, *(["--memory", budget] if budget else []), "-o", "json"]
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if said.returncode:
            raise command_error(said.stderr.decode("utf-8", "replace"), f"{entry.name} cannot be planned")
        plan: Plan = msgspec.json.decode(said.stdout)["items"][0]
        return plan

    async def launch(
        self, entry: ModelEntry, name: str, need: Need, owner: str, *, is_replacement: bool = False
    ) -> CommandStart:
        """Start a deployment on a free port of the loopback address, detached from the gateway."""
        words = ["up", *start_words(entry), "-d", "--owner", owner]
        words += ["--memory", need.budget] if need.budget else []
        words += [word for alias in (entry.name, *entry.aliases) for word in ("--alias", alias)]
        words += ["--replace", name] if is_replacement else ["--name", name, "--port", str(free_ports(LOOPBACK, 1)[0])]
        old = RunDirectory.of(name).holder() if is_replacement else None
        return CommandStart(name, await _run((*self._command, *words), stdout=asyncio.subprocess.DEVNULL), old)

    async def heads(self, names: Sequence[str]) -> Mapping[str, tuple[Replica, DeploymentHead | None]]:
        """Return those of the deployments that run, with their heads."""
        return {name: (each.replica, each.head) for name, each in (await self.running(names)).items()}

    async def running(self, names: Sequence[str] | None = None) -> Mapping[str, Found]:
        """Return the deployments that run, with their heads. names: only these."""
        self._found = await asyncio.to_thread(read_running, dict(self._found))
        mine = {name: each for name, each in self._found.items() if names is None or name in names}
        heads = await asyncio.gather(*(read_head(each.socket) for each in mine.values()))
        return {name: replace(each, head=head) for (name, each), head in zip(mine.items(), heads, strict=True)}

    async def sleep(self, name: str, level: int) -> None:
        """Let the deployment sleep. Raises StateConflict if requests run on it, MstarError if it cannot sleep."""
        run = RunDirectory.of(name)
        await call(run.admin_socket, "POST", "/v1/deployment/sleep", {"level": level})
        await self._until_state(run, ("sleeping",), f"{name} does not sleep")

    async def wake(self, name: str) -> None:
        """Wake the deployment. Raises StartError with the code of the ledger if its memory is taken."""
        run = RunDirectory.of(name)
        await call(run.admin_socket, "POST", "/v1/deployment/wake", {})
        await self._until_state(run, ("ready", "degraded"), f"{name} does not wake")

    async def end(self, name: str) -> None:
        """Drain the deployment and wait for its end."""
        run = RunDirectory.of(name)
        pid = run.holder()
        if pid is None:
            return
        with suppress(MstarError):  # it ends by itself
            await call(run.admin_socket, "POST", "/v1/deployment/stop")
        await asyncio.to_thread(_wait_end, run, pid)

    def host_memory(self) -> int:
        """Return the memory that the kernel counts as available."""
        return memory_facts().get("MemAvailable", 0)

    def holders(self, key: str) -> Sequence[Holder]:
        """Return the holders of a device in the ledger."""
        return gpu_holders(key)

    async def _until_state(self, run: RunDirectory, states: Sequence[str], why: str) -> None:
        try:
            async with asyncio.timeout(MOVE_S):
                while True:
                    facts = await call(run.admin_socket, "GET", "/v1/")
                    operation = facts.get("operation") or {}
                    if operation.get("state") == "failed":
                        raise _conflict_or_failure(why, str(operation.get("error", "")))
                    if facts.get("state") in states and operation.get("state") != "running":
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise MstarError(why, f"not within {MOVE_S:g} s", f"mstarctl logs {run.name}") from error


def start_words(entry: ModelEntry) -> list[str]:
    """Return the words of a model's entry as `mstarctl up` and `plan` take them.

    A model without a file gets the one that fits its devices.
    """
    words = [] if entry.target is None else [entry.target]
    for option, value in (
        ("--config", entry.file),
        ("--weights", entry.weights),
        ("--device", entry.device),
        ("--gpus", entry.gpus),
    ):
        words += [option, value] if value is not None else []
    words += ["--fit"] if entry.file is None else []
    return words + [word for text in set_texts(entry) for word in ("--set", text)]


def set_texts(entry: ModelEntry) -> list[str]:
    """Return the values that an entry overrides, as `--set` takes them."""
    texts = [] if entry.sleepable is None else [f"sleepable={str(entry.sleepable).lower()}"]
    for key, value in entry.set.items():
        texts.append(f"{key}={value if isinstance(value, str) else msgspec.json.encode(value).decode()}")
    return texts


def command_error(text: str, title: str) -> StartError:
    """Return the error that a command has printed, with its code."""
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if _HEAD.match(line)), None)
    if start is None:
        return StartError(title, "\n".join(lines[-3:]), "mstarctl logs shows its logs", phase="start")
    found = _HEAD.match(lines[start])
    rest = [line.strip() for line in lines[start + 1 :]]
    hint = next((line.removeprefix("try: ") for line in rest if line.startswith("try: ")), "")
    detail = "\n".join(line for line in rest if not line.startswith(("try: ", "log: ")))
    code = "" if found is None else found["code"].replace("-", "_")
    return StartError(title if found is None else found["title"], detail, hint, phase="start", code=code)


def _wait_end(run: RunDirectory, pid: int) -> None:
    """Wait in a thread of its own until a supervisor has ended."""
    end = time.monotonic() + END_S
    while run.holder() == pid and time.monotonic() < end:
        time.sleep(POLL_S)


def _conflict_or_failure(why: str, cause: str) -> MstarError:
    """Return the error of an operation that failed after its call had been answered."""
    if "too little memory" in cause:
        return StartError(why, cause, phase="wake", code="gpu_memory_short")
    return StateConflict(why, cause) if "request" in cause else MstarError(why, cause)


async def _run(words: Sequence[str], stdout: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path.cwd(),
        start_new_session=True,  # a signal to the gateway's group must not end a start
    )
