"""Tensors that leave a worker: narrowing of numbers, copies to the host, arrays and tensors again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar_core.api.output.encode import NumberForm, packed
from mstar_core.api.output.units import OutputItem
from mstar_core.engine.transfers import SMALL_BYTES
from mstar_core.worker.arrays import narrowed, start_copy, to_array, to_tensor

LARGE_BYTES = 1 << 20

BITS = np.random.default_rng(1).integers(0, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32)
VALUES = np.where(np.isnan(BITS.view(np.float32)), np.float32(1.5), BITS.view(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_narrowed_on_a_worker_are_what_the_api_made_of_them(dtype: str) -> None:
    with np.errstate(over="ignore"):
        wanted, _ = packed(OutputItem(modality="tensor", port="p", array=VALUES), NumberForm(dtype=dtype))
    array, name = to_array(narrowed(torch.from_numpy(VALUES), "tensor", dtype))
    item = OutputItem(modality="tensor", port="p", array=array, dtype=name)
    data, facts = packed(item, NumberForm(dtype=dtype))
    assert data == wanted and facts["dtype"] == dtype and array.nbytes == VALUES.nbytes // 2


@pytest.mark.parametrize(
    ("value", "modality", "dtype"),
    [
        (torch.ones(2), "audio", "bfloat16"),
        (torch.ones(2), "tensor", "float32"),
        (torch.ones(2), "tensor", None),
        (torch.ones(2, dtype=torch.int64), "tensor", "float16"),
        (torch.ones(2, dtype=torch.bfloat16), "tensor", "float16"),
    ],
)
def test_all_else_leaves_as_it_is(value: torch.Tensor, modality: str, dtype: str | None) -> None:
    assert narrowed(value, modality, dtype) is value


def test_a_large_array_that_is_read_only_becomes_a_tensor_of_its_own() -> None:
    array = np.arange(LARGE_BYTES, dtype=np.uint8)
    array.flags.writeable = False
    made = to_tensor(array, "uint8")
    made[0] = 7
    assert array[0] == 0 and made[1:].numpy().tolist() == array[1:].tolist()


@pytest.mark.gpu
def test_large_values_go_to_the_host_and_back_through_pinned_memory() -> None:
    values = torch.randn(LARGE_BYTES // 4 + 3, device="cuda")
    copy = start_copy(narrowed(values.view(1, -1), "tensor", "bfloat16").expand(3, -1))
    assert copy is not None and copy.pending.is_pinned()
    torch.cuda.synchronize()
    assert copy.is_done
    array, name = to_array(copy.pending)
    assert name == "bfloat16" and array.shape == (3, len(values))
    made = to_tensor(array, name)
    assert made.is_pinned() and torch.equal(made[2].cuda(), values.bfloat16())
    small, camera = (np.ones(count, dtype=np.uint8) for count in (SMALL_BYTES, 224 * 224 * 3))
    assert not to_tensor(small, "uint8").is_pinned() and to_tensor(camera, "uint8").is_pinned()
