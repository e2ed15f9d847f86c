"""Products of a frame's tokens whose tiles are multicast within a cluster, for Hopper. Used by `nodes.linear` on CUDA.

The same results as those of `gemm`, from `multicast_gemm.cu`. Importing this needs cuda-bindings, which a CUDA build
of torch brings, and its run-time compiler, which takes half a second for a kernel.

Cost model: `gemm` fetches 161 MB a layer from the second-level cache, 5.3 TB/s, which bounds it. Here blocks that lie
above each other share their weights and those that lie side by side their rows, so that a byte is fetched once for
several. Outputs are the long side of a tensor-core instruction, of which there are whole tiles, and rows the short one,
which comes in steps of eight: the 258 tokens of a frame are two blocks of 136 or three of 88. It is some 2,000 cycles
from the moment that a tile's place is free until it is filled again, so eight are on their way, a processor has room
for one block, and a product must fit as many clusters as run at once. Weights of the first tiles are fetched, and the
rest asked into the cache, while the kernel before still runs (programmatic dependent launch).
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
"""Rows that are taken: those of one frame."""

TILE_INPUTS: Final = 64
"""Inputs of a tile."""

INSTRUCTION_OUTPUTS: Final = 64
"""Outputs of one tensor-core instruction."""

BOX_ROWS: Final = 32
"""Lines of weights that the copy engine brings at once."""

WARPS: Final = 9
"""Of a block: four that multiply, four that help to write results, and one that fetches."""

MOST_SHARED: Final = 227 * 1024 - 2048
"""Bytes of dynamic shared memory that a block may ask for, beside its few static ones."""

LINEAR, GELU, QKV_ROTARY, SPLIT_K = range(4)
HEAD: Final = 64
"""Lanes of a head that `qkv_rotary` knows."""

_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How a product is cut: blocks of `up` times 64 outputs, `above` for all rows, `across` side by side in a cluster.

    stages: tiles on their way. splits: slices of the inputs, each summed on its own.
    """

    up: int
    above: int
    across: int
    stages: int = 8
    splits: int = 1

    def columns(self, outputs: int) -> int:
        """Clusters side by side."""
        return -(-outputs // (INSTRUCTION_OUTPUTS * self.up * self.across))

    def block_rows(self, rows: int) -> int:
        """Rows of a block, a multiple of eight."""
        return -(-rows // (8 * self.above)) * 8

    def boxes(self, rows: int) -> tuple[int, int]:
        """Rows that each of the blocks side by side fetches of a tile, and what they leave over, both in eights."""
        share = self.block_rows(rows) // self.across // 8 * 8
        return share, self.block_rows(rows) - share * self.across

    def shared_bytes(self, rows: int) -> int:
        """Shared memory of a block: its tiles and what aligns them."""
        return self.stages * 2 * TILE_INPUTS * (INSTRUCTION_OUTPUTS * self.up + self.block_rows(rows)) + 1024


NARROW: Final = ClusterConfig(up=1, above=2, across=4)
WIDER: Final = ClusterConfig(up=2, above=3, across=2)
"""Where there would be more clusters of narrow blocks than the device has room for."""

RESIDENT: Final = ClusterConfig(up=1, above=3, across=2, splits=2)
"""For slices so short that all of their tiles are asked for before the frame is there."""

MOST_SPLITS: Final = 4


class Target(ctypes.Structure):
    """As in multicast_gemm.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bias", "out", "cosine", "sine", "places", "pool")),
        *((name, ctypes.c_int) for name in ("rows", "outputs", "angled", "page", "of_query", "of_key")),
        ("tiles", ctypes.c_int),
    )


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether a product runs here, whatever is made of it: the rows of one frame on Hopper, sizes that tiles divide.

    x: [..., inputs], contiguous, in half precision.
    """
    outputs, inputs = weight.shape
    is_frame = LEAST <= x.numel() // inputs <= MOST
    if not is_frame or x.dtype not in _NAMES or not weight.is_contiguous() or not is_hopper(x.device):
        return False
    is_cut = outputs % 16 == 0 and inputs % TILE_INPUTS == 0 and inputs >= TILE_INPUTS * MOST_SPLITS
    return is_cut and WIDER.columns(outputs) <= _room(WIDER, x.device.index)


def config_of(weight: Tensor, kind: int) -> ClusterConfig:
    """How a layer is cut: into as many clusters as can run at once, for one more would come after all others."""
    (outputs, inputs), device = weight.shape, weight.device.index
    is_resident = kind == SPLIT_K and inputs <= TILE_INPUTS * RESIDENT.stages * RESIDENT.splits
    if is_resident and RESIDENT.columns(outputs) * RESIDENT.splits <= _room(RESIDENT, device):
        return RESIDENT
    room, columns = _room(NARROW, device), NARROW.columns(outputs)
    if columns > room:
        return WIDER
    return replace(NARROW, splits=min(MOST_SPLITS, room // columns)) if kind == SPLIT_K else NARROW


def linear(x: Tensor, weight: Tensor, bias: Tensor, *, is_gelu: bool = False, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, or the exact GELU of it. x: [..., inputs], contiguous, as is out. Returns [..., outputs]."""
    if out is None:
        out = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    target = Target(bias=bias.data_ptr(), out=out.data_ptr())
    _multiply(x, weight, target, GELU if is_gelu else LINEAR)
    return out


def split_k(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in slices to be summed: float32 [S, ..., outputs]. x: as for `linear`."""
    splits = config_of(weight, SPLIT_K).splits
    out = torch.empty((splits, *x.shape[:-1], len(weight)), dtype=torch.float32, device=x.device)
    _multiply(x, weight, Target(out=out.data_ptr()), SPLIT_K)
    return out


def can_rotate(weight: Tensor, pool: Tensor, lanes: int) -> bool:
    """Whether `qkv_rotary` can do it: heads of `HEAD` lanes that all turn, and queries, keys and values apart."""
    kv_heads, head_dim = pool.shape[3:]
    return head_dim == HEAD and lanes == HEAD and len(weight) % (kv_heads * head_dim) == 0


def qkv_rotary(
    x: Tensor, weight: Tensor, bias: Tensor, rotation: tuple[Tensor, Tensor], pool: Tensor, places: Tensor
) -> Tensor:
    """As `gemm.qkv_rotary`: queries of x, turned; keys, turned, and values go to their places in the pool."""
    page, kv_heads, head_dim = pool.shape[2:]
    of_key = kv_heads * head_dim
    of_query = len(weight) - 2 * of_key
    query = torch.empty((len(x), of_query // head_dim, head_dim), dtype=x.dtype, device=x.device)
    cosine, sine = rotation
    target = Target(
        bias=bias.data_ptr(), out=query.data_ptr(), cosine=cosine.data_ptr(), sine=sine.data_ptr(),
        places=places.data_ptr(), pool=pool.data_ptr(), angled=cosine.numel() // head_dim, page=page,
        of_query=of_query, of_key=of_key,
    )  # fmt: skip
    _multiply(x, weight, target, QKV_ROTARY)
    return query


def _multiply(x: Tensor, weight: Tensor, target: Target, kind: int) -> None:
    config = config_of(weight, kind)
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    target.rows, target.outputs, target.tiles = rows, outputs, inputs // TILE_INPUTS
    function = _compiled(config, kind, config.block_rows(rows), _NAMES[x.dtype], x.device.index)
    is_brain, at, (share, rest) = x.dtype == torch.bfloat16, x.data_ptr(), config.boxes(rows)
    given = (
        _map(at, rows, inputs, share, is_brain),
        _map(at, rows, inputs, rest or share, is_brain),
        _map(weight.data_ptr(), outputs, inputs, BOX_ROWS, is_brain),
        target,
    )
    pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(each) for each in given))
    launch = _grid(config, rows, outputs)
    launch.hStream = torch.cuda.current_stream(x.device).cuda_stream
    _checked(driver.cuLaunchKernelEx(launch, function, ctypes.addressof(pointers), 0))


def _grid(config: ClusterConfig, rows: int, outputs: int) -> Any:
    """The driver's launch configuration of a product."""
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
    """Clusters that run at once on this device: one block a processor, and a cluster within one group of these."""
    function = _compiled(config, LINEAR, config.block_rows(MOST), "bf16", device)
    with torch.cuda.device(device):
        (found,) = _checked(driver.cuOccupancyMaxActiveClusters(function, _grid(config, MOST, 1024)))
    return int(found)


@cache
def _attributes(above: int, across: int) -> list[Any]:
    """A cluster of so many blocks, and a start before the kernel in front has ended."""
    shape, early = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = above, across, 1
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    return [shape, early]


@lru_cache(maxsize=4096)
def _map(at: int, lines: int, inputs: int, high: int, is_brain: bool) -> Any:
    """What the copy engine knows of a matrix of so many lines at an address, its tiles `high` lines: 128 bytes.

    Kept, as plain steps take the same weights again and again; an address and sizes are all that it says.
    """
    kinds = driver.CUtensorMapDataType
    (made,) = _checked(
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
    return (ctypes.c_uint64 * 16).from_buffer_copy(ctypes.string_at(int(made.getPtr()), 128))


@cache
def _compiled(config: ClusterConfig, kind: int, rows: int, dtype: str, device: int) -> Any:
    """The kernel's function in the device's context. rows: of a block."""
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
        torch.cuda.current_stream()  # makes the context, should nobody have yet
        (module,) = _checked(driver.cuModuleLoadData(_binary(defined)))
    (function,) = _checked(driver.cuModuleGetFunction(module, b"multicast_gemm_kernel"))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, limit, MOST_SHARED))
    return function


def _binary(defined: dict[str, Any]) -> bytes:
    """The kernel as machine code."""
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
    """CUDA C++ of `multiply(total, a, b)`: 64 outputs by `rows` by 16 inputs of two described tiles, added to.

    Its operands, one for each number that a thread holds, cannot be written but one by one.
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
    """What a call of the driver or of the compiler answered, without its status. Raises EngineError."""
    status, *found = answer
    if int(status):
        raise _failed(str(status))
    return tuple(found)


def _failed(detail: str) -> EngineError:
    return EngineError(
        "a product of V-JEPA 2 could not be launched",
        detail,
        "MSTAR_MULTICAST=0 takes other kernels",
        node="ac_predictor",
    )
