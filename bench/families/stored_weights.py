"""Weight files of official names and shapes and real size, for measurements of reading them.

A block of random numbers is written again and again by several threads, straight into the page cache, which takes
seconds where drawing all numbers takes minutes. The values have no meaning beyond their size.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Final

import torch

from mstar_core.weights.random_fill import MARKER

SHARD_BYTES: Final = 5_000_000_000
"""Size of a file, as published checkpoints have it."""

BLOCK_BYTES: Final = 64 << 20
THREADS: Final = 8
DEVIATION: Final = 0.02
SHARED: Final = Path("/dev/shm")
SPARE_BYTES: Final = 24 << 30
"""Memory that stays free beside files in memory, for the processes of a deployment."""

Shape = tuple[int, ...]


def place_for(size: int, otherwise: Path) -> Path:
    """Return a folder of a file system in memory if so many bytes fit it, else the other one.

    Writes to a disk would be slowed down by the disk itself; reads come from memory either way.
    """
    if not SHARED.is_dir() or shutil.disk_usage(SHARED).free < size:
        return otherwise
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return SHARED if available > size + SPARE_BYTES else otherwise


def size_of(shapes: Mapping[str, Shape], itemsize: int = 2) -> int:
    """Return the bytes of tensors of these shapes."""
    return itemsize * sum(map(prod, shapes.values()))


def write_shards(folder: Path, shapes: Mapping[str, Shape], *, stem: str = "model", dtype: str = "BF16") -> list[Path]:
    """Write tensors in order into files of about SHARD_BYTES, with an index if there are several. Returns the files.

    dtype: BF16 or F32.
    """
    itemsize = {"BF16": 2, "F32": 4}[dtype]
    shards: list[dict[str, Shape]] = [{}]
    for name, shape in shapes.items():
        if shards[-1] and size_of({**shards[-1], name: shape}, itemsize) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    else:
        names = [f"{stem}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        _write_file(folder / name, tensors, dtype, itemsize)
    if len(shards) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / MARKER).unlink(missing_ok=True)  # the files take the place of numbers made on the device
    return [folder / name for name in names]


def _write_file(path: Path, shapes: Mapping[str, Shape], dtype: str, itemsize: int) -> None:
    entries, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + itemsize * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    start, data = 8 + len(head), _block(dtype)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(start + end)
        file.flush()
        number = file.fileno()

        def put(at: int) -> None:
            left = data[: min(len(data), end - at)]
            while left:
                done = os.pwrite(number, left, start + at)
                at, left = at + done, left[done:]

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(put, range(0, end, len(data))))


@functools.cache
def _block(dtype: str) -> memoryview:
    """Return the numbers that files repeat."""
    kind = {"BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    block = torch.empty(BLOCK_BYTES // kind.itemsize, dtype=kind)
    block.normal_(0.0, DEVIATION, generator=torch.Generator().manual_seed(1))
    return block.view(torch.uint8).numpy().data


def bagel_files(folder: Path) -> list[Path]:
    """Write a BAGEL checkpoint of the official sizes with weight files. Returns them."""
    from bench.families.bagel_checkpoint import write_random
    from mstar_bagel.checkpoint.config import MODEL_FILE, VAE_FILE, Sizes
    from mstar_bagel.published import shapes

    write_random(folder, seed=1)
    found = shapes(Sizes())
    parts: dict[str, dict[str, Shape]] = {MODEL_FILE: {}, VAE_FILE: {}}
    for name, shape in found.items():
        parts[VAE_FILE if name.startswith(("encoder.", "decoder.")) else MODEL_FILE][name] = shape
    for file, dtype, itemsize in ((MODEL_FILE, "BF16", 2), (VAE_FILE, "F32", 4)):
        _write_file(folder / file, parts[file], dtype, itemsize)
    (folder / MARKER).unlink()
    return [folder / file for file in parts]


def omni_files(folder: Path) -> list[Path]:
    """Write a Qwen3-Omni checkpoint of the official sizes with weight files. Returns them."""
    from bench.families.omni_checkpoint import write_random
    from mstar_qwen3omni.checkpoint.config import read_config
    from mstar_qwen3omni.published import shapes

    write_random(folder, seed=1)
    return write_shards(folder, shapes(read_config(folder)))


def bytes_of(model: str) -> int:
    """Return the size of a model's weight files."""
    if model == "bagel":
        from mstar_bagel.checkpoint.config import Sizes
        from mstar_bagel.published import shapes as bagel_shapes

        return size_of(bagel_shapes(Sizes()))
    from mstar_qwen3omni.checkpoint.config import OmniConfig
    from mstar_qwen3omni.published import shapes as omni_shapes

    return size_of(omni_shapes(OmniConfig()))
