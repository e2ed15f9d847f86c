"""Files of one request decoded by several pool processes: selection, distribution, and the effect of a broken file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from mstar_core.api.preprocess.pool import CORES_EACH, MAX_PARALLEL, Pool
from mstar_core.errors import BadMedia, MstarError
from mstar_core.plugin.media.limits import MediaLimits
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest
from tests.fakes import media
from tests.fakes.kept_pool import KeptProcess
from tests.fakes.parallel_model import BROKEN, KILLS, UNSURE

APART = "tests.fakes.parallel_model:Processor"
QUICK = "tests.fakes.inline_model:Processor"
ARRAY = MediaPart(modality="tensor", data=b"0 0")


@asynccontextmanager
async def pool_of(size: int | None = 3, *, cores: int | None = None, target: str = APART) -> AsyncIterator[Pool]:
    pool = Pool(target, None, {}, size=size, cores=cores, make=KeptProcess)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def image(name: str = "") -> MediaPart:
    return MediaPart(modality="image", data=media.image(), name=name)


def asked(*files: MediaPart, text: str = "go", limits: MediaLimits | None = None) -> PromptRequest:
    return PromptRequest(text=text, media=files, limits=limits or MediaLimits())


def readers(inputs: Inputs) -> list[int]:
    return [pid for pid, _ in inputs.metadata["audio"]["read"]]


def numbers(inputs: Inputs) -> list[int]:
    return [number for _, number in inputs.metadata["audio"]["read"]]


async def test_each_image_is_read_by_another_process_and_the_prompt_is_made_here() -> None:
    async with pool_of() as pool:
        made = await pool.prompt(asked(image(), image(), image()))
        assert sorted(readers(made)) == sorted(pool.pids) and numbers(made) == [0, 1, 2]
        assert made.metadata["audio"]["pid"] == os.getpid() and pool.begun == 3


async def test_more_images_than_processes_are_dealt_out() -> None:
    async with pool_of(2) as pool:
        made = await pool.prompt(asked(*[image()] * 5))
        assert numbers(made) == [0, 1, 2, 3, 4] and pool.begun == 2
        first, second = pool.pids
        assert sorted(readers(made)) == sorted([first, second] * 2 + [readers(made)[0]])


async def test_images_are_counted_among_images() -> None:
    async with pool_of() as pool:
        made = await pool.prompt(asked(ARRAY, image(), ARRAY, image()))
        assert numbers(made) == [0, 0, 0, 1] and pool.begun == 2


@pytest.mark.parametrize(
    ("size", "files", "text"),
    [(1, [image(), image()], "go"), (3, [image()], "go"), (3, [image(), image()], UNSURE)],
    ids=["one process", "one image", "nobody knows"],
)
async def test_what_cannot_be_shared_goes_to_one_process(size: int, files: Sequence[MediaPart], text: str) -> None:
    async with pool_of(size) as pool:
        made = await pool.prompt(asked(*files, text=text))
        assert made.metadata["audio"]["pid"] in pool.pids and pool.begun == 1


async def test_a_busy_pool_is_not_asked_for_more_than_one_job() -> None:
    async with pool_of(2) as pool:
        first = asyncio.create_task(pool.prompt(asked(image(), text="slow: ")))
        while not pool.busy:  # noqa: ASYNC110 the start of a job has no event for tests
            await asyncio.sleep(0)
        made = await pool.prompt(asked(image(), image()))
        assert made.metadata["audio"]["pid"] in pool.pids
        await first
        assert pool.begun == 2


async def test_a_file_that_cannot_be_read_says_so() -> None:
    async with pool_of() as pool:
        with pytest.raises(BadMedia, match="image 1 is broken"):
            await pool.prompt(asked(image(), image(BROKEN), image(BROKEN)))
        assert numbers(await pool.prompt(asked(image(), image()))) == [0, 1]


async def test_a_file_that_ends_its_process_fails_its_request_alone() -> None:
    async with pool_of(4) as pool:
        bad = pool.prompt(asked(image(), image(KILLS)))
        good = pool.prompt(asked(image(), image()))
        ended, made = await asyncio.gather(bad, good, return_exceptions=True)
        assert isinstance(ended, BadMedia) and isinstance(made, Inputs) and numbers(made) == [0, 1]
        again = await pool.prompt(asked(image(), image(), image(), image()))
        assert len(set(readers(again))) == 4 and pool.busy == 0


async def test_a_caller_that_goes_away_leaves_its_files_unread() -> None:
    async with pool_of(2) as pool:
        gone = asyncio.create_task(pool.prompt(asked(image(), image())))
        await asyncio.sleep(0)
        gone.cancel()
        made = await pool.prompt(asked(image(), text="slow: "))
        assert made.metadata["audio"]["pid"] in pool.pids and pool.busy <= 1


@pytest.mark.parametrize("over", [0, 1])
async def test_the_limit_of_decoded_bytes_is_that_of_all_files_together(over: int) -> None:
    each = 10 * 6 * 3
    files = [MediaPart(modality="image", data=media.image(10, 6)) for _ in range(3)]
    async with pool_of() as pool:
        asks = pool.prompt(asked(*files, limits=MediaLimits(decoded_bytes=3 * each - over)))
        if not over:
            assert numbers(await asks) == [0, 1, 2]
            return
        with pytest.raises(MstarError) as caught:
            await asks
        assert caught.value.status == 413


@pytest.mark.parametrize(
    ("target", "cores", "count"),
    [(APART, CORES_EACH, 1), (APART, 2 * CORES_EACH, 2), (APART, 64, MAX_PARALLEL), (QUICK, 64, 1)],
)
async def test_a_pool_without_a_size_follows_the_cores_where_files_are_read_apart(
    target: str, cores: int, count: int
) -> None:
    async with pool_of(None, cores=cores, target=target) as pool:
        assert len(set(pool.pids)) == count
        assert (await pool.prompt(asked(image()))).metadata["audio"]["pid"] in pool.pids
