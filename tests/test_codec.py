"""Array file formats: byte for byte as NumPy writes them, readable by safetensors, and damaged files."""

from __future__ import annotations

import io

import numpy as np
import pytest
from safetensors.numpy import load, save

from mstar_core.codec import (
    BFLOAT16,
    DTYPES,
    RawArray,
    npy_header,
    read_npy,
    read_safetensors,
    safetensors_header,
    widen_bfloat16,
)

NPY_DTYPES = [name for name, codes in DTYPES.items() if codes.npy]
SHAPES = [(), (1,), (3,), (2, 3), (2, 0, 4), (10**9, 0)]


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", NPY_DTYPES)
def test_npy_files_equal_those_of_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    array, file = numbers(shape, dtype), io.BytesIO()
    np.save(file, array)
    assert npy_header(shape, dtype) + array.tobytes() == file.getvalue()
    found = read_npy(file.getvalue())
    assert (found.shape, found.dtype, bytes(found.data)) == (shape, dtype, array.tobytes())


@pytest.mark.parametrize("dtype", [name for name, codes in DTYPES.items() if codes.safetensors and codes.npy])
def test_safetensors_files_are_read_by_both_sides(dtype: str) -> None:
    arrays = {"a": numbers((2, 3), dtype), "b": numbers((), dtype)}
    head = safetensors_header([(name, dtype, each.shape, each.nbytes) for name, each in arrays.items()], {"step": "1"})
    file = head + b"".join(each.tobytes() for each in arrays.values())
    assert len(head) % 8 == 0
    for name, array in load(file).items():
        assert array.dtype == arrays[name].dtype and np.array_equal(array, arrays[name])
    for data in (file, save(arrays)):
        for name, found in read_safetensors(data).items():
            assert (found.shape, found.dtype, bytes(found.data)) == (arrays[name].shape, dtype, arrays[name].tobytes())


@pytest.mark.parametrize("dtype", [name for name, codes in DTYPES.items() if codes.struct])
def test_nested_lists_equal_those_of_numpy(dtype: str) -> None:
    for shape in ((), (3,), (2, 3), (2, 1, 2)):
        array = numbers(shape, dtype)
        assert RawArray(array.tobytes(), shape, dtype).to_lists() == array.tolist()


def test_bfloat16_has_no_npy_form_and_is_widened_exactly() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        npy_header((1,), BFLOAT16)
    with pytest.raises(ValueError, match="bfloat16"):
        RawArray(b"\0\0", (1,), BFLOAT16).to_lists()
    assert widen_bfloat16(np.array([0x3FC0, 0xC000], "<u2")).tolist() == [1.5, -2.0]
    assert read_safetensors(safetensors_header([("x", BFLOAT16, (1,), 2)]) + b"\0\0")["x"].dtype == BFLOAT16


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\x02\x00{}",
        npy_header((2,), "float32"),
        npy_header((2,), "float32").replace(b"False", b"True ") + bytes(8),
        npy_header((2,), "float32").replace(b"<f4", b">f4") + bytes(8),
    ],
)
def test_a_damaged_npy_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="NumPy file"):
        read_npy(data)


@pytest.mark.parametrize("data", [b"", b"\x01" * 8, b"\x02\0\0\0\0\0\0\0[]", b'\x08\0\0\0\0\0\0\0{"a": 1}'])
def test_a_damaged_safetensors_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="safetensors file is damaged"):
        read_safetensors(data)


def test_data_of_another_size_than_the_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        RawArray(bytes(4), (2,), "float32").to_lists()
