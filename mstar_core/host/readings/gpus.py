"""Readings of the GPUs of this host by NVML. Used by the supervisor and by agents."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import msgspec

from mstar_core.host.readings.processes import process_name
from mstar_core.observe.frames import GpuStatus

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


def _kib(value: int | None) -> int | None:
    return None if value is None else int(value) * 1024


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
