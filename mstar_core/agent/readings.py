"""Readings of an agent's host."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mstar_core.host.readings.gpus import GpuReader, library
from mstar_core.host.readings.loads import HostLoads
from mstar_core.host.readings.processes import OomKills, ProcessLoads
from mstar_core.messages.hosts import HostReading
from mstar_core.process.spawn import LocalProcess


@dataclass(slots=True)
class HostReader:
    """Readings of the loads of this host. Owned by the agent. gpus: None if no rank of this host uses one."""

    gpus: GpuReader | None = None
    _loads: HostLoads = field(default_factory=HostLoads)
    _processes: ProcessLoads = field(default_factory=ProcessLoads)
    _kills: OomKills = field(default_factory=OomKills)

    def watch_gpus(self) -> None:
        """Read the GPUs too, from now on."""
        if self.gpus is None:
            self.gpus = GpuReader(library())
            self.gpus.start()

    def stop(self) -> None:
        """End the thread that reads the GPUs."""
        if self.gpus is not None:
            self.gpus.stop()

    def read(self, children: Mapping[str, LocalProcess], **facts: Any) -> HostReading:
        """Return the readings of now. children: running processes by name; facts: further fields."""
        now = time.monotonic()
        self._kills.sample(now)
        loads = {name: self._processes.read(process.pid, now) for name, process in children.items()}
        computed = {name: process.computed_s() for name, process in children.items()}
        return HostReading(
            host=msgspec.to_builtins(self._loads.read(now)),
            gpus=[] if self.gpus is None else msgspec.to_builtins(self.gpus.latest(now)),
            cores={name: load.core for name, load in loads.items() if load.core is not None},
            resident_bytes={name: load.resident_bytes for name, load in loads.items() if load.resident_bytes},
            computed_s={name: seconds for name, seconds in computed.items() if seconds is not None},
            suspended=[name for name, process in children.items() if process.is_suspended()],
            memory_kills=self._kills.recent(),
            **facts,
        )
