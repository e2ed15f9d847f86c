"""Deployment spec: resolved configuration, placement and limits. Written by `up`, read by every child process."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mstar_core.config.resolved import ResolvedConfig
from mstar_core.host.ledger.shares import MemoryClaim

if TYPE_CHECKING:
    from mstar_core.plugin.spec import ModelSpec


class NodePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of a node. walks: the walks they serve (None = all). replicas: one tuple of tp_size ranks each."""

    node: str
    replicas: tuple[tuple[int, ...], ...]
    walks: tuple[str, ...] | None = None
    tp_size: int = 1


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank and its device: `cpu` or `cuda:INDEX`.

    host: name of its host in `DeploymentSpec.hosts`, empty for the supervisor's own. nodes: those that it serves.
    follows: those of which it computes a share for the leader of its group.
    memory_fraction: share of the device's memory for weights, reserve and pools; None: kv_cache.memory_fraction.
    memory_bytes: budget for them in bytes, of a deployment that shares its devices with others; None without one.
    """

    rank: int
    device: str
    nodes: tuple[str, ...]
    memory_fraction: float | None = None
    memory_bytes: int | None = None
    follows: tuple[str, ...] = ()
    host: str = ""

    @property
    def held(self) -> tuple[str, ...]:
        """All nodes of which it has weights."""
        return self.nodes + self.follows

    @property
    def place(self) -> str:
        """Its device, after the name of its host unless that is the supervisor's: `cuda:0`, `gpu-b cuda:0`."""
        return f"{self.host} {self.device}".lstrip()


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor-parallel group. ranks: the leader first. nodes: those that its ranks compute together."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]

    @property
    def leader(self) -> int:
        """The rank that schedules for the group."""
        return self.ranks[0]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of a model's nodes on ranks. groups: those of several ranks each."""

    ranks: tuple[RankPlan, ...]
    placements: tuple[NodePlacement, ...]
    groups: tuple[GroupPlan, ...] = ()

    def group_of(self, rank: int) -> GroupPlan | None:
        """Return the tensor-parallel group of a rank, None without one."""
        return next((group for group in self.groups if rank in group.ranks), None)

    def replicas(self, node: str, walk: str) -> tuple[tuple[int, ...], ...]:
        """Return the replicas that run `node` in `walk`. A placement for this walk wins over one for all walks."""
        for placement in self.placements:
            if placement.node == node and placement.walks is not None and walk in placement.walks:
                return placement.replicas
        for placement in self.placements:
            if placement.node == node and placement.walks is None:
                return placement.replicas
        return ()


class AdapterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter. number: never used again in a deployment. row: its place on every rank. name: as a model."""

    number: int
    row: int
    name: str
    folder: str
    rank: int = 0
    base: str = ""


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A host of a deployment. name: empty for the supervisor's. address: at which the others reach it.

    title: its host name, for people. node: Ray's id.
    """

    name: str
    address: str
    title: str = ""
    node: str = ""


class DeploymentSpec(ResolvedConfig, frozen=True, kw_only=True):
    """Configuration and placement of a deployment, as its child processes read it. Every key of a file is a field.

    folder: checkpoint folder; required, because random weights are refused.
    max_concurrent_requests: the configured number, or the one that the devices carry.
    weights_source: `tiny`, `mini`, `folder` or `official`.
    slots: requests at once that each rank was started for; None: max_concurrent_requests, which may be set live.
    admin_group: group whose members may read the admin socket.
    gpus: device of this host -> key of its lock (host/gpu_locks.py). claims: memory by key, of devices that are shared.
    upload_dir: parent of the folder that spools request media (None: the run directory).
    log_stats: write one line per finished request to stats_file (None: stats.ndjson beside the logs).
    needed_bytes: lower bound of the weights' size (0: unknown); free_bytes: free memory of the devices at planning.
    reconcile_s: seconds between two `Reconcile` messages.
    nvtx: mark steps for Nsight Systems. unused: options without effect, with the reason.
    cautions: warnings about served behaviour that differs from what the options suggest, with alternatives.
    replaces: run directory of the deployment that this one takes over from, or empty. stop_first: it ends first.
    hosts: all hosts, the supervisor's first; empty if the deployment has one host and no Ray. on_host: name of the host
    on which this record is read, whose paths it has.
    adapters: LoRA adapters that are loaded now; next_adapter: number of the next one.
    owner: token of the gateway that has started it, empty for others.
    graph: declared graph of the model (`GraphView`), shown until the conductor has read the checkpoint.
    """

    plugin: str
    run_dir: str
    log_dir: str
    plan: Plan
    max_concurrent_requests: int = 32
    slots: int | None = None
    folder: str | None = None
    weights_source: str = "folder"
    cache_dir: str | None = None
    admin_group: str | None = None
    log_level: str = "INFO"
    drain_timeout_s: float = 120.0
    stall_s: float = 120.0
    reconcile_s: float = 60.0
    argv: tuple[str, ...] = ()
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    gpus: dict[str, str] = msgspec.field(default_factory=dict)
    claims: dict[str, MemoryClaim] = msgspec.field(default_factory=dict)
    upload_dir: str | None = None
    log_stats: bool = False
    stats_file: str | None = None
    needed_bytes: int = 0
    free_bytes: int = 0
    nvtx: bool = False
    unused: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    replaces: str = ""
    stop_first: bool = False
    hosts: tuple[HostPlan, ...] = ()
    on_host: str = ""
    adapters: tuple[AdapterPlan, ...] = ()
    next_adapter: int = 1
    owner: str = ""
    graph: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def can_sleep(self) -> bool:
        """Whether its ranks can give the memory of their devices back; CPU ranks always can."""
        return self.sleepable or all(rank.device == "cpu" for rank in self.plan.ranks)

    def fitted(self, bound: ModelSpec) -> DeploymentSpec:
        """Return the deployment for the model as its checkpoint binds it.

        A length that is the model's default is then the checkpoint's, which may be shorter and needs a smaller cache.
        """
        is_default = self.provenance.get("max_seq_len", "").startswith("model ")
        length = min(self.max_seq_len, bound.max_seq_len) if is_default else self.max_seq_len
        return msgspec.structs.replace(self, max_seq_len=length)

    @property
    def rank_slots(self) -> int:
        """Requests at once that each rank is started for."""
        return self.max_concurrent_requests if self.slots is None else self.slots

    @property
    def address(self) -> str:
        """Address at which other hosts reach this one; empty if there are none."""
        return next((host.address for host in self.hosts if host.name == self.on_host), "")

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host, empty for the supervisor's."""
        return next((each.host for each in self.plan.ranks if each.rank == rank), "")

    @property
    def ipc_dir(self) -> Path:
        return Path(self.run_dir) / "ipc"

    @property
    def uploads(self) -> Path:
        """Spool folder of request media; private to this deployment even if upload_dir is shared."""
        if self.upload_dir is None:
            return Path(self.run_dir) / "uploads"
        return Path(self.upload_dir) / f"mstar-{self.name}-{zlib.crc32(self.run_dir.encode()):08x}"

    def encode(self) -> bytes:
        """Encode as JSON, the content of spec.json."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def load(cls, path: Path) -> DeploymentSpec:
        """Read spec.json. Raises msgspec.ValidationError if another version wrote the file."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
