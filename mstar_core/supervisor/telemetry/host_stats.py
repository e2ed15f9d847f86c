"""Readings of the host: processes and out-of-memory kills from /proc, GPUs by NVML."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from mstar_core.observe.frames import GpuStatus

OOM_WINDOW_S: Final = 3.0
_TICKS_S: Final = os.sysconf("SC_CLK_TCK")


class ProcessLoad(NamedTuple):
    """core: share of one CPU core since the last reading, None at the first. resident_bytes: memory."""

    core: float | None
    resident_bytes: int | None


NO_LOAD: Final = ProcessLoad(None, None)


def host_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the memory available to processes: that of the host, or the limit of the container."""
    built_in = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(built_in, int(cgroup.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return built_in


def is_suspended(pid: int | None) -> bool:
    """Return whether a process is stopped by a signal or a debugger, so that it cannot run."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def main_thread_s(pid: int | None) -> float | None:
    """Return the CPU seconds of a process's main thread, None if it has ended."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_S
    except (OSError, ValueError, IndexError):
        return None


@dataclass(slots=True)
class ProcessLoads:
    """Reads the load of processes by id. Owned by the state publisher."""

    _before: dict[int, tuple[float, float]] = field(default_factory=dict)

    def read(self, pid: int | None, now: float) -> ProcessLoad:
        """Return the load of a process, NO_LOAD if it has ended."""
        if pid is None:
            return NO_LOAD
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                # The name in brackets may contain blanks and brackets: the fields follow the last bracket.
                fields = file.read().rpartition(")")[2].split()
            used_s = (int(fields[11]) + int(fields[12])) / _TICKS_S
            resident = int(fields[21]) * resource.getpagesize()
        except (OSError, ValueError, IndexError):
            self._before.pop(pid, None)
            return NO_LOAD
        before = self._before.get(pid)
        self._before[pid] = (now, used_s)
        if before is None or now <= before[0]:
            return ProcessLoad(None, resident)
        return ProcessLoad(round(max(0.0, used_s - before[1]) / (now - before[0]), 3), resident)


@dataclass(slots=True)
class OomKills:
    """Recent out-of-memory kills of the host, from /proc/vmstat."""

    path: Path = Path("/proc/vmstat")
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def sample(self, now: float) -> None:
        """Note the count. Called once a second."""
        count = self._count()
        if count is None:
            return
        while len(self._seen) > 1 and self._seen[1][0] <= now - OOM_WINDOW_S:
            self._seen.popleft()
        self._seen.append((now, count))

    def recent(self) -> int | None:
        """Return the kills since the sample of about three seconds ago, None if the kernel does not count them."""
        count = self._count()
        return None if count is None or not self._seen else count - self._seen[0][1]

    def _count(self) -> int | None:
        with suppress(OSError, ValueError, IndexError):
            for line in self.path.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return None


PERIOD_S: Final = 1.0
SLOW_S: Final = 0.5
OLD_S: Final = 3.0
BUSES: Final = 2
"""GPUs whose bus traffic one reading measures, in turn: the driver counts for 20 ms in each of both directions."""

JOIN_S: Final = 0.2

log = logging.getLogger(__name__)


class Bus(NamedTuple):
    """Traffic of a GPU's PCIe bus in bytes per second, None if it is unknown."""

    in_s: int | None
    out_s: int | None


NO_BUS: Final = Bus(None, None)


class GpuReader:
    """Reads all GPUs periodically. Owned by the supervisor. library: the NVML module, None if it is not installed."""

    def __init__(self, library: Any | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = library
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._latest: tuple[float, bool, list[GpuStatus]] = (0.0, False, [])
        self._buses: dict[int, Bus] = {}
        self._next_bus = 0

    def start(self) -> None:
        """Start the thread, if there is a library."""
        if self._nvml is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. A thread that hangs in the driver ends with the process."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def latest(self, now: float) -> list[GpuStatus]:
        """Return the newest readings, marked stale if the last call was slow or has not returned."""
        read_at, was_slow, gpus = self._latest
        if was_slow or now - read_at > OLD_S:
            return [msgspec.structs.replace(gpu, is_stale=True) for gpu in gpus]
        return gpus

    def read(self) -> None:
        """Read all GPUs now. Called by the thread, and by tests."""
        began = self._clock()
        count = int(self._nvml.nvmlDeviceGetCount())  # type: ignore[union-attr]  # started only with a library
        for _ in range(min(BUSES, count)):
            index = self._next_bus % count
            self._buses[index] = _bus(self._nvml, index)
            self._next_bus = index + 1
        gpus = [_reading(self._nvml, index, self._buses.get(index, NO_BUS)) for index in range(count)]
        now = self._clock()
        self._latest = (now, now - began > SLOW_S, gpus)

    def _run(self) -> None:
        nvml = self._nvml
        assert nvml is not None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            log.info("GPU readings are not available: %s", error)
            return
        failed = False
        while not self._stop.is_set():
            try:
                self.read()
                failed = False
            except nvml.NVMLError as error:
                if not failed:
                    log.warning("reading the GPUs failed: %s", error)
                failed = True
            self._stop.wait(PERIOD_S)
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def library() -> Any | None:
    """Return NVML's Python module, if it is installed."""
    return import_module("pynvml") if find_spec("pynvml") is not None else None


def device_keys(gpus: Sequence[GpuStatus], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Map `cuda:INDEX`, as processes see it under CUDA_VISIBLE_DEVICES, to the key of that GPU."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {f"cuda:{gpu.index}": str(gpu.index) for gpu in gpus}
    keys: dict[str, str] = {}
    for position, word in enumerate(part.strip() for part in visible.split(",")):
        match = next((g for g in gpus if word and (word == str(g.index) or g.uuid.startswith(word))), None)
        if match is None:
            break  # the driver ends the list at the first unknown entry
        keys[f"cuda:{position}"] = str(match.index)
    return keys


def _reader(nvml: Any) -> Callable[[Callable[[], Any]], Any | None]:
    """Return a function that makes a call of NVML, and returns None if the card or the library does not have it."""

    def read(call: Callable[[], Any]) -> Any | None:
        with suppress(nvml.NVMLError, AttributeError):
            return call()
        return None

    return read


def _bus(nvml: Any, index: int) -> Bus:
    handle, read = nvml.nvmlDeviceGetHandleByIndex(index), _reader(nvml)
    return Bus(
        _kib(read(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES))),
        _kib(read(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES))),
    )


def _reading(nvml: Any, index: int, bus: Bus) -> GpuStatus:
    handle, read = nvml.nvmlDeviceGetHandleByIndex(index), _reader(nvml)
    memory = read(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rates = read(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    heat = read(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    clock = read(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    return GpuStatus(
        index=index,
        uuid=_text(read(lambda: nvml.nvmlDeviceGetUUID(handle))),
        name=_text(read(lambda: nvml.nvmlDeviceGetName(handle))),
        util=None if rates is None else rates.gpu / 100,
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        power_w=_watts(read(lambda: nvml.nvmlDeviceGetPowerUsage(handle))),
        power_limit_w=_watts(read(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))),
        temperature_c=None if heat is None else float(heat),
        clock_mhz=None if clock is None else float(clock),
        pcie_in_s=bus.in_s,
        pcie_out_s=bus.out_s,
        fan=None if (fan := read(lambda: nvml.nvmlDeviceGetFanSpeed(handle))) is None else fan / 100,
        throttle=throttle_reasons(read(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0),
        ecc_errors=read(lambda: _ecc_errors(nvml, handle)),
        is_mig=read(lambda: nvml.nvmlDeviceGetMigMode(handle)[0]) == 1,
        processes=_processes(read(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()),
    )


THROTTLES: Final = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clock throttle reasons that mean less speed than asked for. Idle clocks are none."""


def throttle_reasons(bits: int) -> list[str]:
    """Return the reasons in a mask of NVML."""
    return [reason for bit, reason in THROTTLES.items() if bits & bit]


def _ecc_errors(nvml: Any, handle: Any) -> int:
    return int(
        nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    )


def _processes(items: Sequence[Any]) -> dict[str, tuple[str, int]]:
    return {str(item.pid): (process_name(int(item.pid)), int(item.usedGpuMemory or 0)) for item in items}


def process_name(pid: int) -> str:
    """Return the name of a process; empty if it is in another namespace or has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _kib(value: int | None) -> int | None:
    return None if value is None else int(value) * 1024


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
