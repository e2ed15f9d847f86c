"""Keys of a deployment file: type, range, default and one line of documentation each. Read by load and docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from mstar_core.config.deployment import ApiConfig, DeploymentSpec, KVCacheConfig, LogConfig, TransportConfig
from mstar_core.plugin.params import ValueSpec, value_kind

ITEM: Final = "[]"
"""Placeholder of an index in the keys of a list of sections: `node_groups[].ranks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(ValueSpec):
    """One configuration key. default_text: shown if the default depends on something. nullable: `null` is allowed."""

    key: str
    default_text: str = ""

    @property
    def parent(self) -> str:
        """The section that holds the key, "" for the top."""
        return self.key.rpartition(".")[0]

    @property
    def word(self) -> str:
        """Last part of the key, without its section."""
        return self.key.rpartition(".")[2].removesuffix(ITEM)

    @property
    def allowed(self) -> str:
        """The allowed values as people read them."""
        return "one of " + ", ".join(self.choices) if self.choices else f"{self.kind} {self.limits_text}".rstrip()


_STRUCTS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "": DeploymentSpec,
    "kv_cache": KVCacheConfig,
    "transport": TransportConfig,
    "api": ApiConfig,
    "logs": LogConfig,
}
_FIELDS: Final = {
    f"{section}.{field.name}".lstrip("."): field
    for section, struct in _STRUCTS.items()
    for field in msgspec.structs.fields(struct)
}


def _field(key: str, doc: str, **given: Any) -> Setting:
    """Declare a key that is a field of the deployment spec, with its type and default. given: what differs."""
    field = _FIELDS[key]
    kind, nullable = value_kind(field.type)
    default = field.default if field.default is not msgspec.NODEFAULT else None
    own = {"kind": {"object": "mapping"}.get(kind, kind), "nullable": nullable, "default": default}
    return Setting(key=key, doc=doc, **{**own, **given})


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting(
        key="model",
        kind="string",
        required=True,
        doc="Name or alias of the model; `NAME:tiny` and `NAME:mini` use an embedded checkpoint: random, trained.",
    ),
    Setting(key="name", kind="string", default_text="the model's name", nullable=True, doc="Name of the deployment."),
    Setting(
        key="weights",
        kind="string",
        default_text="the official weights",
        nullable=True,
        doc="Folder to read weights from; nothing is downloaded.",
    ),
    _field(
        "dtype",
        "Number format of the nodes that do not state their own.",
        default_text="bfloat16 on cuda, float32 on cpu",
        choices=("bfloat16", "float16", "float32"),
    ),
    _field(
        "attention",
        "Attention backend. The start fails if the one that is set cannot run.",
        default_text="flashinfer on cuda, torch on cpu and for heads that are not 64, 128 or 256 wide",
        choices=("flashinfer", "torch"),
    ),
    _field(
        "quantization",
        "Number format of the weights of nodes with a cache. fp8 halves them; it needs half precision on cuda.",
        choices=("none", "fp8"),
    ),
    Setting(
        key="max_seq_len",
        kind="integer",
        default_text="the model's",
        ge=16,
        le=16_777_216,
        doc="Most tokens of one request: its prompt with the tokens that the model adds, and its output.",
    ),
    Setting(
        key="max_concurrent_requests",
        kind="integer",
        default_text="128 on GPUs of 120 GiB and more, 64 from 75 GiB on, else 32; fewer if caches are small",
        nullable=True,
        ge=1,
        le=65_536,
        doc="Requests that run at once; further ones wait.",
    ),
    _field(
        "max_queue", "Requests that wait beyond the running ones; further ones are refused with 429.", ge=0, le=1048576
    ),
    _field("token_budget", "Most tokens of one step; longer prompts are prefilled in chunks.", ge=1, le=1048576),
    _field(
        "image_share",
        "Share of a node's device time for image steps while text waits there too; either kind alone has all.",
        ge=0.05,
        le=0.95,
    ),
    _field(
        "feature_cache_bytes",
        "Most bytes of encoder outputs that each rank keeps on its device, for requests with equal media; 0: none.",
        ge=0,
        le=1099511627776,
    ),
    _field(
        "wait_spin_us",
        "Microseconds for which api, conductor and workers busy-poll for messages after the last one.",
        default_text="50000 beside accelerators with 4 cores per process, else 0",
        ge=0,
        le=10000000,
    ),
    _field(
        "hang_s",
        "Seconds without a heartbeat or, with ready work, without a step, after which a process is restarted.",
        ge=3.0,
        le=3600.0,
    ),
    _field(
        "step_limit_s",
        "Seconds after which one step of a CPU rank, which computes, counts as an endless loop; at least `hang_s`.",
        ge=1.0,
        le=86400.0,
    ),
    Setting(
        key="model_kwargs",
        kind="mapping",
        default_text="the model's",
        doc="Options of the model itself; `mstarctl models show` lists them.",
    ),
    Setting(
        key="node_groups",
        kind="list of section",
        required=True,
        doc="Placement of nodes on ranks. A node may be in several groups, for different walks.",
    ),
    Setting(
        key="node_groups[].node_names",
        kind="list of string",
        required=True,
        doc="Nodes of the group. A node on a cache branch follows its parent unless it is named.",
    ),
    Setting(
        key="node_groups[].ranks",
        kind="list of integer",
        required=True,
        ge=0,
        le=1023,
        doc="Ranks that run the nodes; rank i uses the i-th device. More ranks than tp_size are replicas.",
    ),
    Setting(
        key="node_groups[].graph_walks",
        kind="list of string",
        default_text="all walks",
        nullable=True,
        doc="Walks in which this group runs its nodes.",
    ),
    Setting(
        key="node_groups[].tp_size",
        kind="integer",
        default=1,
        ge=1,
        le=64,
        doc="Ranks that share each node by tensor parallelism; divides the number of ranks.",
    ),
    Setting(
        key="node_groups[].memory_fraction",
        kind="number",
        default_text="an even part of kv_cache.memory_fraction",
        nullable=True,
        gt=0,
        le=1,
        doc="Share of its device's memory that each rank of the group may use, weights included.",
    ),
    Setting(
        key="node_groups[].device_gb",
        kind="number",
        default_text="not stated",
        nullable=True,
        gt=0,
        le=65536,
        doc="Least GB (10^9 bytes) of the device of each rank, by which `--gpus auto:N` chooses among shipped files.",
    ),
    Setting(key="kv_cache", kind="section", doc="Page pool of every node with a cache."),
    _field("kv_cache.page_size", "Tokens of a page, for nodes that do not state their own.", ge=1, le=4096),
    _field(
        "kv_cache.pages",
        "Pages of the pool. Not together with tokens.",
        default_text="from memory_fraction",
        ge=1,
        le=1073741824,
    ),
    _field(
        "kv_cache.tokens",
        "Tokens that the pool holds. Not together with pages.",
        default_text="from memory_fraction",
        ge=1,
        le=1099511627776,
    ),
    _field(
        "kv_cache.memory_fraction",
        "Share of a device's memory that all ranks of the deployment on it may use, weights and reserve included.",
        gt=0,
        le=1,
    ),
    _field(
        "kv_cache.reserve_bytes",
        "Bytes of each rank's share that pools leave free, for graphs, workspaces and activations.",
        default_text="2 GiB on cuda, 0 on cpu",
        ge=0,
        le=1099511627776,
    ),
    _field(
        "kv_cache.share",
        "Node -> its share of a rank's pool memory; the sum is at most 1, and other nodes divide the rest evenly.",
        default={},
        default_text="{}",
    ),
    _field("kv_cache.prefix_cache", "Keep pages of finished requests for later prompts with the same prefix."),
    _field(
        "kv_cache.share_between_keys",
        "Let requests of different API keys reuse prefixes of each other; `cached_tokens` then shows what others sent.",
    ),
    Setting(key="transport", kind="section", doc="Transport of tensors between ranks."),
    _field(
        "transport.protocol",
        "SHM: shared memory, and CUDA IPC between GPUs. TCP, RDMA: Mooncake's transfer engine.",
        choices=("SHM", "TCP", "RDMA"),
    ),
    _field("transport.port", "First port of TCP and RDMA; rank i uses those from port + 16 i.", ge=1, le=65535),
    _field(
        "transport.device",
        "TCP: interface, address or host name of this host; RDMA: adapters, separated by commas.",
        default_text="the loopback address; all adapters",
    ),
    Setting(key="logs", kind="section", doc="Retention of logs."),
    _field(
        "logs.max_bytes", "Size at which a log file is rotated; one rotated file stays.", ge=65_536, le=1099511627776
    ),
    _field("logs.keep_starts", "Starts of a name whose logs stay, the current one included.", ge=1, le=10_000),
    _field(
        "logs.max_days",
        "Days after which lines and earlier starts are removed; files are rotated at half of it.",
        default_text="no limit",
        gt=0,
        le=36_500,
    ),
    Setting(key="api", kind="section", doc="The api's address and limits."),
    _field("api.host", "Address to listen on."),
    _field("api.port", "Port to listen on.", ge=1, le=65535),
    _field("api.bind_when_ready", "Listen only once the model is ready."),
    _field("api.console", "Serve the web page at `/`."),
    _field("api.strict_model", "Refuse requests that name another model."),
    _field("api.api_key_file", "File with the API keys, one per line; `mstarctl reload` reads it again."),
    _field("api.metrics_key_file", "File with keys that open /metrics and nothing else."),
    _field("api.metrics_open", "Serve /metrics without an API key."),
    _field("api.unknown_params", "Effect of an unknown request parameter.", choices=("error", "warn")),
    _field("api.timeout_s", "Maximum seconds of a request, queue included.", gt=0, le=86400),
    _field(
        "api.stall_timeout_s", "Seconds without reading after which a client counts as disconnected.", gt=0, le=86400
    ),
    _field("api.max_body_bytes", "Most bytes of a request body.", ge=1024, le=1099511627776),
    _field("api.max_text_bytes", "Most bytes of a text field.", ge=1, le=1099511627776),
    _field("api.max_files", "Most uploaded files of a request.", ge=0, le=4096),
    _field("api.max_speech_chars", "Most characters of a speech request.", ge=1, le=1048576),
    _field(
        "api.pool_processes",
        "Processes that decode media and tokenise.",
        default_text="1; up to 4, one per 4 cores, once files wait, or from the start for pi05",
        ge=1,
        le=256,
    ),
    _field("api.max_n", "Most answers (`n`) of one request.", ge=1, le=128),
    _field("api.max_requests_per_key", "Most requests of one API key at once; 0 means no limit.", ge=0, le=1048576),
    _field("api.max_connections", "Most connections at once; at the limit, idle ones are closed.", ge=8, le=1048576),
    _field("api.tls_cert", "PEM file with the certificate; the api then serves HTTPS only."),
    _field("api.tls_key", "PEM file with the certificate's key."),
    _field("api.cors_origins", "Origins that browsers may call from.", default_text="null", nullable=True),
    _field(
        "api.remote_media",
        "Hosts (`HOST` or `HOST:PORT`) that media may be fetched from.",
        default_text="null",
        nullable=True,
    ),
    _field("api.max_image_pixels", "Most pixels of an image.", ge=1, le=1073741824),
    _field("api.max_image_side", "Most pixels of a side of an image.", ge=1, le=65535),
    _field("api.max_audio_s", "Maximum seconds of a sound.", gt=0, le=86400),
    _field("api.max_video_s", "Maximum seconds of a video.", gt=0, le=86400),
    _field("api.max_video_frames", "Most decoded frames of a video.", ge=1, le=1048576),
    _field("api.max_video_width", "Most pixels of a video's longer side.", ge=1, le=65535),
    _field("api.max_video_height", "Most pixels of a video's shorter side.", ge=1, le=65535),
    _field("api.max_decoded_bytes", "Most bytes that a request's media decode to.", ge=1, le=1099511627776),
)


def words_of(parent: str) -> dict[str, Setting]:
    """Return the settings of a section by their last part; "" is the top."""
    return {item.word: item for item in SETTINGS if item.parent == parent}
