"""Keys of a deployment file: type, range, default and one line of documentation each. Read by load and docs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from mstar_core.config.deployment import ApiConfig, DeploymentSpec, KVCacheConfig
from mstar_core.plugin.params import ValueSpec

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


_KV, _API = KVCacheConfig(), ApiConfig()
_SPEC: Final = {field.name: field.default for field in msgspec.structs.fields(DeploymentSpec)}


def _api(word: str, kind: str, doc: str, **limits: Any) -> Setting:
    return Setting(key=f"api.{word}", kind=kind, doc=doc, default=getattr(_API, word), **limits)


def _kv(word: str, kind: str, doc: str, **limits: Any) -> Setting:
    return Setting(key=f"kv_cache.{word}", kind=kind, doc=doc, default=getattr(_KV, word), **limits)


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting(
        key="model",
        kind="string",
        required=True,
        doc="Name or alias of the model; `NAME:tiny` uses its embedded default checkpoint.",
    ),
    Setting(key="name", kind="string", default_text="the model's name", nullable=True, doc="Name of the deployment."),
    Setting(
        key="weights",
        kind="string",
        default_text="the official weights",
        nullable=True,
        doc="Folder to read weights from; nothing is downloaded.",
    ),
    Setting(
        key="dtype",
        kind="string",
        default_text="bfloat16 on cuda, float32 on cpu",
        nullable=True,
        choices=("bfloat16", "float16", "float32"),
        doc="Number format of the nodes that do not state their own.",
    ),
    Setting(
        key="attention",
        kind="string",
        default_text="flashinfer on cuda, torch on cpu",
        nullable=True,
        choices=("flashinfer", "torch"),
        doc="Attention backend. There is no fallback: the start fails if it cannot run.",
    ),
    Setting(
        key="quantization",
        kind="string",
        default=_SPEC["quantization"],
        choices=("none", "fp8"),
        doc="Number format of the weights of nodes with a cache. fp8 halves them; it needs half precision on cuda.",
    ),
    Setting(
        key="max_seq_len",
        kind="integer",
        default_text="the model's",
        ge=1,
        le=16_777_216,
        doc="Most tokens of one request, prompt and output together.",
    ),
    Setting(
        key="max_concurrent_requests",
        kind="integer",
        default_text="128 on GPUs of 120 GiB and more, 64 on GPUs of 75 GiB and more, else 32",
        nullable=True,
        ge=1,
        le=65_536,
        doc="Requests that run at once; further ones wait.",
    ),
    Setting(
        key="max_queue",
        kind="integer",
        default=_SPEC["max_queue"],
        ge=0,
        le=1_048_576,
        doc="Requests that wait beyond the running ones; further ones are refused with 429.",
    ),
    Setting(
        key="token_budget",
        kind="integer",
        default=_SPEC["token_budget"],
        ge=1,
        le=1_048_576,
        doc="Most tokens of one step; longer prompts are prefilled in chunks.",
    ),
    Setting(
        key="image_share",
        kind="number",
        default=_SPEC["image_share"],
        ge=0.05,
        le=0.95,
        doc="Share of a node's device time for image steps while text waits there too; either kind alone has all.",
    ),
    Setting(
        key="feature_cache_bytes",
        kind="integer",
        default=_SPEC["feature_cache_bytes"],
        ge=0,
        le=1_099_511_627_776,
        doc="Most bytes of encoder outputs that each rank keeps on its device, for requests with equal media; 0: none.",
    ),
    Setting(
        key="wait_spin_us",
        kind="integer",
        default_text="50000 beside accelerators with 4 cores per process, else 0",
        nullable=True,
        ge=0,
        le=10_000_000,
        doc="Microseconds for which api, conductor and workers busy-poll for messages after the last one.",
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
    Setting(key="kv_cache", kind="section", doc="Page pool of every node with a cache."),
    _kv("page_size", "integer", "Tokens of a page, for nodes that do not state their own.", ge=1, le=4096),
    _kv(
        "pages",
        "integer",
        "Pages of the pool. Not together with tokens.",
        nullable=True,
        default_text="from memory_fraction",
        ge=1,
        le=1_073_741_824,
    ),
    _kv(
        "tokens",
        "integer",
        "Tokens that the pool holds. Not together with pages.",
        nullable=True,
        default_text="from memory_fraction",
        ge=1,
        le=1_099_511_627_776,
    ),
    _kv(
        "memory_fraction",
        "number",
        "Share of a device's memory that all ranks of the deployment on it may use, weights and reserve included.",
        gt=0,
        le=1,
    ),
    _kv(
        "reserve_bytes",
        "integer",
        "Bytes of each rank's share that pools leave free, for graphs, workspaces and activations.",
        nullable=True,
        default_text="2 GiB on cuda, 0 on cpu",
        ge=0,
        le=1_099_511_627_776,
    ),
    _kv(
        "share",
        "mapping",
        "Node -> its share of a rank's pool memory; the sum is at most 1, and other nodes divide the rest evenly.",
        default_text="{}",
    ),
    _kv("prefix_cache", "boolean", "Keep pages of finished requests for later prompts with the same prefix."),
    Setting(key="api", kind="section", doc="The api's address and limits."),
    _api("host", "string", "Address to listen on."),
    _api("port", "integer", "Port to listen on.", ge=1, le=65_535),
    _api("bind_when_ready", "boolean", "Listen only once the model is ready."),
    _api("strict_model", "boolean", "Refuse requests that name another model."),
    _api("metrics_open", "boolean", "Serve /metrics without an API key."),
    _api("unknown_params", "string", "Effect of an unknown request parameter.", choices=("error", "warn")),
    _api("timeout_s", "number", "Maximum seconds of a request, queue included.", gt=0, le=86_400),
    _api(
        "stall_timeout_s",
        "number",
        "Seconds without reading after which a client counts as disconnected.",
        gt=0,
        le=86_400,
    ),
    _api("max_body_bytes", "integer", "Most bytes of a request body.", ge=1024, le=1_099_511_627_776),
    _api("max_text_bytes", "integer", "Most bytes of a text field.", ge=1, le=1_099_511_627_776),
    _api("max_files", "integer", "Most uploaded files of a request.", ge=0, le=4096),
    _api("max_speech_chars", "integer", "Most characters of a speech request.", ge=1, le=1_048_576),
    _api(
        "pool_processes",
        "integer",
        "Processes that decode media and tokenise.",
        nullable=True,
        default_text="1; up to 4, one per 4 cores, for a model whose files are decoded in parallel (pi05)",
        ge=1,
        le=256,
    ),
    _api("max_n", "integer", "Most answers (`n`) of one request.", ge=1, le=128),
    _api(
        "max_requests_per_key", "integer", "Most requests of one API key at once; 0 means no limit.", ge=0, le=1_048_576
    ),
    _api("tls_cert", "string", "PEM file with the certificate; the api then serves HTTPS only.", nullable=True),
    _api("tls_key", "string", "PEM file with the certificate's key.", nullable=True),
    _api("cors_origins", "list of string", "Origins that browsers may call from.", default_text="null", nullable=True),
    _api(
        "remote_media",
        "list of string",
        "Hosts (`HOST` or `HOST:PORT`) that media may be fetched from.",
        default_text="null",
        nullable=True,
    ),
    _api("max_image_pixels", "integer", "Most pixels of an image.", ge=1, le=1_073_741_824),
    _api("max_image_side", "integer", "Most pixels of a side of an image.", ge=1, le=65_535),
    _api("max_audio_s", "number", "Maximum seconds of a sound.", gt=0, le=86_400),
    _api("max_video_s", "number", "Maximum seconds of a video.", gt=0, le=86_400),
    _api("max_video_frames", "integer", "Most decoded frames of a video.", ge=1, le=1_048_576),
    _api("max_video_width", "integer", "Most pixels of a video's longer side.", ge=1, le=65_535),
    _api("max_video_height", "integer", "Most pixels of a video's shorter side.", ge=1, le=65_535),
    _api("max_decoded_bytes", "integer", "Most bytes that a request's media decode to.", ge=1, le=1_099_511_627_776),
)


def words_of(parent: str) -> dict[str, Setting]:
    """Return the settings of a section by their last part; "" is the top."""
    return {item.word: item for item in SETTINGS if item.parent == parent}
