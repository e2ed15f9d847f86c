"""Checked configuration of a deployment: every key of a deployment file, declared once, and the source of its value.

The keys (`mstar_core.config.schema`), their checks, `--set`, the deployment record, docs and `config explain` follow
from these fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from mstar_core.config.hosts import port_range
from mstar_core.config.key import ConfigKey
from mstar_core.config.located import Located
from mstar_core.errors import ConfigError

EVERYWHERE: Final = ("0.0.0.0", "::")
"""Hosts on which every address of the machine listens."""

GPU_RESERVE_BYTES: Final = 2 << 30
"""Memory that pools leave free on a GPU by default, for its context, CUDA graphs, workspaces and activations."""

TIB: Final = 1 << 40
MIB: Final = 1 << 20


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that share ranks. graph_walks: canonical names, None = all. key: the group's place, `node_groups.0`."""

    node_names: Annotated[
        tuple[str, ...],
        ConfigKey(
            "Nodes of the group. A node on a cache branch follows its parent unless it is named.", is_required=True
        ),
    ]
    ranks: Annotated[
        tuple[int, ...],
        ConfigKey(
            "Ranks that run the nodes; rank i uses the i-th device. More ranks than tp_size are replicas.",
            is_required=True,
            ge=0,
            le=1023,
        ),
    ]
    graph_walks: Annotated[
        tuple[str, ...] | None,
        ConfigKey("Walks in which this group runs its nodes.", default_text="all walks"),
    ] = None
    tp_size: Annotated[
        int, ConfigKey("Ranks that share each node by tensor parallelism; divides the number of ranks.", ge=1, le=64)
    ] = 1
    memory_fraction: Annotated[
        float | None,
        ConfigKey(
            "Share of its device's memory that each rank of the group may use, weights included.",
            default_text="an even part of kv_cache.memory_fraction",
            gt=0,
            le=1,
        ),
    ] = None
    device_gb: Annotated[
        float | None,
        ConfigKey(
            "Least GB (10^9 bytes) of the device of each rank, by which `--gpus auto:N` chooses among shipped files.",
            default_text="not stated",
            gt=0,
            le=65536,
        ),
    ] = None
    key: str

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks in groups of tp_size, in the order of the file."""
        return tuple(self.ranks[i : i + self.tp_size] for i in range(0, len(self.ranks), self.tp_size))


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Page pools. `pages` or `tokens` sets each node's size; otherwise a rank's nodes divide its memory by `share`."""

    page_size: Annotated[int, ConfigKey("Tokens of a page, for nodes that do not state their own.", ge=1, le=4096)] = 16
    pages: Annotated[
        int | None,
        ConfigKey(
            "Pages of the pool. Not together with tokens.", default_text="from memory_fraction", ge=1, le=1_073_741_824
        ),
    ] = None
    tokens: Annotated[
        int | None,
        ConfigKey(
            "Tokens that the pool holds. Not together with pages.",
            default_text="from memory_fraction",
            ge=1,
            le=1_099_511_627_776,
        ),
    ] = None
    memory_fraction: Annotated[
        float,
        ConfigKey(
            "Share of a device's memory that all ranks of the deployment on it may use, weights and reserve included.",
            gt=0,
            le=1,
        ),
    ] = 0.85
    reserve_bytes: Annotated[
        int | None,
        ConfigKey(
            "Bytes of each rank's share that pools leave free, for graphs, workspaces and activations.",
            default_text="2 GiB on cuda, 0 on cpu",
            ge=0,
            le=TIB,
        ),
    ] = None
    share: Annotated[
        dict[str, float],
        ConfigKey(
            "Node -> its share of a rank's pool memory; the sum is at most 1, and other nodes divide the rest evenly.",
            default_text="{}",
        ),
    ] = {}
    prefix_cache: Annotated[
        bool, ConfigKey("Keep pages of finished requests for later prompts with the same prefix.")
    ] = True
    share_between_keys: Annotated[
        bool,
        ConfigKey(
            "Let requests of different API keys reuse prefixes of each other; `cached_tokens` then shows what others"
            " sent."
        ),
    ] = False


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Transport of tensors between ranks. port and device are of TCP and RDMA."""

    protocol: Annotated[
        str,
        ConfigKey(
            "SHM: shared memory, and CUDA IPC between GPUs. TCP, RDMA: Mooncake's transfer engine.",
            choices=("SHM", "TCP", "RDMA"),
        ),
    ] = "SHM"
    port: Annotated[
        int, ConfigKey("First port of TCP and RDMA; rank i uses those from port + 16 i.", ge=1, le=65535)
    ] = 8080
    device: Annotated[
        str | None,
        ConfigKey(
            "TCP: interface, address or host name of this host; RDMA: adapters, separated by commas.",
            default_text="the loopback address; all adapters",
        ),
    ] = None


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts of a Ray cluster on which the ranks run; without an address all ranks are on this host."""

    address: Annotated[
        str | None,
        ConfigKey(
            "Ray cluster whose hosts run the ranks: `HOST:PORT` of its head, or `auto` for the one of this host.",
            default_text="none: all ranks on this host",
        ),
    ] = None
    devices: Annotated[
        tuple[str, ...],
        ConfigKey(
            "Device of each rank: `HOST:INDEX`, `HOST:cpu`, or `HOST` for any GPU of it.",
            default_text="chosen on as few hosts as possible",
            nullable=True,
            is_repeatable=True,
        ),
    ] = ()
    spread: Annotated[
        bool, ConfigKey("Place replicas on as many hosts as possible; tensor-parallel groups stay together.")
    ] = False
    network: Annotated[
        str | None,
        ConfigKey(
            "Interface (`eth0`) or network (`10.0.0.0/24`) between the hosts.",
            default_text="the addresses that Ray uses",
        ),
    ] = None
    ports: Annotated[
        str | None,
        ConfigKey("Range of TCP ports that processes listen on for other hosts: `20000-20999`.", default_text="any"),
    ] = None

    @property
    def port_range(self) -> tuple[int, int] | None:
        """First and last port of `ports`; None: any port."""
        return None if self.ports is None else port_range(self.ports)


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA adapters: those of the start, and the room for them, which `up` decides."""

    adapters: Annotated[
        dict[str, str],
        ConfigKey("Name -> folder of each LoRA adapter that is loaded at the start.", default_text="{}"),
    ] = {}
    max_adapters: Annotated[
        int | None,
        ConfigKey(
            "LoRA adapters that can be loaded at once; 0: none.",
            default_text="8 if there are adapters, or as many as there are",
            ge=0,
            le=256,
        ),
    ] = None
    max_rank: Annotated[
        int | None,
        ConfigKey(
            "Largest rank of a LoRA adapter, for which memory is reserved.",
            default_text="the largest at the start, at least 16",
            ge=1,
            le=512,
        ),
    ] = None


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Retention of logs. A file is rotated at half of max_days, so that the rotated file is replaced in time."""

    max_bytes: Annotated[
        int, ConfigKey("Size at which a log file is rotated; one rotated file stays.", ge=65_536, le=TIB)
    ] = 200 * MIB
    keep_starts: Annotated[
        int, ConfigKey("Starts of a name whose logs stay, the current one included.", ge=1, le=10_000)
    ] = 10
    max_days: Annotated[
        float | None,
        ConfigKey(
            "Days after which lines and earlier starts are removed; files are rotated at half of it.",
            default_text="no limit",
            gt=0,
            le=36_500,
        ),
    ] = None

    @property
    def rotate_s(self) -> float | None:
        """Age of a file in seconds at which it is rotated."""
        return None if self.max_days is None else self.max_days * 86_400 / 2


