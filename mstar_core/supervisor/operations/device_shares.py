"""Shares of devices that a deployment gives back while it sleeps, and takes again before it wakes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import StartError
from mstar_core.host.gpu_locks import MemoryClaim, held_bytes, resize_gpus

log = logging.getLogger(__name__)

CPU = "cpu"


class DeviceShares:
    """The shares that a supervisor holds. locks: their descriptors by key.

    A rank on a GPU gives back what it has freed; its context, graphs and workspaces stay counted. CPU ranks with faked
    memory have nothing that compares with their budget: all of it is free while the whole deployment sleeps.
    """

    def __init__(self, spec: DeploymentSpec, locks: Mapping[str, int]) -> None:
        self._spec = spec
        self._locks = locks

    def give_back(self, freed: Mapping[str, int], *, is_whole: bool) -> None:
        """Give bytes of devices back, which the ranks do not use any more. is_whole: the whole deployment sleeps."""
        sizes = {}
        for key, claim in self._spec.claims.items():
            if self._is_faked(claim):
                sizes[key] = 0 if is_whole else self._held(key)
            else:
                sizes[key] = max(0, self._held(key) - freed.get(claim.device, 0))
        try:
            self._resize(sizes)
        except StartError as error:  # the share stays as it was: no other deployment gets memory that is not free
            log.warning("the ledger still counts memory that the ranks have given back: %s", error)

    def take_again(self, needed: Mapping[str, int], *, is_whole: bool) -> None:
        """Take all these bytes of devices or none. Raises StartError that names the deployments that hold them."""
        self._resize(
            {
                key: claim.need_bytes
                if is_whole or self._is_faked(claim)
                else min(claim.need_bytes, self._held(key) + needed.get(claim.device, 0))
                for key, claim in self._spec.claims.items()
            }
        )

    def _resize(self, sizes: Mapping[str, int]) -> None:
        claims = {
            key: MemoryClaim(device=claim.device, need_bytes=sizes[key], total_bytes=claim.total_bytes)
            for key, claim in self._spec.claims.items()
        }
        resize_gpus(self._locks, claims, self._spec.name)

    def _held(self, key: str) -> int:
        fd = self._locks.get(key)
        return 0 if fd is None else held_bytes(fd) or 0

    @staticmethod
    def _is_faked(claim: MemoryClaim) -> bool:
        return claim.device.partition(":")[0] == CPU
