"""Attention over pages by FlashInfer: the CUDA path for bfloat16 and float16.

A forward is planned once for all layers, without Python objects per sequence. Long unmasked passes, and passes that
only read the cache, which FlashInfer's paged kernels cannot express, go to PyTorch's kernels.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_core.engine.attention.pytorch import TorchAttention
from mstar_core.engine.attention.staging import BufferRing, recorded_event
from mstar_core.engine.attention.static import StaticAttention
from mstar_core.engine.transfers import upload
from mstar_core.errors import StartError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.kernels.decode import DecodeAttention
    from mstar_core.engine.attention.pytorch import TorchView
    from mstar_core.engine.attention.staging import Fields, Values
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
    from mstar_core.engine.steps.updates import PageCopy
    from mstar_core.layers.kv_view import HeadNorms

AOT_DIR: Final = "FLASHINFER_AOT_DIR"
"""Environment variable that names the folder of kernels built ahead (see `make kernels`)."""

TOOLS: Final = {"nvcc": "packages cuda-nvcc-13-0 and cuda-cudart-dev-13-0", "ninja": "pip install ninja"}
"""Packages of the tools that build kernels."""

WORKSPACE_BYTES: Final = 256 << 20
DECODE_GROUPS: Final = (1, 2, 3, 4, 8)
"""Query heads per KV head that the decode kernel supports; others use the prefill kernel."""

HEAD_DIMS: Final = (64, 128, 256)

PLAN_BUFFERS: Final = 4
"""Pinned buffers of the plans of one wrapper. More are in flight only if a step plans several times."""

LONG_PASS: Final = 512
"""Fewest tokens of an unmasked pass that appends for which copying its cached keys costs little."""

MEMORY: Final = -1
"""Key, in place of a window, of the wrapper that attends over memories: a wrapper holds one plan."""

PACKAGES: Final = {"flashinfer": "flashinfer-python", "tvm_ffi": "apache-tvm-ffi", "pynvml": "nvidia-ml-py"}
"""Module -> its package, where the names differ."""


class FlashInferAttention:
    """Attention by FlashInfer's kernels over the pools. Owned by one KV engine.

    origins: kernel name -> `prebuilt` or `jit`, decided when this is made.
    """

    name = "flashinfer"

    def __init__(self, pools: list[Tensor], page_size: int, windows: Sequence[int] = ()) -> None:
        """windows: see `KVSpec`."""
        _check_pools(pools)
        self._library: Any = import_library()
        self._pools = pools
        self._page_size = page_size
        self._plain = TorchAttention(pools, page_size, windows)
        self.windows = tuple(windows) or (0,) * len(pools)
        self._has_windows = any(self.windows)
        self.origins = _kernel_origins(pools[0].dtype, pools[0].shape[4])
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pools[0].device)
        self._decode_wrappers: dict[tuple[bool, int], Any] = {}
        self._prefill_wrappers: dict[tuple[bool, int], Any] = {}
        self._rings: dict[int, BufferRing[Tensor]] = {}

    def plan(self, metadata: AttentionMetadata) -> FlashInferView:
        """See AttentionBackend. The kernels are planned when the first layer attends and the head count is known."""
        return FlashInferView(self, metadata)

    def static(self, shape: AttentionShape) -> StaticAttention:
        """See AttentionBackend. All kernels but those of decode are our own and need no plan on the host.

        FlashInfer's prefill can be captured too, but then it always splits the keys: two kernels per layer, grids
        padded to the whole chip, and a plan for every replay. It cannot express passes that only read.
        Our kernels have no windows, so PyTorch serves captured steps of models with windows.
        """
        if self._has_windows:
            return self._plain.static(shape)
        if shape.is_fresh:
            from mstar_core.engine.attention.kernels.prefill import PackedPrefillAttention

            return PackedPrefillAttention(self._pools, self._page_size, shape)
        if shape.is_ragged:
            from mstar_core.engine.attention.kernels.prefill import PagedPrefillAttention

            return PagedPrefillAttention(self._pools, self._page_size, shape)
        if not shape.writes:
            from mstar_core.engine.attention.kernels.prefix import PagedPrefixAttention

            return PagedPrefixAttention(self._pools, self._page_size, shape)
        if not shape.causal:
            from mstar_core.engine.attention.kernels.split_kv import PagedDenseAttention

            return PagedDenseAttention(self._pools, self._page_size, shape)
        return FlashInferDecode(self, shape)

    def pass_pages(self, most_pages: int) -> list[int]:
        """See AttentionBackend. The kernels read only used pages, so one bucket is enough."""
        return self._plain.pass_pages(most_pages) if self._has_windows else [most_pages]

    def clear_pages(self, pages: Sequence[int]) -> None:
        """See AttentionBackend: the kernels never read past the last token of a sequence, but PyTorch does."""
        if self._has_windows:
            self._plain.clear_pages(pages)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages of every layer."""
        self._plain.copy_pages(copies)

    # -- for the views -----------------------------------------------------------------------------------------------

    @property
    def pools(self) -> list[Tensor]:
        """[pages, 2, page, kv_heads, head_dim] per layer."""
        return self._pools

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def plain(self) -> TorchAttention:
        """PyTorch backend over the same pools."""
        return self._plain

    def decode_wrapper(self, groups: int, window: int = 0) -> Any:
        """Return the wrapper of uncaptured decode. A wrapper holds one plan, so each window has its own."""
        by_cores = groups not in DECODE_GROUPS
        key = (by_cores, window)
        if key not in self._decode_wrappers:
            self._decode_wrappers[key] = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, "NHD", use_tensor_cores=by_cores, backend="fa2"
            )
        return self._decode_wrappers[key]

    def prefill_wrapper(self, is_causal: bool, window: int = 0) -> Any:
        """Return the wrapper of uncaptured passes with one kind of mask."""
        key = (is_causal, window)
        if key not in self._prefill_wrappers:
            self._prefill_wrappers[key] = self._library.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace, "NHD", backend="fa2"
            )
        return self._prefill_wrappers[key]

    def plan_kernel(self, wrapper: Any, *arrays: object, **kind: object) -> None:
        """Plan an uncaptured wrapper from pinned memory that no earlier plan still uses."""

        def write(buffer: Tensor) -> None:
            wrapper._pin_memory_int_workspace_buffer = buffer
            wrapper.plan(*arrays, **kind)

        if id(wrapper) not in self._rings:  # the wrappers live as long as this object
            first: Tensor = wrapper._pin_memory_int_workspace_buffer
            make = partial(torch.empty_like, first, pin_memory=True)
            self._rings[id(wrapper)] = BufferRing(first, make, recorded_event, PLAN_BUFFERS)
        self._rings[id(wrapper)].use(write)

    def graph_wrapper(self, groups: int, fields: Mapping[str, Tensor]) -> Any:
        """Return a decode wrapper over static buffers."""
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=groups not in DECODE_GROUPS,
            backend="fa2",
            paged_kv_indptr_buffer=fields["starts"],
            paged_kv_indices_buffer=fields["pages"],
            paged_kv_last_page_len_buffer=fields["last"],
        )

    def replan(
        self, wrapper: Any, counts: tuple[Tensor, Tensor], fields: Mapping[str, Tensor], sizes: tuple[int, int, int]
    ) -> None:
        """Plan the wrapper of a graph again from host data only.

        counts: first page of each sequence, int32 [n + 1], and tokens of its last page, int32 [n], on the host.
        The kernel of groups that DECODE_GROUPS lacks reads the latter and would otherwise wait for the device.
        """
        dtype = self._pools[0].dtype
        self._library.decode.fast_decode_plan(
            wrapper,
            fields["starts"],
            fields["pages"],
            counts[1],
            *sizes,
            self._page_size,
            q_data_type=dtype,
            kv_data_type=dtype,
            global_override_indptr_cpu=counts[0],
        )


