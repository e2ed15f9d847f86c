"""Process groups of tensor parallelism: one torch.distributed group per (ranks, epoch), NCCL on GPUs, gloo on CPUs.

A file in the run directory introduces the members to each other. A group never outlives a member: all restart
together under the next epoch, so that workers of other groups go on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from mstar_core.closing import Closing
from mstar_core.errors import StartError
from mstar_core.parallel.collectives import TorchCollectives
from mstar_core.parallel.shards import Shard

LOOPBACK: Final = "lo"
MULTICAST_OFF: Final = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""NVLink multicast is off unless the environment sets these: no collective here uses it, and some hosts lack it."""

JOIN_S: Final = 600.0
"""Time limit of a collective. The supervisor ends a member that hangs long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """The place of this process in a group. ranks: of the deployment, the leader first. folder: for the store."""

    ranks: tuple[int, ...]
    rank: int
    epoch: int
    folder: Path

    @property
    def index(self) -> int:
        """Place among the ranks; 0 is the leader."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def is_leader(self) -> bool:
        """Whether this process leads the group."""
        return self.index == 0

    @property
    def name(self) -> str:
        """`tp-0-1.3`: ranks and epoch."""
        return f"tp-{'-'.join(map(str, self.ranks))}.{self.epoch}"

    @property
    def store(self) -> Path:
        """File that introduces the members."""
        return self.folder / f"{self.name}.store"

    @property
    def socket(self) -> Path:
        """Socket on which the leader sends plans."""
        return self.folder / f"{self.name}.plans"


class RankGroup(Closing):
    """The group of this process, joined by all its members. Owned by the worker's main.

    shard: its place, with the collectives that layers use.
    """

    def __init__(self, place: GroupPlace, device: torch.device) -> None:
        """Join the group; returns when all members have. Raises StartError with the cause."""
        self.place = place
        self.device = device
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            for name, value in MULTICAST_OFF.items():
                os.environ.setdefault(name, value)
        if backend == "gloo":
            # Members of one host; the host's name may resolve to an address that this process cannot reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        try:
            store = dist.FileStore(str(place.store), place.size)  # type: ignore[attr-defined]  # missing in its __all__
            dist.init_process_group(
                backend,
                store=store,
                rank=place.index,
                world_size=place.size,
                timeout=timedelta(seconds=JOIN_S),
                device_id=device if device.type == "cuda" else None,
            )
            group = dist.group.WORLD
            assert group is not None
            self.collectives = TorchCollectives(group, device)
        except (RuntimeError, ValueError, OSError) as error:
            raise StartError(
                f"rank {place.rank} could not join the tensor-parallel group of ranks "
                f"{', '.join(map(str, place.ranks))}",
                f"{backend}: {error}",
                "see the logs of the other members",
                phase="group",
            ) from error
        self.shard = Shard(index=place.index, size=place.size, collectives=self.collectives)

    def smallest(self, value: int) -> int:
        """Return the smallest value of all members, as of the pages that fit each of them."""
        own = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(own, op=dist.ReduceOp.MIN)
        return int(own.item())

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if dist.is_initialized() and self.device.type != "cuda":  # NCCL waits for members that may be gone
            dist.destroy_process_group()
        if self.place.is_leader:
            self.place.store.unlink(missing_ok=True)
