"""Inline preprocessing: which prompts qualify, with the same results and errors as in a pool process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mstar_core.api.preprocess.child import answer
from mstar_core.api.preprocess.pool import INLINE_BYTES, INLINE_FILES, WARM, Pool
from mstar_core.errors import MstarError
from mstar_core.plugin.media.limits import MediaLimits
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest
from tests.api.conftest import Started
from tests.fakes import media
from tests.fakes.conductor import echo
from tests.fakes.inline_model import SLOW, SPEC, WRONG, Processor
from tests.fakes.kept_pool import KeptProcess

ARRAY = MediaPart(modality="tensor", data=b"\x93NUMPY")


@asynccontextmanager
async def pool_of(**model_kwargs: str) -> AsyncIterator[Pool]:
    pool = Pool("tests.fakes.inline_model:Processor", None, model_kwargs, make=KeptProcess)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def pid_of(inputs: Inputs) -> int:
    pid: int = inputs.metadata["audio"]["pid"]
    return pid


async def test_a_quick_prompt_is_made_here_and_no_process_is_asked() -> None:
    async with pool_of() as pool:
        here = await pool.prompt(PromptRequest(text="go", media=[ARRAY]))
        assert pid_of(here) == os.getpid() and pool.begun == 0
        there = await pool.prompt(PromptRequest(text=SLOW, media=[ARRAY]))
        assert pid_of(there) in pool.pids and pool.begun == 1


@pytest.mark.parametrize(
    "given",
    [
        [MediaPart(modality="image", data=media.image())],
        [MediaPart(modality="audio", data=media.wav()), ARRAY],
        [MediaPart(modality="tensor", data=bytes(INLINE_BYTES + 1))],
        [ARRAY] * (INLINE_FILES + 1),
    ],
    ids=["image", "sound", "large", "many"],
)
async def test_what_is_decoded_or_large_goes_to_a_process_whatever_its_processor_says(given: list[MediaPart]) -> None:
    async with pool_of() as pool:
        assert pid_of(await pool.prompt(PromptRequest(text="go", media=given))) in pool.pids


@pytest.mark.parametrize("text", ["raise", "x" * 1001])
async def test_a_refusal_is_the_same_sentence_as_a_processs(text: str) -> None:
    told = []
    async with pool_of() as quick, pool_of(lacks="") as other:
        for pool in (quick, other):
            with pytest.raises(MstarError) as caught:
                await pool.prompt(PromptRequest(text=text))
            told.append((type(caught.value), str(caught.value), caught.value.facts))
        assert (quick.begun, other.begun) == (0, 1)
    assert told[0] == told[1]


async def test_a_limit_of_files_holds_here_too() -> None:
    limits = MediaLimits(decoded_bytes=5)
    async with pool_of() as pool:
        with pytest.raises(MstarError) as caught:
            await pool.prompt(PromptRequest(text="go", media=[ARRAY], limits=limits))
        assert (caught.value.status, pool.begun) == (413, 0)


async def test_an_api_without_a_processor_of_its_own_serves_by_its_processes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pool_of(lacks="") as pool:
        assert pid_of(await pool.prompt(PromptRequest(text="go"))) in pool.pids
    assert "every prompt goes to a pool process" in caplog.text


async def test_a_processor_that_fails_to_say_leaves_the_request_to_a_process(caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of() as pool:
        assert pid_of(await pool.prompt(PromptRequest(text=WRONG))) in pool.pids
    assert "whether a request runs inline" in caplog.text


async def test_requests_of_either_way_are_served(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        for text, jobs in (("go", 0), (SLOW, 1), ("on", 1)):
            answer = await api.client.post("/generate", data={"text": text, "streaming": "false"})
            assert answer.status_code == 200, answer.text
            assert api.process.pool.begun == jobs
        await api.clean()


async def test_a_processor_that_takes_arrays_where_they_lie_says_how_large_they_may_be() -> None:
    most = 3 << 20
    async with pool_of(inline_bytes=str(most)) as pool:
        part = MediaPart(modality="tensor", data=ARRAY.data + bytes(most - len(ARRAY.data) - 2))
        assert pid_of(await pool.prompt(PromptRequest(text="go", media=[part]))) == os.getpid()
        larger = MediaPart(modality="tensor", data=part.data + b"1")
        assert pid_of(await pool.prompt(PromptRequest(text="go", media=[larger]))) in pool.pids


def test_a_process_loads_what_its_processor_loads_lazily() -> None:
    processor = Processor(None, {})
    assert answer(processor, (WARM, ((),))) == (True, "") and processor.is_warm
    failed, error = answer(Processor(None, {"lacks": ""}), (WARM, ((),)))
    assert not failed and isinstance(error, MstarError), "a request meets the error, and the pool goes on"
