"""Process groups of tensor parallelism: one torch.distributed group per (ranks, epoch), NCCL on GPUs, gloo on CPUs.

On one host a file in the run directory introduces the members to each other, otherwise a TCP store on the leader's
host. A group never outlives a member: all restart together under the next epoch, so that workers of other groups go on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mstar_core.closing import Closing
from mstar_core.errors import StartError, TransportError
from mstar_core.host.network import interface_of
from mstar_core.parallel.collectives import TorchCollectives
from mstar_core.parallel.meeting import Meeting, listen
from mstar_core.parallel.shards import Shard

LOOPBACK: Final = "lo"
MULTICAST_OFF: Final = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""NVLink multicast is off unless the environment sets these: no collective here uses it, and some hosts lack it."""

COLLECTIVE_S: Final = 600.0
"""Time limit of a collective. The supervisor ends a member that hangs long before."""

JOIN_S: Final = 300.0
"""Time limit of the members' meeting, unless a place has another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """The place of this process in a group. ranks: of the deployment, the leader first. folder: for store and socket.

    meeting: where the members meet instead, if they are on several hosts. join_s: limit of the wait for other members.
    """

    ranks: tuple[int, ...]
    rank: int
    epoch: int
    folder: Path
    meeting: Meeting | None = None
    join_s: float = JOIN_S

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

    def member(self, index: int) -> str:
        """Return the text for a member: `rank 1`, with its host if the group has several."""
        rank = f"rank {self.ranks[index]}"
        return rank if self.meeting is None else f"{rank} on {self.meeting.hosts[index]}"


class RankGroup(Closing):
    """The group of this process, joined by all its members. Owned by the worker's main.

    shard: its place, with the collectives that layers use.
    """

    def __init__(self, place: GroupPlace, device: torch.device) -> None:
        """Join the group; returns when all members have. Raises StartError with the cause."""
        self.place = place
        self.device = device
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            set_network(backend, place.meeting)
            dist.init_process_group(
                backend,
                store=open_store(place),
                rank=place.index,
                world_size=place.size,
                timeout=timedelta(seconds=COLLECTIVE_S),
                device_id=device if device.type == "cuda" else None,
            )
            group = dist.group.WORLD
            assert group is not None
            self.collectives = TorchCollectives(group, device, uses_one_shot=place.meeting is None)
        except (RuntimeError, ValueError, OSError, TransportError) as error:
            raise StartError(
                f"{place.member(place.index)} could not join the tensor-parallel group of ranks "
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


def set_network(backend: str, meeting: Meeting | None) -> None:
    """Set the network interface of collectives, unless the environment names one. Raises TransportError without any.

    By default gloo resolves the name of the host, which may give an address that other members cannot reach.
    """
    if backend == "nccl":
        for name, value in MULTICAST_OFF.items():
            os.environ.setdefault(name, value)
    if meeting is not None:
        interface = interface_of(meeting.address)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # otherwise NCCL takes it for a prefix
    elif backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def open_store(place: GroupPlace) -> Store:
    """Open the store in which members leave their addresses. Raises RuntimeError or OSError if it is not reached."""
    meeting = place.meeting
    if meeting is None:
        return dist.FileStore(str(place.store), place.size)  # type: ignore[attr-defined]  # missing in its __all__
    listener = listen(meeting.host, meeting.store_port, "its store") if place.is_leader else None
    store = dist.TCPStore(  # type: ignore[attr-defined]  # as above
        meeting.host,
        meeting.store_port,
        is_master=place.is_leader,
        timeout=timedelta(seconds=place.join_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    # The store accepts every connection. Without the key, a stranger does not know the names of the entries.
    return PrefixStore(meeting.key(f"{place.name} store").hex(), store)
