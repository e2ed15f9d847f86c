"""Deployment spec: resolved configuration, placement and limits. Written by `up`, read by every child process."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Final

import msgspec

EVERYWHERE: Final = ("0.0.0.0", "::")
"""Hosts on which every address of the machine listens."""


class NodePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of a node. walks: the walks they serve (None = all). replicas: one tuple of tp_size ranks each."""

    node: str
    replicas: tuple[tuple[int, ...], ...]
    walks: tuple[str, ...] | None = None
    tp_size: int = 1


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank and its device: `cpu` or `cuda:INDEX`.

    nodes: those that it serves. follows: those of which it computes a share for the leader of its group.
    memory_fraction: share of the device's memory for weights, reserve and pools; None: kv_cache.memory_fraction.
    """

    rank: int
    device: str
    nodes: tuple[str, ...]
    memory_fraction: float | None = None
    follows: tuple[str, ...] = ()

    @property
    def held(self) -> tuple[str, ...]:
        """All nodes of which it has weights."""
        return self.nodes + self.follows


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


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Page pools. `pages` or `tokens` sets each node's size; otherwise a rank's nodes divide its memory by `share`.

    memory_fraction: share of a device's memory for all ranks on it. reserve_bytes: memory of each rank that pools leave
    free (None: the device's default). share_between_keys: requests of different API keys reuse each other's prefixes.
    """

    page_size: int = 16
    pages: int | None = None
    tokens: int | None = None
    memory_fraction: float = 0.85
    reserve_bytes: int | None = None
    share: dict[str, float] = {}
    prefix_cache: bool = True
    share_between_keys: bool = False


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Transport of tensors between ranks. protocol: SHM, TCP or RDMA; port and device are of the last two.

    port: first port of the transfer engine; rank i uses those from port + 16 i. device: interface, address or host name
    of this host for TCP (None: the loopback address); names of adapters, separated by commas, for RDMA (None: all).
    """

    protocol: str = "SHM"
    port: int = 8080
    device: str | None = None


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The api's address and limits (docs/http-api.md). Sizes in bytes, times in seconds.

    api_keys: of the command line, then the last `keys_in_file` from api_key_file. metrics_keys: from metrics_key_file;
    they open /metrics alone. tls_cert, tls_key: PEM files; with them the api serves HTTPS only. cors_origins: allowed
    origins of browsers. remote_media: hosts that media may be fetched from. pool_processes: None chooses by the model
    and the machine's cores. max_requests_per_key: 0 disables the limit. max_connections: also bounded by the limit of
    open files.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    keys_in_file: int = 0
    metrics_keys: tuple[str, ...] = ()
    metrics_key_file: str | None = None
    metrics_open: bool = False
    bind_when_ready: bool = False
    console: bool = True
    strict_model: bool = False
    unknown_params: str = "error"
    timeout_s: float = 600.0
    stall_timeout_s: float = 30.0
    max_body_bytes: int = 128 * 1024 * 1024
    max_text_bytes: int = 1024 * 1024
    max_files: int = 32
    max_speech_chars: int = 4096
    pool_processes: int | None = None
    max_n: int = 8
    max_requests_per_key: int = 0
    max_connections: int = 2048
    tls_cert: str | None = None
    tls_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    remote_media: tuple[str, ...] = ()
    max_image_pixels: int = 50_000_000
    max_image_side: int = 16_384
    max_audio_s: float = 1800.0
    max_video_s: float = 600.0
    max_video_frames: int = 768
    max_video_width: int = 4096
    max_video_height: int = 2304
    max_decoded_bytes: int = 1024 * 1024 * 1024

    @property
    def secrets(self) -> tuple[str, ...]:
        """The keys of both kinds, which no log and no view shows."""
        return (*self.api_keys, *self.metrics_keys)

    @property
    def url(self) -> str:
        """The api's URL for a client on this host."""
        host = "127.0.0.1" if self.host in EVERYWHERE else self.host
        scheme = "http" if self.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Retention of logs. max_bytes: size at which a file is rotated; one rotated file stays.

    keep_starts: starts of a name whose folders stay, the current one included. max_days: age at which lines are removed
    (None: no limit). A file is rotated at half of it, so that the rotated file is replaced in time.
    """

    max_bytes: int = 200 * 1024 * 1024
    keep_starts: int = 10
    max_days: float | None = None

    @property
    def rotate_s(self) -> float | None:
        """Age of a file in seconds at which it is rotated."""
        return None if self.max_days is None else self.max_days * 86_400 / 2


KEEP_LOGS: Final = LogConfig()


class DeploymentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration and placement of a deployment, as its child processes read it.

    folder: checkpoint folder; required, because random weights are refused.
    max_concurrent_requests: requests that run at once; max_queue: requests that wait beyond them.
    weights_source: `tiny`, `mini`, `folder` or `official`.
    attention: backend of KV nodes (None: flashinfer on CUDA, torch on the CPU); there is no fallback to another.
    admin_group: group whose members may read the admin socket.
    quantization: weight format of KV nodes, `none` or `fp8`.
    feature_cache_bytes: most bytes of encoder outputs that each rank keeps for equal media.
    wait_spin_us: busy-poll window of the processes (None: host/wait_spin.py decides).
    hang_s: silence after which a process counts as hanging; step_limit_s: the same for one that computes.
    settings, sources: every configuration key with its value and its source (file and line, flag, default).
    gpus: device -> key of its lock (host/gpu_locks.py).
    upload_dir: parent of the folder that spools request media (None: the run directory).
    log_stats: write one line per finished request to stats_file (None: stats.ndjson beside the logs).
    needed_bytes: lower bound of the weights' size (0: unknown); free_bytes: free memory of the devices at planning.
    nvtx: mark steps for Nsight Systems. unused: options without effect, with the reason.
    cautions: warnings about served behaviour that differs from what the options suggest, with alternatives.
    graph: declared graph of the model (`GraphView`), shown until the conductor has read the checkpoint.
    """

    name: str
    model: str
    plugin: str
    run_dir: str
    log_dir: str
    admin_group: str | None = None
    plan: Plan
    folder: str | None = None
    weights_source: str = "folder"
    cache_dir: str | None = None
    model_kwargs: dict[str, Any] = {}
    max_seq_len: int = 8192
    max_concurrent_requests: int = 32
    max_queue: int = 128
    kv_cache: KVCacheConfig = KVCacheConfig()
    dtype: str | None = None
    attention: str | None = None
    quantization: str = "none"
    token_budget: int = 2048
    image_share: float = 0.5
    feature_cache_bytes: int = 256 * 1024 * 1024
    wait_spin_us: int | None = None
    transport: TransportConfig = TransportConfig()
    api: ApiConfig = ApiConfig()
    logs: LogConfig = LogConfig()
    log_level: str = "INFO"
    drain_timeout_s: float = 120.0
    stall_s: float = 120.0
    hang_s: float = 10.0
    step_limit_s: float = 300.0
    config_file: str | None = None
    argv: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    gpus: dict[str, str] = {}
    upload_dir: str | None = None
    log_stats: bool = False
    stats_file: str | None = None
    needed_bytes: int = 0
    free_bytes: int = 0
    nvtx: bool = False
    unused: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    graph: dict[str, Any] = {}

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
