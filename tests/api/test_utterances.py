"""A text that arrives while it is spoken, for a model whose text input grows: one utterance, or several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from mstar_core.api.text.utterances import Utterances
from mstar_core.errors import RequestError
from mstar_core.messages.requests import GrowingInput, MoreInput, NewRequest
from tests.api.conftest import Api, running
from tests.api.handed_over import first_process, second_process
from tests.api.test_speech_lines import CHUNK_BYTES, PATH, TYPE, call, unchunked
from tests.fakes.conductor import FakeDeployment, begin
from tests.fakes.live_speech import END, LIVE, SPEC, Reader


def more(api: Api, handle: int) -> str:
    """Return the text that a request has got after its begin; a bar is its end."""
    found = [message for message in api.fake.of(MoreInput) if message.handle == handle]
    assert all(message.name == LIVE for message in found)
    text = bytes(int(value) for message in found for value in message.values)
    return text.decode().replace(chr(END), "|") + ("." if found and found[-1].is_over else "")


async def test_a_text_is_one_request_that_gets_it_while_it_speaks() -> None:
    async with running(begin, model=SPEC) as api, call(api) as open_call:
        await open_call.send({"response_format": "pcm"}, {"input": "One se"})
        request = await api.fake.next_request()
        assert api.fake.prompt(request) == "One " and request.growing == {LIVE: GrowingInput()}
        await open_call.head()
        assert len(await open_call.sound(CHUNK_BYTES)) == CHUNK_BYTES
        await open_call.send({"input": "ntence. An"}, b"\n")
        await api.fake.until(lambda: more(api, request.handle) == "sentence. ")
        await open_call.send({"input": "d another"}, {"input": " one."})
        await open_call.end()
        await api.fake.until(lambda: more(api, request.handle) == "sentence. And another one.|.")
        api.fake.audio(request.handle)
        api.fake.finish(request.handle)
        assert len(await open_call.rest()) == CHUNK_BYTES
        assert len(api.fake.requests) == 1
        await api.clean()


@pytest.mark.parametrize(
    ("lines", "prompt", "rest"),
    [
        (["of a text that ", "arrives."], "long story of a text that ", "arrives.|."),
        (["one"], "long story one|", "."),
    ],
    ids=["long enough", "ended before"],
)
async def test_a_text_is_begun_once_its_processor_has_the_ids_that_it_needs(
    lines: list[str], prompt: str, rest: str
) -> None:
    async with running(begin, model=SPEC) as api, call(api) as open_call:
        await open_call.send({"response_format": "pcm"}, {"input": "long story "})
        for line in lines:
            await open_call.send({"input": line})
        await open_call.end()
        request = await api.fake.next_request()
        assert api.fake.prompt(request).replace(chr(END), "|") == prompt
        await api.fake.until(lambda: more(api, request.handle) == rest)
        api.fake.audio(request.handle)
        api.fake.finish(request.handle)
        await open_call.head()
        assert await open_call.rest()
        await api.clean()


async def test_a_new_attempt_gets_all_of_the_text_at_once() -> None:
    async with running(begin, model=SPEC) as api, call(api) as open_call:
        await open_call.send({"response_format": "pcm"}, {"input": "One two three "})
        first = await api.fake.next_request()
        await open_call.send({"input": "four five "})
        await api.fake.until(lambda: more(api, first.handle) == "four five ")
        api.fake.lose(first.handle)
        second = await api.fake.next_request(2)
        assert second.growing == {LIVE: GrowingInput(values=list(b"four five "))}
        await open_call.send({"input": "six"})
        await open_call.end()
        await api.fake.until(lambda: more(api, second.handle) == "six|.")
        api.fake.finish(second.handle)
        await open_call.head()
        await open_call.rest()
        await api.clean()


async def test_an_attempt_after_the_end_of_the_text_knows_the_end() -> None:
    async with running(begin, model=SPEC) as api, call(api) as open_call:
        await open_call.send({"response_format": "pcm"}, {"input": "One two"})
        await open_call.end()
        first = await api.fake.next_request()
        await api.fake.until(lambda: more(api, first.handle) == "two|.")
        api.fake.lose(first.handle)
        second = await api.fake.next_request(2)
        assert second.growing == {LIVE: GrowingInput(values=[*b"two", END], is_over=True)}
        api.fake.finish(second.handle)
        await open_call.head()
        await open_call.rest()
        assert not more(api, second.handle)
        await api.clean()


async def test_text_behind_the_end_of_a_speech_is_the_next_utterance() -> None:
    async with running(begin, model=SPEC) as api, call(api) as open_call:
        await open_call.send({"response_format": "pcm"}, {"input": "One two th"})
        first = await api.fake.next_request()
        api.fake.finish(first.handle)
        await open_call.head()
        await open_call.sound(CHUNK_BYTES)
        await open_call.send({"input": "ree four"})
        await open_call.end()
        second = await api.fake.next_request(2)
        assert api.fake.prompt(second) == "three "
        await api.fake.until(lambda: more(api, second.handle) == "four|.")
        api.fake.finish(second.handle)
        assert len(await open_call.rest()) == CHUNK_BYTES
        await api.clean()


async def test_a_bad_line_fails_the_request_that_speaks() -> None:
    async with running(begin, model=SPEC) as api, call(api) as open_call:
        await open_call.send({"input": "One two", "stream_format": "sse"})
        request = await api.fake.next_request()
        await open_call.head()
        await open_call.send(b"nonsense\n")
        assert b"line 2 is not valid JSON" in await open_call.rest()
        await api.fake.until(lambda: [each.handle for each in api.fake.cancels] == [request.handle])
        await api.clean()


async def test_a_text_without_words_is_refused() -> None:
    async with running(begin, model=SPEC) as api:
        answer = await api.client.post(
            PATH, content=b'{"voice": "leo"}\n{"input": ""}\n', headers={"Content-Type": TYPE}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        await api.clean()


def speak(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: two pieces of sound for each text."""
    fake.audio(request.handle)
    fake.audio(request.handle)
    fake.finish(request.handle)


