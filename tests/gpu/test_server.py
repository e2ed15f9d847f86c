"""The golden vectors over HTTP from CUDA: float32 gives the reference's sound, bfloat16 repeats its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mstar_core.config.resolved import KVCacheConfig
from tests.runtime.client import SURE, Heard, new_client, request, speak
from tests.runtime.deployment import Deployment, one_rank
from tests.runtime.golden import PROMPTS, Built, Golden, prompt_of

pytestmark = pytest.mark.gpu
FLOAT32 = 7
"""Of 32,767: 2e-4 of full scale."""


class OnCuda(Deployment):
    """One rank on the first GPU, with the packages that this process has."""

    def __init__(self, folder: Path, dtype: str) -> None:
        ranks = tuple(msgspec.structs.replace(rank, device="cuda:0") for rank in one_rank().ranks)
        where = msgspec.structs.replace(one_rank(), ranks=ranks)
        # No prefix cache: a prompt that is cached in part has other shapes, and bfloat16 rounds by shape.
        memory = KVCacheConfig(pages=1024, prefix_cache=dtype == "float32")
        given = {"dtype": dtype, "attention": "torch", "max_seq_len": 1024, "kv_cache": memory, "standby": False}
        super().__init__(folder=folder, where=where, **given)

    def environment(self) -> dict[str, str]:
        made = super().environment()
        return {**made, "PYTHONPATH": os.pathsep.join((made["PYTHONPATH"], os.environ.get("PYTHONPATH", "")))}


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.find()


@pytest.fixture(scope="module")
def folder(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.lay_out(tmp_path_factory.mktemp("golden") / "checkpoint")


@pytest.fixture(scope="module")
def built(folder: Path) -> Built:
    return Built.load(folder)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Deployment]:
    with OnCuda(folder, "float32") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def rounded(folder: Path) -> Iterator[Deployment]:
    with OnCuda(folder, "bfloat16") as deployment:
        yield deployment


def say(golden: Golden, index: int, **params: Any) -> dict[str, Any]:
    return request(prompt_token_ids=golden.prompt(index), **{**SURE, **params})


async def hear(deployment: Deployment, *bodies: dict[str, Any]) -> list[Heard]:
    async with new_client(deployment.url) as client:
        heard = await asyncio.gather(*(speak(client, body) for body in bodies))
    assert all(each.is_whole for each in heard), [each.body or each.errors for each in heard]
    return list(heard)


def farthest(given: bytes, wanted: bytes) -> int:
    """Largest difference of two sounds of one length, in steps of 16 bits."""
    assert len(given) == len(wanted) > 0
    one, other = (np.frombuffer(data, "<i2").astype(np.int32) for data in (given, wanted))
    return int(np.abs(one - other).max())


@pytest.mark.parametrize("index", PROMPTS)
@pytest.mark.parametrize("is_penalised", [False, True], ids=["plain", "penalised"])
async def test_float32_gives_the_reference_sound(
    is_penalised: bool, index: int, golden: Golden, built: Built, exact: Deployment
) -> None:
    ids = golden.greedy(index, is_penalised=is_penalised)
    body = say(golden, index, repetition_penalty=golden.penalty if is_penalised else 1, max_output_tokens=len(ids))
    [heard] = await hear(exact, body)
    error = farthest(heard.pcm, built.sound(ids))
    print(f"largest difference {error} of 32767")
    assert error <= FLOAT32, "another id would change whole frames"
    assert heard.done is not None and heard.done["usage"]["completion_tokens"] == len(ids)
    exact.assert_clean()


async def test_float32_streams_of_different_lengths_at_once(golden: Golden, built: Built, exact: Deployment) -> None:
    counts = [160, 60, 151, 48, 160, 35]
    bodies = [say(golden, prompt_of(n), max_output_tokens=count) for n, count in enumerate(counts)]
    for heard, (number, count) in zip(await hear(exact, *bodies), enumerate(counts), strict=True):
        wanted = built.sound(built.continued(golden.prompt(prompt_of(number)), count))
        assert farthest(heard.pcm, wanted) <= FLOAT32
    exact.assert_clean()


async def test_float32_draws_the_same_whatever_shares_the_batch(golden: Golden, exact: Deployment) -> None:
    drawn = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "noise": "seeded", "max_output_tokens": 140}
    mine = [say(golden, prompt_of(n), **{**drawn, "seed": 100 + n}) for n in range(3)]
    others = [say(golden, prompt_of(n), **{**drawn, "seed": n, "max_output_tokens": 30 + 20 * n}) for n in range(8)]
    alone = [(await hear(exact, body))[0].pcm for body in mine]
    together = [heard.pcm for heard in (await hear(exact, *others[:4], *mine, *others[4:]))[4:7]]
    errors = [farthest(one, other) for one, other in zip(together, alone, strict=True)]
    print(f"largest differences {errors} of 32767")
    assert max(errors) <= FLOAT32
    assert len({*alone}) == len(mine), "different seeds differ"
    exact.assert_clean()


@pytest.mark.parametrize("index", PROMPTS)
async def test_bfloat16_repeats_itself(index: int, golden: Golden, built: Built, rounded: Deployment) -> None:
    """Its ids leave the reference within the first frame (random weights are full of near ties), but not themselves.

    How far its logits are from the reference is tested with the model alone, where the ids are given.
    """
    ids = golden.greedy(index)
    body = say(golden, index, max_output_tokens=len(ids))
    [first], [second] = await hear(rounded, body), await hear(rounded, body)
    assert len(first.pcm) % (2 * golden.frame_samples) == 0 and len(first.pcm) <= len(built.sound(ids))
    assert first.pcm == second.pcm
    assert first.done is not None and first.done["usage"]["completion_tokens"] == len(ids)
    rounded.assert_clean()
