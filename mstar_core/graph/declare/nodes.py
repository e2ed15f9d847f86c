"""Declaration of nodes and their ports. Read by every process."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from mstar_core.errors import GraphError, did_you_mean


class EngineKind(enum.StrEnum):
    """Engine that runs a node. KV_CACHE keeps a paged cache per request, STATELESS keeps nothing."""

    KV_CACHE = "kv_cache"
    STATELESS = "stateless"


KV_CACHE: Final = EngineKind.KV_CACHE
STATELESS: Final = EngineKind.STATELESS

STEP: Final = "$step"
"""Input name: the iteration index of the enclosing loop, per request."""

CLIENT: Final = "$client"
"""Edge target: the value leaves the graph as an output of the request."""

MAIN: Final = "main"
"""Cache branch that every request has."""

_PORT = re.compile(r"^(?P<dtype>[a-z]+\d+|any)(?:\[(?P<shape>[^\]]*)\])?(?P<optional>\?)?$")
DTYPES: Final = frozenset({"i64", "i32", "i16", "u8", "b8", "f32", "f16", "bf16", "any"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PortType:
    """Type of a port, parsed from text such as `"i64[n]"` or `"f32[n,2048]?"`.

    A dimension is a number (fixed) or a name (any size). `optional` ports may be absent.
    """

    dtype: str
    shape: tuple[int | str, ...] = ()
    optional: bool = False

    @classmethod
    def parse(cls, text: str, where: str = "port") -> PortType:
        """Parse a port type. Raises GraphError naming `where`."""
        match = _PORT.match(text.replace(" ", ""))
        if match is None or match["dtype"] not in DTYPES:
            raise GraphError(
                f"{where}: {text!r} is not a port type",
                hint=f'write "i64[n]" with one of {sorted(DTYPES)}',
                place=where,
            )
        dims = [d for d in (match["shape"] or "").split(",") if d]
        shape = tuple(int(d) if d.isdigit() else d for d in dims)
        return cls(dtype=match["dtype"], shape=shape, optional=bool(match["optional"]))

    def accepts(self, other: PortType) -> bool:
        """Whether a value of type `other` may flow into this port (rank and fixed sizes agree)."""
        if "any" not in (self.dtype, other.dtype) and self.dtype != other.dtype:
            return False
        if not self.shape or not other.shape or len(self.shape) != len(other.shape):
            return not self.shape or not other.shape
        pairs = zip(self.shape, other.shape, strict=True)
        return all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in pairs)

    def __str__(self) -> str:
        shape = f"[{','.join(map(str, self.shape))}]" if self.shape else ""
        return f"{self.dtype}{shape}{'?' if self.optional else ''}"


@dataclass(frozen=True, slots=True)
class Attachment:
    """An output port of a KV node that is kept beside its cached pages, one row of `width` values per token.

    Rows are in the node's dtype. A pass whose tokens are found in the prefix cache gets them back, so that it may be
    skipped although its job wants the port. They are kept of passes with inputs other than ids alone, which decode
    steps are not. The module must give [tokens, width] for every such pass, whether or not its job wants the port.
    """

    port: str
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Shape of a node's cache. `page` overrides the deployment's page size (in tokens).

    rows: maximum number of candidates with a cache of their own on a branch, over all requests, beside the caches of
    the branches; 0 for a node that never runs several. A job of more candidates is refused, unless they run one
    after another (see `Job.rows`).
    windows: by layer, the newest tokens that a token of a causal pass sees, itself included; 0 for all. Empty: every
    layer sees all. The cache keeps all tokens in either case.
    attached: outputs that are kept with the pages, because other nodes read them for cached tokens too.
    memory: the branch that the module reads on all others by `attend_cross`, as the decoder of an encoder-decoder reads
    its encoder. A pass on that branch fills it by `keep`; passes on others need it filled and never change it.
    """

    layers: int
    kv_heads: int
    head_dim: int
    branches: tuple[str, ...] = (MAIN,)
    page: int | None = None
    rows: int = 0
    request_tokens: int = 1024
    windows: tuple[int, ...] = ()
    attached: tuple[Attachment, ...] = ()
    memory: str | None = None

    def slots(self, requests: int) -> int:
        """Return the maximum number of caches for so many concurrent requests."""
        return (requests + self.rows) * len(self.branches)

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the cache bytes of one token: keys and values of all layers, and attached rows."""
        values = 2 * self.layers * self.kv_heads * self.head_dim + sum(each.width for each in self.attached)
        return values * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """Attention of one use of a KV node, and whether it appends to the cache.

    mask: `causal` or `full` inside the segment; every earlier cached token is always visible.
    positions: `running` (one per token), `shared` (all tokens of the segment take one position), `given` (a port).
    write: whether keys and values are appended to the cache.
    keep: lifetime of the appended tokens; `loop` drops them when the innermost loop around the use ends.
    tokens: length of the segment if its inputs do not determine it (None = counted from the `sequence` ports).
    extra: tokens that the node adds to those counted, such as the two markers of an image.
    """

    mask: Literal["causal", "full"] = "causal"
    positions: Literal["running", "shared", "given"] = "running"
    write: bool = True
    keep: Literal["request", "loop"] = "request"
    tokens: int | None = None
    extra: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling of ids from a node's logits into `port`.

    prefix: `"talker_"` makes the engine read `talker_temperature` and so on from the request.
    history: ids that count for the repetition penalty (`all` = prompt and output, `output`, or `none`).
    suppress: ids that are never drawn. vocabulary: ids that can be drawn, ascending; empty = all. With it the module's
    head has one row for each of these ids and no others, which is faster and changes the result if the model would
    choose another id. Prompts may hold any id.
    vocab: number of ids that the model knows, by which the api checks requests; 0 leaves the check to the worker.
    is_text: the ids are text of an answer, so a request's constraint and its log-probabilities apply to them.
    """

    port: str
    prefix: str = ""
    history: Literal["all", "output", "none"] = "all"
    suppress: tuple[range, ...] = ()
    vocabulary: tuple[range, ...] = ()
    vocab: int = 0
    is_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHints:
    """Tuning of the engine for one KV_CACHE node, measured for its model. No result depends on it.

    A node without hints runs all passes uncaptured, except decode steps and prompts of ids that are sampled from:
    the engine chooses the buckets of these itself.
    """

    capture_sizes: tuple[int, ...] = ()
    """Batch sizes with a CUDA graph, for passes of loops that do not sample. Empty: none are captured."""

    capture_tokens: tuple[int, ...] = ()
    """Numbers of packed tokens with a CUDA graph, for prefixes: whole passes with a full mask outside loops, on empty
    caches, with inputs per token or in the module's `packed_ports`. Empty: none are captured."""

    capture_prompts: tuple[int, ...] = ()
    """Numbers of packed tokens with a CUDA graph, for causal passes outside loops, of any inputs. Empty: none are
    captured."""

    pass_tokens: int = 0
    """Tokens up to which passes with `row_ports` share a forward pass, if that is more than the token budget of a
    step. Passes that append share one of at most two budgets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One component of the graph, declared once and referred to by the object.

    ports: name -> port type text. batch_key: names of ports whose shapes must agree inside one batch.
    hints: tuning of the node's engine; no result depends on it.
    tensor_parallel: whether ranks may compute it together. parallel_sizes: names and values of the sizes that a tp_size
    must divide, besides its KV heads.
    of: for `on_branch` nodes, the node whose weights and ranks they share unless the config places them.
    sequence: (KV) ports whose values are the tokens of a segment, in this order. An id is one token, features are one
    per vector of the last axis. Empty: the only port that a use takes.
    per: `row` runs once per candidate of a request. `request` runs once with all candidates stacked on a first axis
    (port types describe one candidate) and splits outputs along that axis.
    row_ports: (KV) inputs and outputs that hold one value per sequence instead of one per token. The module takes and
    returns them stacked on a first axis, [sequences of the step, ...], even for one. If `batch_key` is given, inputs
    outside it may differ in shape and then come as a list. Passes with such ports are never split, and batched. So are
    inputs whose declared shape is fixed, such as `i64[16]`, unless they are cut with the tokens of the pass.
    step_ports: (KV) inputs among `row_ports` with one entry per iteration of a loop on their first axis. A pass gets
    the entry of its own iteration, as a list of one. A loop that carries nothing then runs several iterations per pass.
    ragged: (STATELESS) inputs whose shapes may differ within a batch, whatever `batch_key` says. If they differ, they
    come as a list of one tensor per batch item.
    weight_bytes: device memory of the official weights in the usual precision, 0 if unknown. The plan of a deployment
    compares them with the GPUs before anything is downloaded.
    quantized_bytes: those of `weight_bytes` in layers that a quantization stores in eight bits. None: all of a node
    with a cache, so that plans count the least, and none of another node.
    adapter_prefix: (KV) the node takes LoRA adapters, in whose names this precedes the names of its module's layers,
    which are those of `mstar_core.layers`. None: it takes none.
    """

    name: str
    engine: EngineKind
    ports: dict[str, str] = field(default_factory=dict)
    kv: KVSpec | None = None
    sampling: Sampling | None = None
    dtype: str | None = None
    batch_key: tuple[str, ...] = ()
    hints: EngineHints = EngineHints()
    tensor_parallel: bool = False
    parallel_sizes: tuple[tuple[str, int], ...] = ()
    branch: str = MAIN
    of: NodeSpec | None = None
    doc: str = ""
    sequence: tuple[str, ...] = ()
    per: Literal["row", "request"] = "row"
    row_ports: tuple[str, ...] = ()
    step_ports: tuple[str, ...] = ()
    ragged: tuple[str, ...] = ()
    weight_bytes: int = 0
    quantized_bytes: int | None = None
    adapter_prefix: str | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    def port(self, name: str) -> PortType:
        """Return the type of the port called `name`. Raises GraphError when there is none."""
        if name not in self.ports:
            raise GraphError(
                f"node {self.name!r} has no port {name!r}", hint=did_you_mean(name, self.ports), place=self.name
            )
        return PortType.parse(self.ports[name], where=f"{self.name}.{name}")

    def weight_bytes_under(self, quantization: str) -> int:
        """Return `weight_bytes` under a quantization: `none` or the name of an eight-bit format."""
        if quantization == "none":
            return self.weight_bytes
        whole = self.weight_bytes if self.kv is not None else 0
        halved = whole if self.quantized_bytes is None else self.quantized_bytes
        return self.weight_bytes - halved // 2

    @property
    def owner(self) -> NodeSpec:
        """The node whose weights and cache this one uses: itself, or the one that it is a branch of."""
        return self if self.of is None else self.of.owner

    def on_branch(self, name: str, branch: str) -> NodeSpec:
        """Return the same component on another cache branch. It runs in this node unless the config places it."""
        return replace(self, name=name, branch=branch, of=self)


CHUNK_FIRST: Final = "$first"
"""Input name inside a loop over a stream: true (b8, 0-d) in the first chunk of the request."""

CHUNK_LAST: Final = "$last"
"""Input name inside a loop over a stream: true (b8, 0-d) in the final flush of the request."""

RANDOM: Final = "$random"
"""Input name inside a resident loop: uniform float32 numbers in [0, 1) of the declared shape of port `random`.

They are a function of the request's seed, the node's name and the number of ids that the node has drawn for the
request: the same in any batch, captured or not, on any device and after a preemption.
"""

PARAM_PREFIX: Final = "$param:"


def from_param(name: str) -> str:
    """Return the input name of a request parameter: a number, a bool, or the index of a choice (0-d)."""
    return PARAM_PREFIX + name


def keyword(name: str) -> str:
    """Return the keyword of an input: `$step` -> `step`, `$random` -> `random`, `$param:scale` -> `scale`."""
    return name.removeprefix(PARAM_PREFIX).removeprefix("$")