async def test_another_process_goes_on_with_a_text() -> None:
    body = b'{"input": "One. Two", "response_format": "pcm", "seed": 1}\n{"input": " ends. Three."}\n'
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with running(speak, model=SPEC) as api:
        with first_process(api, head.encode() + body) as wire:
            await api.until(lambda: wire.written.endswith(b"0\r\n\r\n"))
            whole = unchunked(wire.written)
            for moment in wire.moments[::2]:
                with second_process(api, moment, next(moment.client_has)) as went:
                    await api.until(lambda: went.received.endswith(b"0\r\n\r\n"))
                    assert unchunked(went.received) == whole


async def utterances(pieces: Sequence[str], limit: int) -> list[str]:
    """Return the texts of all utterances."""

    async def texts() -> AsyncIterator[str]:
        for piece in pieces:
            yield piece

    found = []
    async with Utterances(Reader(), limit).reading(texts()) as each:
        async for utterance in each:
            ids = list(utterance.first)
            async for following in utterance.more:
                ids += following
            assert ids[-1] == END
            found.append(bytes(ids[:-1]).decode())
    return found


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("One two. Three four! Five", 5, ["One two. ", "Three four! ", "Five"]),
        ("One two. Three four! Five", 9, ["One two. Three four! ", "Five"]),
        ("One two. Three four! Five", 100, ["One two. Three four! Five"]),
        ("3.5 goes on", 1, ["3.5 goes on"]),
        ("今天。明天。 后天", 2, ["今天。", "明天。", " 后天"]),
        ("A line\nB line\n", 1, ["A line\n", "B line\n"]),
    ],
)
@pytest.mark.parametrize("size", [1, 4, 1000])
async def test_long_texts_are_divided_at_sentences_whatever_the_pieces(
    text: str, limit: int, expected: list[str], size: int
) -> None:
    assert await utterances([text[at : at + size] for at in range(0, len(text), size)], limit) == expected


async def test_an_error_of_the_text_reaches_the_utterance_that_reads_it() -> None:
    async def texts() -> AsyncIterator[str]:
        yield "One two "
        await asyncio.sleep(0)
        raise RequestError("the line is broken")

    async with Utterances(Reader()).reading(texts()) as each:
        utterance = await anext(each)
        with pytest.raises(RequestError, match="broken"):
            async for _ in utterance.more:
                pass
