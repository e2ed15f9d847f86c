"""Checkpoint of a host as its `weights` process has prepared it, compared between hosts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import StartError
from mstar_core.host.run_dir import RunDirectory
from mstar_core.supervisor.child import Child
from mstar_core.supervisor.hosts.remote_process import RemoteProcess

FOLDER: Final = "weights.folder"
FINGERPRINT: Final = "weights.fingerprint"
"""Files in the run directory that the process writes; the second one if the deployment has several hosts."""


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """Folder on its host, and fingerprint of the content, empty if it is unknown."""

    folder: str
    fingerprint: str = ""

    @classmethod
    def of(cls, child: Child, run: RunDirectory) -> PreparedWeights:
        """Return what a process that has ended well left. Raises OSError if it left nothing on this host."""
        process = child.process
        if isinstance(process, RemoteProcess):
            return cls(process.left.get(FOLDER, ""), process.left.get(FINGERPRINT, ""))
        fingerprint = ""
        with suppress(OSError):
            fingerprint = (run.path / FINGERPRINT).read_text()
        return cls((run.path / FOLDER).read_text(), fingerprint)

    def check_same(self, other: PreparedWeights, host: str) -> None:
        """Raise StartError if another host has other weights. host: its name."""
        if self.fingerprint and other.fingerprint and self.fingerprint != other.fingerprint:
            raise StartError(
                f"host {host} has other weights than the host of the supervisor",
                f"{other.folder} there and {self.folder} here differ",
                "copy one folder to all hosts, or let each host download the weights",
                phase="weights",
                code="weights_differ",
            )