@dataclass(frozen=True, slots=True)
class _ViewPlan:
    """Planned wrappers of one forward for layers of one window: of the decode batch, and of groups of passes."""

    decode: Any
    groups: list[tuple[Any, Tensor | slice]]


class FlashInferView:
    """The KVView of one forward."""

    def __init__(self, attention: FlashInferAttention, metadata: AttentionMetadata) -> None:
        self._attention = attention
        self._metadata = metadata
        self._plans: dict[int, _ViewPlan] = {}  # by window
        self._cross: Any = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        pool = self._attention.pools[layer]
        self.keep(layer, key, value)
        if self._is_whole:
            return self._whole.attend(layer, query, key, value, scale)
        window = self._attention.windows[layer]
        if window not in self._plans:
            self._plans[window] = self._plan(query.shape[1], pool.shape[3], query.shape[2], scale, window)
        plan, count = self._plans[window], self._decode_count
        if plan.decode is not None and count == query.shape[0]:
            only: Tensor = plan.decode.run(query, pool)
            return only
        out = torch.empty_like(query)
        if plan.decode is not None:
            out[:count] = plan.decode.run(query[:count], pool)
        for wrapper, tokens in plan.groups:
            out[tokens] = wrapper.run(query[tokens], pool)
        if self._reading is not None:
            tokens, view = self._reading
            out[tokens] = view.attend(layer, query[tokens], key[tokens], value[tokens], scale)
        return out

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See KeepingView."""
        if self._places is not None:
            from mstar_core.engine.attention.kernels.page_copies import append

            append(self._attention.pools[layer], self._attention.page_size, self._places, key, value)

    def attend_cross(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """See MemoryView. The prefill kernel also takes sequences of one token, which uncaptured steps rarely have."""
        pool, metadata = self._attention.pools[layer], self._metadata
        if self._cross is None:
            self._cross = self._attention.prefill_wrapper(is_causal=False, window=MEMORY)
            lists = _page_lists(metadata.of_memory(), self._attention.page_size)
            starts = torch.from_numpy(metadata.query_starts.astype(np.int32))
            shape = (query.shape[1], pool.shape[3], query.shape[2], self._attention.page_size)
            kind = {"q_data_type": pool.dtype, "kv_data_type": pool.dtype, "sm_scale": scale}
            self._attention.plan_kernel(self._cross, starts, *lists, *shape, causal=False, **kind)
        out: Tensor = self._cross.run(query, pool)
        return out

    @cached_property
    def _decode_count(self) -> int:
        return self._metadata.leading_decodes

    @cached_property
    def _is_whole(self) -> bool:
        """Whether the forward has unmasked passes only, and those that append have many tokens each."""
        metadata = self._metadata
        return not np.any(metadata.causal | (metadata.writes & (metadata.counts < LONG_PASS)))

    @cached_property
    def _whole(self) -> TorchView:
        return self._attention.plain.dense(self._metadata)

    @cached_property
    def _reading(self) -> tuple[Tensor | slice, TorchView] | None:
        """Packed tokens of the passes that only read, with their PyTorch view; made once for all layers."""
        chosen = ~self._metadata.writes
        if not chosen.any():
            return None
        return self._tokens(chosen), self._attention.plain.plan(self._metadata.select(chosen))

    @cached_property
    def _places(self) -> Tensor | None:
        metadata = self._metadata
        if not metadata.writes.any():
            return None
        places = metadata.places(self._attention.page_size, metadata.tokens, -1)
        return upload(places, self._attention.pools[0].device)

    def _plan(self, heads: int, kv_heads: int, width: int, scale: float | None, window: int) -> _ViewPlan:
        attention, metadata, count = self._attention, self._metadata, self._decode_count
        dtype, size = attention.pools[0].dtype, attention.page_size
        kind = {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": scale}
        # FlashInfer counts the tokens before the query's own, and -1 switches the window off.
        decode, groups, left = None, [], window - 1
        shape = (heads, kv_heads, width, size)
        if count:
            decode = attention.decode_wrapper(heads // kv_heads, window)
            lists = _page_lists(metadata.select(slice(count)), size)
            attention.plan_kernel(decode, *lists, *shape, window_left=left, **kind)
        chunks = metadata.writes.copy()
        chunks[:count] = False
        for is_causal in (True, False):
            chosen = chunks & (metadata.causal == is_causal)
            if not chosen.any():
                continue
            group = metadata.select(chosen)
            starts = torch.from_numpy(group.query_starts.astype(np.int32))
            wrapper = attention.prefill_wrapper(is_causal, window)
            mask = {"causal": is_causal, "window_left": left if is_causal else -1}
            attention.plan_kernel(wrapper, starts, *_page_lists(group, size), *shape, **mask, **kind)
            groups.append((wrapper, self._tokens(chosen)))
        return _ViewPlan(decode, groups)

    def _tokens(self, chosen: np.ndarray) -> Tensor | slice:
        """Return the packed tokens of these sequences (bool [n]), as a slice if they are contiguous."""
        tokens = self._metadata.tokens_of(chosen)
        start, end = int(tokens[0]), int(tokens[-1]) + 1
        return slice(start, end) if end - start == len(tokens) else upload(tokens, self._attention.pools[0].device)


def _page_lists(metadata: AttentionMetadata, page_size: int) -> tuple[Tensor, ...]:
    """Return starts [n + 1], page numbers, and tokens of the last page [n], int32 on the host."""
    return tuple(torch.from_numpy(array) for array in metadata.page_lists(page_size))


class FlashInferDecode(StaticAttention):
    """Decode attention of one bucket. Plans again only when the page count of some sequence has changed."""

    def __init__(self, attention: FlashInferAttention, shape: AttentionShape) -> None:
        super().__init__(attention.pools, attention.page_size, shape)
        self._attention = attention
        self._spare = attention.pools[0].shape[0] - 1
        self._wrapper: Any = None
        self._decode: DecodeAttention | None = None
        self._sizes = (0, 0, 0)
        self._scale: float | None = None
        self._starts = self._pages = self._last = np.zeros(0, dtype=np.int32)
        self._places = np.zeros(0, dtype=np.int64)
        self._count = 0
        self._room = 0
        self._has_new_split = False
        self._ring: BufferRing[Tensor] | None = None

    @property
    def fields(self) -> Fields:
        """See StaticAttention. places: of the appended keys; the others as FlashInfer's paged kernels take them."""
        sequences = self._shape.sequences
        return {
            "places": (torch.int64, sequences),
            "last": (torch.int32, sequences),
            "starts": (torch.int32, sequences + 1),
            "pages": (torch.int32, sequences * self._shape.pages),
        }

    def values(self, metadata: AttentionMetadata) -> Values:
        """See StaticAttention. Page tables are sent only if one has changed."""
        count, size, sequences = len(metadata.page_rows), self._attention.page_size, self._shape.sequences
        starts, pages, used = metadata.page_lists(size)
        if extra := sequences - count:
            starts = np.concatenate([starts, starts[-1] + np.arange(1, extra + 1, dtype=np.int32)])
            pages = np.concatenate([pages, np.full(extra, self._spare, dtype=np.int32)])
        self._last = np.ones(sequences, dtype=np.int32)
        self._last[:count] = used
        self._count, self._room = count, size - int(used.max()) if count else 0
        self._places = metadata.places(size, sequences, self._spare * 2 * size)
        values: dict[str, np.ndarray] = {"places": self._places, "last": self._last}
        is_same_split = np.array_equal(starts, self._starts)
        self._has_new_split = not is_same_split
        if not is_same_split or not np.array_equal(pages, self._pages):
            self._starts, self._pages = starts, pages
            values |= {"starts": starts, "pages": pages}
        return values

    def following(self) -> Values | None:
        """See StaticAttention: while no sequence begins a page, the next place is behind the last one."""
        if self._room <= 0:
            return None
        self._room -= 1
        self._places[: self._count] += 1
        self._last[: self._count] += 1
        return {"places": self._places, "last": self._last}

    def plan(self) -> None:
        """See StaticAttention."""
        if self._has_new_split and self._wrapper is not None:
            self._replan(torch.from_numpy(self._last))
        self._has_new_split = False

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView. The first call, outside any capture, makes the first plan."""
        from mstar_core.engine.attention.kernels.page_copies import append

        pool = self._attention.pools[layer]
        if self._wrapper is None:
            self._first_plan((query.shape[1], pool.shape[3], query.shape[2]), scale)
        append(pool, self._attention.page_size, self._device["places"], key, value)
        out: Tensor = self._wrapper.run(query, pool)
        return out

    def read(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """See StaticAttention. Plans as `attend` does."""
        pool = self._attention.pools[layer]
        if self._wrapper is None:
            self._first_plan((query.shape[1], pool.shape[3], query.shape[2]), scale)
        out: Tensor = self._wrapper.run(query, pool)
        return out

    def attend_packed(
        self,
        layer: int,
        packed: Tensor,
        rotation: tuple[Tensor, Tensor],
        heads: int,
        scale: float | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor | None:
        """See PackedView. A kernel of our own, which needs no plan and loads its cache while projections run."""
        from mstar_core.engine.attention.kernels.decode import DecodeAttention, supports

        pool = self._attention.pools[layer]
        if not supports(heads, pool):
            return None
        if self._decode is None:
            self._decode = DecodeAttention(self._shape.sequences, heads, pool)
        factor = pool.shape[4] ** -0.5 if scale is None else scale
        return self._decode.attend(pool, packed, rotation, self._device, factor, norms)

    def _first_plan(self, sizes: tuple[int, int, int], scale: float | None) -> None:
        fields, dtype = self._device, self._attention.pools[0].dtype
        wrapper = self._attention.graph_wrapper(sizes[0] // sizes[1], fields)
        wrapper.plan(
            torch.from_numpy(self._starts),
            torch.from_numpy(self._pages),
            fields["last"].cpu(),
            *sizes,
            self._attention.page_size,
            q_data_type=dtype,
            kv_data_type=dtype,
            sm_scale=scale,
        )
        self._wrapper, self._sizes, self._scale = wrapper, sizes, scale
        first: Tensor = wrapper._pin_memory_int_workspace_buffer
        self._ring = BufferRing(first, partial(torch.empty_like, first, pin_memory=True), recorded_event, PLAN_BUFFERS)

    def _replan(self, last: Tensor) -> None:
        # The plan goes to the device from pinned memory, in stream order: plans before may still be on their way.
        assert self._ring is not None
        counts = torch.from_numpy(self._starts), last

        def write(buffer: Tensor) -> None:
            self._wrapper._pin_memory_int_workspace_buffer = buffer
            self._attention.replan(self._wrapper, counts, self._device, self._sizes)

        self._ring.use(write)
        self._wrapper._sm_scale = self._scale
        self.plans += 1


def _check_pools(pools: list[Tensor]) -> None:
    pool = pools[0]
    if not pool.is_cuda:
        raise StartError("FlashInfer needs a GPU", f"the cache is on {pool.device}", _TORCH, phase="kernels")
    if pool.dtype not in (torch.bfloat16, torch.float16):
        detail = f"the cache is {str(pool.dtype).removeprefix('torch.')}; its kernels take bfloat16 and float16"
        raise StartError("FlashInfer cannot attend in this dtype", detail, f"set dtype, or {_TORCH}", phase="kernels")
    if pool.shape[4] not in HEAD_DIMS:
        detail = f"{pool.shape[4]} is none of {', '.join(map(str, HEAD_DIMS))}"
        raise StartError("FlashInfer cannot attend with this head size", detail, _TORCH, phase="kernels")


_TORCH: Final = 'set attention to "torch"'


def import_library() -> ModuleType:
    """Import FlashInfer. Raises StartError naming a missing package."""
    try:
        return importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        missing = error.name or "flashinfer"
        package = PACKAGES.get(missing.partition(".")[0], missing)
        raise StartError(
            f"FlashInfer cannot be imported: package {package} is missing",
            str(error),
            f"pip install {package} (mstarctl doctor lists what a GPU needs), or {_TORCH}",
            phase="kernels",
        ) from error


def _kernel_origins(dtype: torch.dtype, head_dim: int) -> dict[str, str]:
    """Return the origin of each kernel. Raises StartError for one that is neither prebuilt nor can be built here."""
    from flashinfer.jit import env
    from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module

    if os.environ.get(AOT_DIR):
        env.FLASHINFER_AOT_DIR = Path(os.environ[AOT_DIR])
    same = (dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False)
    specs = [gen_batch_decode_module(*same), gen_batch_prefill_module("fa2", *same, False)]
    origins = {spec.name: "prebuilt" if spec.is_aot else "jit" for spec in specs}
    missing = [name for name, origin in origins.items() if origin == "jit"]
    tools = [tool for tool in ("nvcc", "ninja") if shutil.which(tool) is None]
    if missing and tools:
        raise StartError(
            f"an attention kernel is not built and {tools[0]} is missing",
            f"{missing[0]} is not in {env.FLASHINFER_AOT_DIR}",
            f"run make kernels where nvcc is, and name its folder in {AOT_DIR}; or install "
            + " and ".join(f"{tool} ({TOOLS[tool]})" for tool in tools),
            phase="kernels",
        )
    return origins