KEEP_LOGS: Final = LogConfig()


class IceServer(msgspec.Struct, frozen=True, kw_only=True):
    """STUN or TURN server of WebRTC calls. A TURN server has a user with a password, or a secret that makes both."""

    urls: Annotated[
        tuple[str, ...],
        ConfigKey("`stun:HOST:PORT`, `turn:HOST:PORT`, with `?transport=tcp`, or `turns:HOST:PORT`.", is_required=True),
    ]
    username: Annotated[
        str | None,
        ConfigKey("User of a TURN server. With secret_file: the name behind the time of expiry.", default_text="none"),
    ] = None
    credential_file: Annotated[
        str | None, ConfigKey("File with the password of the user, in one line.", is_reread=True)
    ] = None
    secret_file: Annotated[
        str | None,
        ConfigKey("File with the secret of the TURN server, which makes users that expire.", is_reread=True),
    ] = None


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The api's address and limits (docs/http-api.md), and the secrets of its clients, which no file names.

    api_keys: of the command line, then the last `keys_in_file` from api_key_file. metrics_keys: from metrics_key_file;
    they open /metrics alone. ice_secrets: content of the file of each of realtime_ice_servers, empty without one.
    max_connections is also bounded by the limit of open files.
    """

    host: Annotated[str, ConfigKey("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, ConfigKey("Port to listen on.", ge=1, le=65535)] = 8000
    bind_when_ready: Annotated[bool, ConfigKey("Listen only once the model is ready.")] = False
    wake_on_request: Annotated[
        bool,
        ConfigKey(
            "Let a request wake a deployment or nodes that sleep, and wait for that; otherwise it is refused with 503."
        ),
    ] = True
    console: Annotated[bool, ConfigKey("Serve the web page at `/`.")] = True
    aliases: Annotated[
        tuple[str, ...],
        ConfigKey("More names that requests may give the model; `*` is any name.", default_text="null", nullable=True),
    ] = ()
    strict_model: Annotated[bool, ConfigKey("Refuse requests that name another model.", is_live=True)] = False
    api_key_file: Annotated[str | None, ConfigKey("File with the API keys, one per line.", is_reread=True)] = None
    metrics_key_file: Annotated[
        str | None, ConfigKey("File with keys that open /metrics and nothing else.", is_reread=True)
    ] = None
    metrics_open: Annotated[bool, ConfigKey("Serve /metrics without an API key.")] = False
    unknown_params: Annotated[str, ConfigKey("Effect of an unknown request parameter.", choices=("error", "warn"))] = (
        "error"
    )
    timeout_s: Annotated[
        float, ConfigKey("Maximum seconds of a request, queue included.", gt=0, le=86400, is_live=True)
    ] = 600.0
    stall_timeout_s: Annotated[
        float,
        ConfigKey("Seconds without reading after which a client counts as disconnected.", gt=0, le=86400, is_live=True),
    ] = 30.0
    max_body_bytes: Annotated[int, ConfigKey("Most bytes of a request body.", ge=1024, le=TIB)] = 128 * MIB
    max_text_bytes: Annotated[int, ConfigKey("Most bytes of a text field.", ge=1, le=TIB, is_live=True)] = MIB
    max_files: Annotated[int, ConfigKey("Most uploaded files of a request.", ge=0, le=4096, is_live=True)] = 32
    max_speech_chars: Annotated[
        int, ConfigKey("Most characters of a speech request.", ge=1, le=1_048_576, is_live=True)
    ] = 4096
    pool_processes: Annotated[
        int | None,
        ConfigKey(
            "Processes that decode media and tokenise.",
            default_text="1; up to 8, one per 2 cores, for models that take files",
            ge=1,
            le=256,
        ),
    ] = None
    max_n: Annotated[int, ConfigKey("Most answers (`n`) of one request.", ge=1, le=128, is_live=True)] = 8
    max_prompts: Annotated[
        int, ConfigKey("Most prompts or inputs of one completion or embedding request.", ge=1, le=65_536, is_live=True)
    ] = 2048
    max_requests_per_key: Annotated[
        int, ConfigKey("Most requests of one API key at once; 0 means no limit.", ge=0, le=1_048_576, is_live=True)
    ] = 0
    max_connections: Annotated[
        int, ConfigKey("Most connections at once; at the limit, idle ones are closed.", ge=8, le=1_048_576)
    ] = 2048
    responses_ttl_s: Annotated[
        float, ConfigKey("Seconds that a stored response is kept after its last use.", gt=0, le=31_536_000)
    ] = 86400.0
    responses_max_count: Annotated[int, ConfigKey("Most stored responses; 0 stores none.", ge=0, le=10_000_000)] = (
        10_000
    )
    responses_max_bytes: Annotated[
        int, ConfigKey("Most bytes of stored responses with their inputs.", ge=65536, le=TIB)
    ] = 256 * MIB
    videos_ttl_s: Annotated[float, ConfigKey("Seconds that a video is kept after its end.", gt=0, le=31_536_000)] = (
        86400.0
    )
    videos_max_bytes: Annotated[
        int, ConfigKey("Most bytes of finished videos; beyond it the one that ended first leaves.", ge=65536, le=TIB)
    ] = 4096 * MIB
    videos_timeout_s: Annotated[
        float, ConfigKey("Time limit of a video, if it is longer than that of requests.", gt=0, le=604_800)
    ] = 3600.0
    realtime_max_sessions: Annotated[int, ConfigKey("Most realtime sessions at once.", ge=1, le=65_536)] = 64
    realtime_idle_s: Annotated[
        float, ConfigKey("Seconds without an event of the client after which a realtime session ends.", gt=0, le=86400)
    ] = 600.0
    realtime_max_s: Annotated[float, ConfigKey("Maximum seconds of a realtime session.", gt=0, le=86400)] = 3600.0
    realtime_ice_servers: Annotated[
        tuple[IceServer, ...],
        ConfigKey("STUN and TURN servers of WebRTC calls.", default_text="null", nullable=True),
    ] = ()
    sessions_idle_s: Annotated[
        float, ConfigKey("Seconds after the last request of a session until it ends.", gt=0, le=86400)
    ] = 600.0
    sessions_ttl_s: Annotated[
        float, ConfigKey("Seconds after the first request of a session until it ends.", gt=0, le=31_536_000)
    ] = 86400.0
    sessions_max_count: Annotated[
        int, ConfigKey("Most sessions; beyond it the one that was idle for longest ends.", ge=1, le=1_048_576)
    ] = 1024
    sessions_media_bytes: Annotated[
        int,
        ConfigKey(
            "Most bytes of decoded images that all sessions keep; beyond it those used least recently leave; 0: none.",
            ge=0,
            le=TIB,
        ),
    ] = 256 * MIB
    tls_cert: Annotated[
        str | None, ConfigKey("PEM file with the certificate; the api then serves HTTPS only.", is_reread=True)
    ] = None
    tls_key: Annotated[str | None, ConfigKey("PEM file with the certificate's key.", is_reread=True)] = None
    cors_origins: Annotated[
        tuple[str, ...], ConfigKey("Origins that browsers may call from.", default_text="null", nullable=True)
    ] = ()
    remote_media: Annotated[
        tuple[str, ...],
        ConfigKey("Hosts (`HOST` or `HOST:PORT`) that media may be fetched from.", default_text="null", nullable=True),
    ] = ()
    max_image_pixels: Annotated[int, ConfigKey("Most pixels of an image.", ge=1, le=1_073_741_824)] = 50_000_000
    max_image_side: Annotated[int, ConfigKey("Most pixels of a side of an image.", ge=1, le=65535)] = 16_384
    max_audio_s: Annotated[float, ConfigKey("Maximum seconds of a sound.", gt=0, le=86400)] = 1800.0
    max_video_s: Annotated[float, ConfigKey("Maximum seconds of a video.", gt=0, le=86400)] = 600.0
    max_video_frames: Annotated[int, ConfigKey("Most decoded frames of a video.", ge=1, le=1_048_576)] = 768
    max_video_width: Annotated[int, ConfigKey("Most pixels of a video's longer side.", ge=1, le=65535)] = 4096
    max_video_height: Annotated[int, ConfigKey("Most pixels of a video's shorter side.", ge=1, le=65535)] = 2304
    max_decoded_bytes: Annotated[int, ConfigKey("Most bytes that a request's media decode to.", ge=1, le=TIB)] = (
        1024 * MIB
    )
    api_keys: tuple[str, ...] = ()
    keys_in_file: int = 0
    metrics_keys: tuple[str, ...] = ()
    ice_secrets: tuple[str, ...] = ()

    @property
    def secrets(self) -> tuple[str, ...]:
        """The keys of both kinds and the secrets of TURN servers, which no log and no view shows."""
        return (*self.api_keys, *self.metrics_keys, *filter(None, self.ice_secrets))

    @property
    def url(self) -> str:
        """The api's URL for a client on this host."""
        host = "127.0.0.1" if self.host in EVERYWHERE else self.host
        scheme = "http" if self.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a deployment. Made by `resolve`; the deployment record extends it.

    model: its name without the variant. variant: of an embedded checkpoint, such as `tiny`, or empty. provenance: key
    -> `FILE:LINE`, `default`, or the flag that set it.
    """

    model: Annotated[
        str,
        ConfigKey(
            "Name or alias of the model; `NAME:tiny` and `NAME:mini` use an embedded checkpoint: random, trained.",
            is_required=True,
        ),
    ]
    name: Annotated[str, ConfigKey("Name of the deployment.", default_text="the model's name", nullable=True)]
    weights: Annotated[
        str | None,
        ConfigKey("Folder to read weights from; nothing is downloaded.", default_text="the official weights"),
    ] = None
    dtype: Annotated[
        str | None,
        ConfigKey(
            "Number format of the nodes that do not state their own.",
            default_text="bfloat16 on cuda, float32 on cpu",
            choices=("bfloat16", "float16", "float32"),
        ),
    ] = None
    attention: Annotated[
        str | None,
        ConfigKey(
            "Attention backend. The start fails if the one that is set cannot run.",
            default_text="flashinfer on cuda, torch on cpu and for heads that are not 64, 128 or 256 wide",
            choices=("flashinfer", "torch"),
        ),
    ] = None
    quantization: Annotated[
        str,
        ConfigKey(
            "Number format of the weights of nodes with a cache, and of layers that a plugin names, such as Wan's. fp8"
            " halves them, those of experts too; it needs half precision on cuda, and computes slowly on cpu.",
            choices=("none", "fp8"),
        ),
    ] = "none"
    memory_budget: Annotated[
        str | None,
        ConfigKey(
            "Memory that it takes of each device, so that others can share the device: `20GiB`, `25%`, or `auto`: as"
            " planned from weights, caches and reserve.",
            default_text="the whole device",
        ),
    ] = None
    memory_limit: Annotated[
        bool,
        ConfigKey(
            "Run on a GPU as on one of the size of `memory_budget`: PyTorch refuses a rank more, and caches take"
            " `kv_cache.memory_fraction` of it. Without it the budget sizes caches only."
        ),
    ] = False
    max_seq_len: Annotated[
        int,
        ConfigKey(
            "Most tokens of one request: its prompt with the tokens that the model adds, and its output.",
            default=None,
            default_text="the model's",
            ge=16,
            le=16_777_216,
        ),
    ] = 8192
    max_concurrent_requests: Annotated[
        int | None,
        ConfigKey(
            "Requests that run at once; further ones wait.",
            default_text="128 on GPUs of 120 GiB and more, 64 from 75 GiB on, else 32; fewer if caches are small",
            ge=1,
            le=65_536,
            is_live=True,
        ),
    ] = None
    max_queue: Annotated[
        int,
        ConfigKey(
            "Requests that wait beyond the running ones; further ones are refused with 429.",
            ge=0,
            le=1_048_576,
            is_live=True,
        ),
    ] = 128
    token_budget: Annotated[
        int, ConfigKey("Most tokens of one step; longer prompts are prefilled in chunks.", ge=1, le=1_048_576)
    ] = 2048
    image_share: Annotated[
        float,
        ConfigKey(
            "Share of a node's device time for image steps while text waits there too; either kind alone has all.",
            ge=0.05,
            le=0.95,
        ),
    ] = 0.5
    steps_at_once: Annotated[
        int,
        ConfigKey(
            "Most captured decode steps of one launch on a GPU, while they take a few milliseconds; 1: one by one.",
            ge=1,
            le=32,
        ),
    ] = 8
    yield_to_sound: Annotated[
        bool,
        ConfigKey("Hold encoders and new prompts back while they would make sound that has begun run dry."),
    ] = True
    first_sound_requests: Annotated[
        int,
        ConfigKey(
            "Open requests of a rank up to which the first sound of one goes before further steps; 0: never.",
            ge=0,
            le=65_536,
        ),
    ] = 12
    feature_cache_bytes: Annotated[
        int,
        ConfigKey(
            "Most bytes of encoder outputs that each rank keeps on its device, for requests with equal media; 0: none.",
            ge=0,
            le=TIB,
        ),
    ] = 256 * MIB
    wait_spin_us: Annotated[
        int | None,
        ConfigKey(
            "Microseconds for which api, conductor and workers busy-poll for messages after the last one.",
            default_text="50000 beside accelerators with 4 cores per process, else 0",
            ge=0,
            le=10_000_000,
        ),
    ] = None
    sleepable: Annotated[
        bool,
        ConfigKey(
            "Keep the weights and caches of GPUs in memory that `mstarctl sleep` can give back. CPU ranks always can."
        ),
    ] = False
    sleep_copies: Annotated[
        bool,
        ConfigKey(
            "Keep the copy of a GPU's weights that a sleep of level 1 has made in host memory after the wake: the next "
            "sleep copies nothing, and wakes free nothing. It takes the bytes of the weights while awake too."
        ),
    ] = False
    resume: Annotated[
        bool,
        ConfigKey(
            "Send requests again whose worker or conductor has died, and continue their streams where they stopped."
        ),
    ] = True
    hang_s: Annotated[
        float,
        ConfigKey(
            "Seconds without a heartbeat or, with ready work, without a step, after which a process is restarted.",
            ge=3.0,
            le=3600.0,
        ),
    ] = 10.0
    step_limit_s: Annotated[
        float,
        ConfigKey(
            "Seconds after which one step of a CPU rank, which computes, counts as an endless loop; at least `hang_s`.",
            ge=1.0,
            le=86400.0,
        ),
    ] = 300.0
    warm: Annotated[
        str,
        ConfigKey(
            "CUDA graphs that are captured before a first start is ready: first sizes of each step, or all planned.",
            choices=("first", "full"),
        ),
    ] = "first"
    standby: Annotated[
        bool | None,
        ConfigKey(
            "Keep a process ready that has imported what a worker needs and takes the place of one that dies.",
            default_text="true beside GPUs, else false",
        ),
    ] = None
    model_kwargs: Annotated[
        dict[str, Any],
        ConfigKey(
            "Options of the model itself; `mstarctl models show` lists them.", default=None, default_text="the model's"
        ),
    ] = {}
    node_groups: Annotated[
        tuple[NodeGroup, ...],
        ConfigKey(
            "Placement of nodes on ranks. A node may be in several groups, for different walks.", is_required=True
        ),
    ] = ()
    kv_cache: Annotated[KVCacheConfig, ConfigKey("Page pool of every node with a cache.")] = KVCacheConfig()
    lora: Annotated[LoraConfig, ConfigKey("LoRA adapters.")] = LoraConfig()
    transport: Annotated[TransportConfig, ConfigKey("Transport of tensors between ranks.")] = TransportConfig()
    ray: Annotated[RayConfig, ConfigKey("Several hosts.")] = RayConfig()
    logs: Annotated[LogConfig, ConfigKey("Retention of logs.")] = LogConfig()
    api: Annotated[ApiConfig, ConfigKey("The api's address and limits.")] = ApiConfig()
    variant: str = ""
    config_file: str | None = None
    provenance: dict[str, str] = {}

    @property
    def rank_count(self) -> int:
        """Number of ranks that the node groups use: 0 .. rank_count - 1."""
        return max(rank for group in self.node_groups for rank in group.ranks) + 1

    def source(self, key: str) -> str:
        """Return the source of the value of `key`."""
        return self.provenance.get(key, "default")

    def error(self, key: str, title: str, detail: str = "", hint: str = "", *, at: str = "") -> ConfigError:
        """Return a ConfigError for the value of `key`, with its file and line or the flag that set it.

        at: another key whose place is shown, if `key` itself may have been left to its default.
        """
        source = self.source(at or key)
        file, _, line = source.rpartition(":")
        is_line = bool(file) and line.isdigit() and not source.startswith("--")
        place = Located(None, source, file, int(line)) if is_line else Located(None, source)
        return place.error(title, key, detail, hint)

    def group_error(self, group: NodeGroup, word: str, title: str, detail: str = "", hint: str = "") -> ConfigError:
        """Return a ConfigError for a key of a node group, at the place of the group."""
        return self.error(f"{group.key}.{word}", title, detail, hint, at=f"{group.key}.node_names")
