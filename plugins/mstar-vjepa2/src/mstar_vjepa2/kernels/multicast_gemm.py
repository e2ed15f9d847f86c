"""GEMM of a frame's tokens for Hopper, with tiles multicast within a thread block cluster. Used by `nodes.linear`.

Computes the results of `gemm` with `multicast_gemm.cu`. Importing this needs cuda-bindings, which a CUDA build of torch
brings. NVRTC compiles a kernel in half a second.

Cost model: `gemm` reads 161 MB per layer from L2 at 5.3 TB/s, which bounds it. Here blocks with the same outputs share
their weights and blocks with the same rows share their inputs, so that a byte is loaded once for several blocks.
Outputs are the M dimension of the wgmma instruction and rows the N dimension, a multiple of eight: the 258 tokens of a
frame are two blocks of 136 or three of 88. Refilling a free stage takes some 2,000 cycles, so eight stages are in
flight. A multiprocessor holds one block, and all clusters of a product must be resident at once. Weights of the first
stages are loaded, and the others prefetched into L2, while the previous kernel still runs (programmatic dependent
launch).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import torch
from cuda.bindings import driver, nvrtc

from mstar_core.errors import EngineError
from mstar_core.layers.kernels.launch import is_hopper

if TYPE_CHECKING:
    from torch import Tensor

LEAST, MOST = 200, 272
"""Supported numbers of rows: those of one frame."""

TILE_INPUTS: Final = 64
"""Inputs of a tile."""

INSTRUCTION_OUTPUTS: Final = 64
"""Outputs of one wgmma instruction."""

BOX_ROWS: Final = 32
"""Rows of weights per TMA load."""

WARPS: Final = 9
"""Warps of a block: four compute, four help to write results, and one loads."""

MOST_SHARED: Final = 227 * 1024 - 2048
"""Dynamic shared memory limit of a block in bytes, excluding its small static part."""

LINEAR, GELU, QKV_ROTARY, SPLIT_K = range(4)
HEAD: Final = 64
"""Head dimension that `qkv_rotary` supports."""

_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Tiling of a GEMM: blocks of `up` * 64 outputs; `above` blocks cover all rows, `across` blocks lie side by side.

    stages: tiles in flight. splits: slices of the inputs with separate sums.
    """

    up: int
    above: int
    across: int
    stages: int = 8
    splits: int = 1

    def columns(self, outputs: int) -> int:
        """Return the number of clusters along the outputs."""
        return -(-outputs // (INSTRUCTION_OUTPUTS * self.up * self.across))

    def block_rows(self, rows: int) -> int:
        """Return the rows of a block, a multiple of eight."""
        return -(-rows // (8 * self.above)) * 8

    def boxes(self, rows: int) -> tuple[int, int]:
        """Return the rows of a tile that each of the blocks side by side loads, and the remainder, both multiples of
        eight.
        """
        share = self.block_rows(rows) // self.across // 8 * 8
        return share, self.block_rows(rows) - share * self.across

    def shared_bytes(self, rows: int) -> int:
        """Return the shared memory of a block: its stages and their alignment."""
        return self.stages * 2 * TILE_INPUTS * (INSTRUCTION_OUTPUTS * self.up + self.block_rows(rows)) + 1024


NARROW: Final = ClusterConfig(up=1, above=2, across=4)
WIDER: Final = ClusterConfig(up=2, above=3, across=2)
"""For layers with more clusters of narrow blocks than the device can hold."""

RESIDENT: Final = ClusterConfig(up=1, above=3, across=2, splits=2)
"""For slices so short that all of their weight tiles are loaded before the frame is available."""

MOST_SPLITS: Final = 4


class Target(ctypes.Structure):
    """Kernel argument, as declared in multicast_gemm.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bias", "out", "cosine", "sine", "places", "pool")),
        *((name, ctypes.c_int) for name in ("rows", "outputs", "angled", "page", "of_query", "of_key")),
        ("tiles", ctypes.c_int),
    )


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is supported with any epilogue: the rows of one frame on Hopper, and sizes that tiles divide.

    x: [..., inputs], contiguous, in half precision.
    """
    outputs, inputs = weight.shape
    is_frame = LEAST <= x.numel() // inputs <= MOST
    if not is_frame or x.dtype not in _NAMES or not weight.is_contiguous() or not is_hopper(x.device):
        return False
    is_cut = outputs % 16 == 0 and inputs % TILE_INPUTS == 0 and inputs >= TILE_INPUTS * MOST_SPLITS
    return is_cut and WIDER.columns(outputs) <= _room(WIDER, x.device.index)


def config_of(weight: Tensor, kind: int) -> ClusterConfig:
    """Return the tiling of a layer: as many clusters as are resident at once, because one more would need a second
    wave.
    """
    (outputs, inputs), device = weight.shape, weight.device.index
    is_resident = kind == SPLIT_K and inputs <= TILE_INPUTS * RESIDENT.stages * RESIDENT.splits
    if is_resident and RESIDENT.columns(outputs) * RESIDENT.splits <= _room(RESIDENT, device):
        return RESIDENT
    room, columns = _room(NARROW, device), NARROW.columns(outputs)
    if columns > room:
        return WIDER
    return replace(NARROW, splits=min(MOST_SPLITS, room // columns)) if kind == SPLIT_K else NARROW


def linear(x: Tensor, weight: Tensor, bias: Tensor, *, is_gelu: bool = False, out: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, or its exact GELU, [..., outputs]. x: [..., inputs]; x and out are contiguous."""
    if out is None:
        out = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    target = Target(bias=bias.data_ptr(), out=out.data_ptr())
    _multiply(x, weight, target, GELU if is_gelu else LINEAR)
    return out


def split_k(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T as slices to be summed: float32 [S, ..., outputs]. x: as for `linear`."""
    splits = config_of(weight, SPLIT_K).splits
    out = torch.empty((splits, *x.shape[:-1], len(weight)), dtype=torch.float32, device=x.device)
    _multiply(x, weight, Target(out=out.data_ptr()), SPLIT_K)
    return out


def can_rotate(weight: Tensor, pool: Tensor, lanes: int) -> bool:
    """Whether `qkv_rotary` supports this layer: heads of `HEAD` lanes, all rotated, and aligned queries, keys and
    values.
    """
    kv_heads, head_dim = pool.shape[3:]
    return head_dim == HEAD and lanes == HEAD and len(weight) % (kv_heads * head_dim) == 0


def qkv_rotary(
    x: Tensor, weight: Tensor, bias: Tensor, rotation: tuple[Tensor, Tensor], pool: Tensor, places: Tensor
) -> Tensor:
    """Compute `gemm.qkv_rotary`: project, rotate, and append keys and values to the pool. Returns queries."""
    page, kv_heads, head_dim = pool.shape[2:]
    of_key = kv_heads * head_dim
    of_query = len(weight) - 2 * of_key
    query = torch.empty((len(x), of_query // head_dim, head_dim), dtype=x.dtype, device=x.device)
    cosine, sine = rotation
    target = Target(
        bias=bias.data_ptr(),
        out=query.data_ptr(),
        cosine=cosine.data_ptr(),
        sine=sine.data_ptr(),
        places=places.data_ptr(),
        pool=pool.data_ptr(),
        angled=cosine.numel() // head_dim,
        page=page,
        of_query=of_query,
        of_key=of_key,
    )
    _multiply(x, weight, target, QKV_ROTARY)
    return query


def _multiply(x: Tensor, weight: Tensor, target: Target, kind: int) -> None:
    config = config_of(weight, kind)
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    target.rows, target.outputs, target.tiles = rows, outputs, inputs // TILE_INPUTS
    function = _compiled(config, kind, config.block_rows(rows), _NAMES[x.dtype], x.device.index)
    is_brain, at, (share, rest) = x.dtype == torch.bfloat16, x.data_ptr(), config.boxes(rows)
    arguments = (
        _map(at, rows, inputs, share, is_brain),
        _map(at, rows, inputs, rest or share, is_brain),
        _map(weight.data_ptr(), outputs, inputs, BOX_ROWS, is_brain),
        target,
    )
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    launch = _grid(config, rows, outputs)
    launch.hStream = torch.cuda.current_stream(x.device).cuda_stream
    _checked(driver.cuLaunchKernelEx(launch, function, ctypes.addressof(pointers), 0))


def _grid(config: ClusterConfig, rows: int, outputs: int) -> Any:
    """Return the driver's launch configuration of a product."""
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY = config.above, config.columns(outputs) * config.across
    launch.gridDimZ = config.splits
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = 32 * WARPS, 1, 1
    launch.sharedMemBytes = config.shared_bytes(rows)
    launch.attrs = _attributes(config.above, config.across)
    launch.numAttrs = len(launch.attrs)
    return launch


@cache
def _room(config: ClusterConfig, device: int) -> int:
    """Return how many clusters are resident at once: one block per multiprocessor, a cluster within one GPC."""
    function = _compiled(config, LINEAR, config.block_rows(MOST), "bf16", device)
    with torch.cuda.device(device):
        (clusters,) = _checked(driver.cuOccupancyMaxActiveClusters(function, _grid(config, MOST, 1024)))
    return int(clusters)


@cache
def _attributes(above: int, across: int) -> list[Any]:
    """Return the launch attributes: cluster size, and programmatic stream serialization."""
    shape, early = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = above, across, 1
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    return [shape, early]


@lru_cache(maxsize=4096)
def _map(at: int, lines: int, inputs: int, high: int, is_brain: bool) -> Any:
    """Return the 128-byte TMA descriptor of a matrix, for boxes of `high` rows.

    Cached, because uncaptured steps use the same weights repeatedly. It depends only on address and sizes.
    """
    kinds = driver.CUtensorMapDataType
    (tensor_map,) = _checked(
        driver.cuTensorMapEncodeTiled(
            kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if is_brain else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            2,
            at,
            [driver.cuuint64_t(inputs), driver.cuuint64_t(lines)],
            [driver.cuuint64_t(inputs * 2)],
            [driver.cuuint32_t(TILE_INPUTS), driver.cuuint32_t(high)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return (ctypes.c_uint64 * 16).from_buffer_copy(ctypes.string_at(int(tensor_map.getPtr()), 128))


@cache
def _compiled(config: ClusterConfig, kind: int, rows: int, dtype: str, device: int) -> Any:
    """Return the compiled kernel in the device's context. rows: of a block."""
    defined = {
        "UP": config.up,
        "ROWS": rows,
        "ABOVE": config.above,
        "ACROSS": config.across,
        "STAGES": config.stages,
        "KIND": kind,
        "DTYPE": f'"{dtype}"',
    }
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # creates the context if none exists yet
        (module,) = _checked(driver.cuModuleLoadData(_binary(defined)))
    (function,) = _checked(driver.cuModuleGetFunction(module, b"multicast_gemm_kernel"))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, limit, MOST_SHARED))
    return function


def _binary(defined: dict[str, Any]) -> bytes:
    """Compile the kernel to machine code."""
    files = resources.files("mstar_vjepa2.kernels")
    source, hopper = (files.joinpath(name).read_bytes() for name in ("multicast_gemm.cu", "hopper.cuh"))
    headers, names = [hopper, _multiply_source(defined["ROWS"]).encode()], [b"hopper.cuh", b"multiply.cuh"]
    (program,) = _checked(nvrtc.nvrtcCreateProgram(source, b"multicast_gemm.cu", len(headers), headers, names))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    options += [f"-D{name}={value}".encode() for name, value in defined.items()]
    if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]):
        (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program))
        text = b" " * size
        _checked(nvrtc.nvrtcGetProgramLog(program, text))
        raise _failed(text.decode(errors="replace"))
    (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
    binary = b" " * int(size)
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return binary


def _multiply_source(rows: int) -> str:
    """Return CUDA C++ of `multiply(total, a, b)`, the wgmma of 64 outputs by `rows` by 16 inputs of two descriptors.

    The source is generated, because inline assembly names each accumulator register.
    """
    count = rows // 2
    held = ", ".join(f"%{number}" for number in range(count))
    operands = ", ".join(f'"+f"(total[{number}])' for number in range(count))
    shape = f'wgmma.mma_async.sync.aligned.m64n{rows}k16.f32." DTYPE "." DTYPE "'
    return (
        f"__device__ __forceinline__ void multiply(float (&total)[{count}], u64 a, u64 b) {{\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, 1, 0; {shape} {{{held}}}, %{count}, %{count + 1}, p,"\n'
        f'                 " 1, 1, 0, 0; }}" : {operands} : "l"(a), "l"(b));\n}}\n'
    )


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the results of a driver or compiler call without its status. Raises EngineError."""
    status, *values = answer
    if int(status):
        raise _failed(str(status))
    return tuple(values)


def _failed(detail: str) -> EngineError:
    return EngineError(
        "a multicast GEMM of V-JEPA 2 failed",
        detail,
        "MSTAR_MULTICAST=0 selects other kernels",
        node="ac_predictor",
    )
