"""Watch of a gateway during the benchmark: states of its models, waiting requests, memory, and its processor time."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.gateway.models import MODELS
from bench.serving.deployment import TICK_S, gpu_state, parents
from mstar_core.host.hardware.memory import memory_facts

POLL_S: Final = 0.5
MEMORY_S: Final = 5.0
WAITS_S: Final = 15.0
"""Time from which a request that waits is printed, each time it has waited as long again."""

STALLS_S: Final = 60.0
"""Time from which the end of the logs of its deployment is printed too."""

TAIL: Final = 1500
_SERIES: Final = re.compile(r"^(mstar_gateway_[a-z_]+)(?:\{[^}]*\})? (\S+)$", re.M)


class Watch:
    """Reads a gateway's admin socket, and prints what changes. Owned by one run.

    memory: seconds since the start, bytes of the GPU, bytes that the host has available.
    """

    def __init__(self, run_dir: Path, state_dir: Path, url: str, say: Callable[[str], None]) -> None:
        self._socket = str(run_dir / ".gateways" / "gateway" / "admin.sock")
        self._state_dir = state_dir
        self._url = url
        self._say = say
        self._waiting: dict[int, tuple[str, float, float]] = {}
        self._shown: dict[str, str] = {}
        self.memory: list[dict[str, Any]] = []

    async def __aenter__(self) -> Watch:
        self._admin = aiohttp.ClientSession(connector=aiohttp.UnixConnector(self._socket))
        self._began = time.perf_counter()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._weigh())]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._admin.close()

    async def models(self) -> dict[str, dict[str, Any]]:
        """Return the models with their states, wakes and the memory that they hold."""
        async with self._admin.get("http://gateway/v1/models") as answer:
            items = (await answer.json())["items"]
        return {item["name"]: item for item in items if item["name"] in MODELS}

    async def processor_s(self) -> float:
        """Return the processor time of the gateway's processes."""
        async with self._admin.get("http://gateway/v1/") as answer:
            keeper = int((await answer.json())["pid"])
        own = [pid for pid, parent in parents().items() if keeper in (pid, parent)]
        return sum(processor_s(pid) for pid in own)

    async def series(self) -> dict[str, float]:
        """Return the gateway's own counters, each summed over its labels."""
        found: dict[str, float] = {}
        async with self._admin.get("http://gateway/v1/metrics") as answer:
            text = await answer.text()
        for name, value in _SERIES.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Count a request for a model as one that waits, until its answer is whole."""
        now, key = time.perf_counter(), id(object())
        while key in self._waiting:
            key += 1
        self._waiting[key] = (name, now, WAITS_S)
        try:
            yield
        finally:
            del self._waiting[key]

    async def _follow(self) -> None:
        while True:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(5.0):
                    models = await self.models()
                self._show(models)
            await asyncio.sleep(POLL_S)

    def _show(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        for name, item in models.items():
            text = state_of(item)
            if self._shown.get(name) != text:
                self._shown[name] = text
                self._say(f"{name}: {text}")
        now = time.perf_counter()
        for key, (name, since, next_s) in list(self._waiting.items()):
            if now - since < next_s:
                continue
            self._waiting[key] = (name, since, next_s + WAITS_S)
            item = models[name]
            self._say(f"{name}: a request waits for {now - since:.0f} s; {state_of(item)}; {progress_of(item)}")
            if now - since >= STALLS_S:
                self._say(f"{name}: end of its logs\n{last_words(self._state_dir / name)}")

    async def _weigh(self) -> None:
        while True:
            gpu = await asyncio.to_thread(gpu_state)
            self.memory.append(
                {
                    "s": round(time.perf_counter() - self._began, 1),
                    "gpu_bytes": gpu.get("memory_bytes"),
                    "host_available_bytes": memory_facts().get("MemAvailable"),
                    "host_total_bytes": memory_facts().get("MemTotal"),
                }
            )
            await asyncio.sleep(MEMORY_S)


def state_of(item: Mapping[str, Any]) -> str:
    """Return the state of a model with its level of sleep and its reason."""
    level = f" at level {item['sleep_level']}" if item["sleep_level"] else ""
    state = "awake" if item["state"] in ("ready", "idle") else item["state"]
    return f"{state}{level}" + (f", {item['reason']}" if item["reason"] else "")


def progress_of(item: Mapping[str, Any]) -> str:
    """Return the progress of a load or wake."""
    progress = item["progress"] or {}
    share = progress.get("share")
    return str(progress.get("text", "")) + ("" if share is None else f" {100 * share:.0f} %")


def last_words(folder: Path) -> str:
    """Return the end of every log of the latest start of a deployment."""
    starts = sorted(path for path in folder.glob("*") if path.is_dir())
    logs = sorted(starts[-1].rglob("*.log")) if starts else []
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-TAIL:]}" for path in logs)


def processor_s(pid: int) -> float:
    """Return the processor time of a process in seconds, 0 if it has ended.

    The times of its threads are in nanoseconds; a kernel without them counts ticks of the whole process.
    """
    try:
        threads = [path.read_text(encoding="ascii") for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        if threads:
            return sum(int(text.split()[0]) for text in threads) / 1e9
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) * TICK_S
