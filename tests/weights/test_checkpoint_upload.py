"""Upload of safetensors files: every split, cast and gap gives the values of the file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mstar_core.errors import WeightsError
from mstar_core.parallel.shards import Slice
from mstar_core.weights.checkpoint import (
    SWITCH_S,
    StoredTensor,
    UploadTarget,
    chunks,
    stored_part,
    stored_tensors,
    upload,
)

SHAPES: dict[str, tuple[Sequence[int], torch.dtype]] = {
    "a.wide": ((37, 19), torch.bfloat16),
    "b.odd": ((7,), torch.uint8),
    "c.float": ((50, 3), torch.float32),
    "d.flag": ((3,), torch.bool),
    "e.none": ((0, 4), torch.float32),
    "f.scalar": ((), torch.float64),
    "g.half": ((129,), torch.float16),
}


def write(path: Path, names: Sequence[str] = tuple(SHAPES)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(names))
    values = {
        name: (torch.randn(tuple(SHAPES[name][0]), generator=generator) * 50).to(SHAPES[name][1]) for name in names
    }
    save_file(values, path)
    return values


def load(path: Path, dtype: torch.dtype | None, chunk_bytes: int, threads: int) -> dict[str, torch.Tensor]:
    stored = stored_tensors(path)
    places = {tensor.name: torch.full(tensor.shape, 9, dtype=dtype or tensor.dtype) for tensor in stored}
    upload(
        [UploadTarget(stored=tensor, tensor=places[tensor.name]) for tensor in stored],
        chunk_bytes=chunk_bytes,
        threads=threads,
    )
    return places


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [16, 48, 1000, 1 << 20])
def test_every_split_and_cast_gives_the_file_values(tmp_path: Path, chunk: int, dtype: torch.dtype | None) -> None:
    values = write(tmp_path / "w.safetensors")
    tensors = load(tmp_path / "w.safetensors", dtype, chunk_bytes=chunk, threads=3)
    for name, value in values.items():
        assert torch.equal(tensors[name], value.to(dtype or value.dtype)), name


@pytest.mark.parametrize("span", [range(0, 19), range(19, 37), range(5, 6)])
def test_rows_of_a_tensor_are_uploaded_alone(tmp_path: Path, span: range) -> None:
    values = write(tmp_path / "w.safetensors")
    stored = {tensor.name: tensor for tensor in stored_tensors(tmp_path / "w.safetensors")}
    part = stored_part(stored["a.wide"], Slice.part(0, span, 37))
    target = torch.zeros(part.shape, dtype=torch.float32)
    upload([UploadTarget(stored=part, tensor=target)], chunk_bytes=48, threads=2)
    assert torch.equal(target, values["a.wide"][span.start : span.stop].float())
    with pytest.raises(WeightsError, match="the model has 38 in dimension 0"):
        stored_part(stored["a.wide"], Slice.part(0, span, 38))


def test_chunks_cover_each_requested_byte_once_and_no_other(tmp_path: Path) -> None:
    write(tmp_path / "w.safetensors")
    stored = [tensor for tensor in stored_tensors(tmp_path / "w.safetensors") if tensor.name != "c.float"]
    actual = list(chunks(stored, 64))
    for index, tensor in enumerate(stored):
        parts = [(part.start, part.size) for chunk in actual for part in chunk.parts if part.target == index]
        assert sum(size for _, size in parts) == tensor.size
        assert [start for start, _ in parts] == [sum(size for _, size in parts[:n]) for n in range(len(parts))]
        assert all(start % 16 == 0 for start, _ in parts)
    assert sum(chunk.size for chunk in actual) == sum(tensor.size for tensor in stored)
    assert all(chunk.size <= 64 for chunk in actual)


def test_a_non_contiguous_target_is_filled(tmp_path: Path) -> None:
    values = write(tmp_path / "w.safetensors", ["a.wide"])
    (stored,) = stored_tensors(tmp_path / "w.safetensors")
    whole = torch.zeros(37, 30, dtype=torch.float32)
    upload([UploadTarget(stored=stored, tensor=whole[:, 5:24])], chunk_bytes=64)
    assert torch.equal(whole[:, 5:24], values["a.wide"].float())
    assert not whole[:, :5].any() and not whole[:, 24:].any()


def test_targets_of_inference_mode_are_filled_and_cast(tmp_path: Path) -> None:
    values = write(tmp_path / "w.safetensors", ["a.wide", "c.float"])
    stored = stored_tensors(tmp_path / "w.safetensors")
    with torch.inference_mode():
        places = {tensor.name: torch.zeros(tensor.shape, dtype=torch.float16) for tensor in stored}
        upload([UploadTarget(stored=tensor, tensor=places[tensor.name]) for tensor in stored])
    for name, value in values.items():
        assert torch.equal(places[name], value.half()), name


def test_several_files_report_growing_progress(tmp_path: Path) -> None:
    targets = []
    for number in range(3):
        write(tmp_path / f"{number}.safetensors", ["a.wide", "g.half"])
        for tensor in stored_tensors(tmp_path / f"{number}.safetensors"):
            targets.append(UploadTarget(stored=tensor, tensor=torch.empty(tensor.shape, dtype=tensor.dtype)))
    seen: list[int] = []
    upload(targets, lambda read, _: seen.append(read), chunk_bytes=128)
    assert seen == sorted(seen) and seen[-1] == sum(target.stored.size for target in targets)


def test_a_file_that_shrinks_during_the_upload_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(path)
    stored = stored_tensors(path)
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(WeightsError, match="truncated while it was read") as caught:
        upload([UploadTarget(stored=t, tensor=torch.empty(t.shape, dtype=t.dtype)) for t in stored], chunk_bytes=64)
    assert caught.value.facts["file"] == str(path)


def test_an_interrupted_progress_ends_every_thread(tmp_path: Path) -> None:
    write(tmp_path / "w.safetensors")
    stored = stored_tensors(tmp_path / "w.safetensors")

    def stop(read: int, path: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(
            [UploadTarget(stored=t, tensor=torch.empty(t.shape, dtype=t.dtype)) for t in stored], stop, chunk_bytes=16
        )


def test_an_inconsistent_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(path, ["g.half"])
    path.write_bytes(path.read_bytes().replace(b'"F16"', b'"F32"'))
    with pytest.raises(WeightsError, match="inconsistent header entry for g.half"):
        stored_tensors(path)


def test_stored_tensors_come_in_file_order(tmp_path: Path) -> None:
    write(tmp_path / "w.safetensors")
    offsets = [tensor.offset for tensor in stored_tensors(tmp_path / "w.safetensors")]
    assert offsets == sorted(offsets) and isinstance(stored_tensors(tmp_path / "w.safetensors")[0], StoredTensor)


def test_threads_take_short_turns_during_an_upload_alone(tmp_path: Path) -> None:
    """At the usual turns of 5 ms, imports on another thread delay each of a hundred reads by as much."""
    write(tmp_path / "w.safetensors")
    stored = stored_tensors(tmp_path / "w.safetensors")
    targets = [UploadTarget(stored=each, tensor=torch.zeros(each.shape, dtype=each.dtype)) for each in stored]
    before, during = sys.getswitchinterval(), list[float]()
    upload(targets, lambda read, path: during.append(sys.getswitchinterval()))
    assert during and max(during) <= SWITCH_S * 1.01 < before
    assert sys.getswitchinterval() == before
