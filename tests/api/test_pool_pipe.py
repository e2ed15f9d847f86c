"""Messages between the api and a pool process, and what remains allocated."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest

from mstar_core.api.preprocess.child import Answer, JobCall
from mstar_core.api.preprocess.forms import Fields, InvalidForm, Reader, restored
from mstar_core.api.preprocess.pipe import KEPT_BYTES, MessageMemory, PoolPipe
from mstar_core.api.preprocess.process import Note, ProcessorProcess, checked
from mstar_core.errors import BadMedia, RequestError, TooLarge
from mstar_core.plugin.chat.turns import Turn
from mstar_core.plugin.media.limits import MediaLimits
from mstar_core.plugin.processor import InputPart, Inputs, MediaPart, PromptRequest, SegmentInputs
from tests.api.test_pool import pool_of

MIB = 1 << 20
SIZES = (0, 1000, MIB - 100, MIB + 1, KEPT_BYTES + 5, 20 * MIB)


@pytest.fixture
def ends() -> Iterator[tuple[PoolPipe, PoolPipe]]:
    ours, theirs = PoolPipe.pair()
    yield ours, theirs
    theirs.close(is_shared=True)
    ours.close()


def taken_bytes(end: PoolPipe) -> int:
    """Return the bytes allocated for messages of this end."""
    memory: Any = end._to_peer
    return os.fstat(memory._fd).st_blocks * 512


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_every_size_arrive_both_ways(ends: tuple[PoolPipe, PoolPipe], size: int) -> None:
    ours, theirs = ends
    for number in range(3):
        value: dict[str, Any] = {"data": os.urandom(size), "array": np.arange(size // 8), "number": number}
        ours.send(value)
        note = theirs.note()
        got = theirs.load(note)
        assert note[0] >= size and got["data"] == value["data"] and np.array_equal(got["array"], value["array"])
        theirs.send(got)
        back = ours.receive()
        assert back["data"] == value["data"] and back["number"] == number
        got["array"][:1] = 7  # it belongs to the reader
    assert not theirs.poll()


def test_a_value_stays_as_it_was_when_the_next_message_comes(ends: tuple[PoolPipe, PoolPipe]) -> None:
    ours, theirs = ends
    ours.send(np.zeros(MIB, np.uint8))
    first = theirs.receive()
    ours.send(np.ones(MIB, np.uint8))
    theirs.receive()
    assert not first.any()


def test_memory_of_a_large_message_is_given_back(ends: tuple[PoolPipe, PoolPipe]) -> None:
    ours, theirs = ends
    assert taken_bytes(ours) == 0
    for _ in range(2):
        ours.send(bytes(30 * MIB))
        assert taken_bytes(ours) >= 30 * MIB
        assert len(theirs.receive()) == 30 * MIB
        assert taken_bytes(ours) <= KEPT_BYTES


def test_a_message_that_is_too_large_is_an_error_and_the_next_one_arrives(
    ends: tuple[PoolPipe, PoolPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr("mstar_core.api.preprocess.pipe.MEMORY_BYTES", 8 * MIB)
    with pytest.raises(MemoryError):
        ours.send([bytes(5 * MIB), bytearray(5 * MIB)])
    assert not theirs.poll(0) and taken_bytes(ours) <= KEPT_BYTES
    ours.send(b"next")
    assert theirs.receive() == b"next"


def test_a_system_without_memory_fails_one_message(
    ends: tuple[PoolPipe, PoolPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "no space")

    ours, theirs = ends
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(os, "posix_fallocate", full)
        ours.send(bytes(MIB))
    ours.send(b"small")
    assert theirs.receive() == b"small"


def test_what_has_no_form_is_told_and_the_next_message_goes(ends: tuple[PoolPipe, PoolPipe]) -> None:
    ours, theirs = ends
    with pytest.raises(TypeError):
        ours.send((bytes(9 * MIB), lambda: None))
    assert not theirs.poll(0) and taken_bytes(ours) <= KEPT_BYTES
    ours.send("next")
    assert theirs.receive() == "next"


def test_no_descriptor_is_left_over() -> None:
    gc.collect()  # otherwise descriptors of other tests may be closed meanwhile
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ours, theirs = PoolPipe.pair()
        theirs.close(is_shared=True)
        ours.close()
        ours.close()
    MessageMemory().close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("size", [1000, 100_000, 3 * MIB, 70 * MIB])
async def test_a_process_gets_and_gives_messages_of_every_size(size: int) -> None:
    sound = np.random.default_rng(size).uniform(-1, 1, size // 4).astype(np.float32)
    async with pool_of() as pool:
        for _ in range(2):
            data, _ = await pool.postprocess(sound, "audio")
            assert data == (sound * 32767).astype("<i2").tobytes()


@pytest.mark.parametrize("size", [8, 200_000, 3 * MIB])
async def test_a_job_that_cannot_be_sent_fails_alone(size: int) -> None:
    async with pool_of() as pool:
        with pytest.raises(TypeError):
            await pool._run("postprocess", bytes(size), lambda: None)
        assert pool.busy == 0
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """Parameters as a plugin declares them."""

    seed: int | None = None
    noise: tuple[tuple[float, ...], ...] | None = None
    names: tuple[str, ...] = ()


REQUEST = PromptRequest(
    text="a",
    texts=("a", "b"),
    turns=[Turn(role="user", order=[("text", 0)])],
    media=[MediaPart(modality="image", data=b"x" * 900)],
    order=[("text", 0), ("image", 0)],
    params=Params(seed=2**63 - 1, noise=((0.5,), (1.0,)), names=("n",)),
    outputs=frozenset(("text",)),
    limits=MediaLimits(video_frames=3),
)


def test_a_pool_process_gets_the_request_with_its_own_types(ends: tuple[PoolPipe, PoolPipe]) -> None:
    ours, theirs = ends
    ours.send([("prompt", (REQUEST,)), ("decode", (REQUEST.limits, (0, 1), *REQUEST.media))])
    (prompt, (request,)), decode = theirs.receive()
    assert (prompt, request) == ("prompt", REQUEST)
    assert isinstance(request.params.noise[0], tuple) and decode == ("decode", (REQUEST.limits, (0, 1), *REQUEST.media))


def test_the_api_gets_inputs_and_errors_of_its_own_types(ends: tuple[PoolPipe, PoolPipe]) -> None:
    ours, theirs = ends
    ids = np.arange(5, dtype=np.int32)
    made = Inputs(
        arrays={"ids": ids, "none": np.zeros((0, 3), "<f4"), "one": np.zeros(())},
        segments=[SegmentInputs(kind="text", arrays={"x": ids[::2]}, length=3)],
        prompt_tokens=5,
        parts=[InputPart(spans={"ids": (1, 3)}, facts={"part": 1})],
        params=dataclasses.replace(REQUEST.params, seed=7),
        metadata={"image": {"width": np.int64(4)}},
    )
    error = TooLarge("long", "detail", "hint", field="text", allowed=[1, 2], code="own", object=object())
    theirs.send([(True, made), (False, error)])
    (is_done, inputs), (is_failed, got) = ours.receive()
    assert (is_done, is_failed) == (True, False) and isinstance(inputs.params, Fields), (
        "the api imports no class by name"
    )
    inputs = restored(inputs, REQUEST.params)
    assert inputs.params == dataclasses.replace(REQUEST.params, seed=7) and inputs.metadata == {"image": {"width": 4}}
    assert np.array_equal(inputs.arrays["ids"], ids) and inputs.arrays["none"].shape == (0, 3)
    assert inputs.arrays["one"].shape == () and np.array_equal(inputs.segments[0].arrays["x"], ids[::2])
    part = inputs.part(0)
    assert np.array_equal(part.arrays["ids"], ids[1:3]) and part.facts == {"part": 1} and not part.parts
    assert type(got) is TooLarge and (got.title, got.detail, got.hint, got.code) == ("long", "detail", "hint", "own")
    assert got.facts["allowed"] == [1, 2] and got.status == 413


def ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


HOSTILE: list[Any] = [
    ext(1, ["<f4", [1 << 62, 1 << 62], 0]),
    ext(1, ["<f4", [-4], 0]),
    ext(1, ["O", [1], 0]),
    ext(1, ["f4,f4", [1], 0]),
    ext(1, ["|u1", [200], 0]),
    ext(1, ["|u1", [4], -2]),
    ext(1, ["|V8", [1], 0]),
    ext(1, ["|u1", [True], 0]),
    ext(2, [0, 1 << 40]),
    ext(2, [-1, 4]),
    ext(2, [90, 20]),
    [ext(2, [0, 60]), ext(2, [0, 60])],
    ext(3, ["MstarError", {}]),
    ext(3, ["Inputs", {"unknown": 1}]),
    ext(3, ["Inputs", {"1": 1}]),
    ext(3, [1, {}]),
    ext(4, ["SystemExit", "a", "b", "c", "d", {}]),
    ext(4, ["TooLarge", "a", "b", "c", "d", {"code": "e"}]),
    ext(99, []),
    ext(5, ["os:system", 3]),
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_an_answer_out_of_form_is_refused(value: Any) -> None:
    with pytest.raises(InvalidForm):
        Reader(memoryview(bytes(100)), trusts_names=False).value(msgspec.msgpack.encode(value))


def test_an_answer_creates_no_object_by_name() -> None:
    made = Reader(memoryview(b""), trusts_names=False).value(
        msgspec.msgpack.encode(ext(5, ["os:system", {"command": "x"}]))
    )
    assert made == Fields({"command": "x"})


@pytest.mark.parametrize(
    "call, found",
    [
        (("recode", (b"", "png", None)), (True, "text")),
        (("prompt", (REQUEST,)), (True, b"")),
        (("prompt", (REQUEST,)), 3),
        (("prompt", (REQUEST,)), (True, Inputs(arrays={"x": 1}))),  # type: ignore[dict-item]
        (("prompt", (REQUEST,)), (True, Inputs(warnings=(1,)))),  # type: ignore[arg-type]
        (("prompt", (REQUEST,)), (True, Inputs(metadata={"image": 1}))),  # type: ignore[dict-item]
        (("prompt", (REQUEST,)), (True, Inputs(segments=[SegmentInputs(kind="a", arrays={}, length="b")]))),  # type: ignore[arg-type]
        (("prompt", (REQUEST,)), (True, Inputs(parts=[InputPart(spans={"x": (0, 1)})]))),
        (("prompt", (REQUEST,)), (True, Inputs(arrays={"x": np.zeros(1)}, parts=[InputPart(spans={"x": (0, 1.5)})]))),  # type: ignore[dict-item]
        (("prompt", (REQUEST,)), (True, Inputs(parts=(1,)))),  # type: ignore[arg-type]
        (("decode", (None, (), *REQUEST.media)), (True, [])),
        (("postprocess", (b"", "audio")), (True, (b"", {1: 2}))),
        (("recode", ()), (False, "error")),
    ],
)
def test_an_answer_of_another_type_is_refused(call: Any, found: Any) -> None:
    with pytest.raises(InvalidForm):
        checked(call, found)


def test_a_note_of_another_size_ends_the_conversation(ends: tuple[PoolPipe, PoolPipe]) -> None:
    ours, theirs = ends
    for data in (b"short", bytes(15)):
        theirs._pipe.send(data)
        with pytest.raises(EOFError):
            ours.note()
    for note in ((1 << 40, 8), (8, 16), (8, 0)):
        with pytest.raises(InvalidForm):
            ours.load(note)


def test_a_pool_process_cannot_shrink_the_memory(ends: tuple[PoolPipe, PoolPipe]) -> None:
    memory: Any = ends[1]._to_peer
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memory._fd, 0)


def test_numbers_and_texts_without_a_form_are_the_requests_fault(ends: tuple[PoolPipe, PoolPipe]) -> None:
    for value in (1 << 70, [1 << 70], "\ud800"):
        with pytest.raises(RequestError):
            ends[0].send(value)


class Lying(ProcessorProcess):
    """The real process, whose answers are cut if a text is "lie": what a decoder that a file took over could send."""

    def load(self, note: Note, calls: Sequence[JobCall]) -> list[Answer]:
        is_lie = any(args[0].text == "lie" for _, args in calls)
        return super().load((note[0], note[1] - is_lie), calls)


async def test_an_invalid_answer_fails_its_job_and_ends_the_process() -> None:
    async with pool_of(make=Lying) as pool:
        for _ in range(2):
            with pytest.raises(BadMedia):
                await pool.prompt(PromptRequest(text="lie"))
        assert pool.busy == 0


async def test_an_invalid_answer_fails_only_its_own_job_of_a_shared_message() -> None:
    async with pool_of(make=Lying) as pool:
        jobs = (pool.prompt(PromptRequest(text=text)) for text in ("first", "abc", "lie", "abc"))
        first, before, lie, behind = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(lie, BadMedia)
        assert [each.prompt_tokens for each in (first, before, behind) if isinstance(each, Inputs)] == [5, 3, 3]
