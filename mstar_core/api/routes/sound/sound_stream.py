"""Sound that is sent while it is generated: encoded bytes, or server-sent events. Used by the speech routes."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import pybase64

from mstar_core.api.exchange import PING, Exchange, event, streaming
from mstar_core.api.output.audio import content_type
from mstar_core.api.output.kept_events import EVENTS
from mstar_core.api.schema import SpeechDelta, SpeechDone, SpeechUsage
from mstar_core.errors import MstarError
from mstar_core.plugin.surface import Audio
from mstar_core.sound_files import AudioFormat, Encoder, stream_encoder

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Facts of a sound that has been generated."""

    usage: Mapping[str, Any]
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundSource:
    """Sound in the making.

    pcm: its pieces, PCM16 little endian, and None after each keep-alive interval without one. end: called once after
    the last piece. left_s: seconds to the deadline of the request, None without one.
    """

    pcm: AsyncIterator[bytes | None]
    end: Callable[[], Ending]
    left_s: Callable[[], float | None]


async def send_sound(exchange: Exchange, source: SoundSource, form: AudioFormat, audio: Audio) -> None:
    """Send sound as one file of unknown length. Raises what its source raises."""
    kind = content_type(form, audio.rate, audio.channels)
    try:
        encoder = await _encoder(exchange, form, audio)
        async for data in _encoded(source, form, encoder):
            if data is not None:
                await exchange.write(data, kind, source.left_s())
        source.end()
        await exchange.write(await _run(form, encoder.end), kind, is_last=True)
    except MstarError as error:
        if exchange.has_begun:  # an audio body cannot carry an error: only an aborted connection signals it
            exchange.abort(drops=error.code == "stalled")
        raise
    await exchange.end()


async def send_sound_events(exchange: Exchange, source: SoundSource, form: AudioFormat, audio: Audio) -> None:
    """Send sound as server-sent events. Raises what its source raises."""
    async with streaming(exchange):
        encoder = await _encoder(exchange, form, audio)
        async for data in _encoded(source, form, encoder):
            if data:
                await exchange.send([_delta(data)], EVENTS, source.left_s())
            elif data is None:
                await exchange.keep_alive(PING, EVENTS)
        rest = await _run(form, encoder.end)
        deltas = [_delta(rest)] if rest else []
        ending = source.end()
        usage = SpeechUsage(
            input_tokens=ending.usage["prompt_tokens"],
            output_tokens=ending.usage["completion_tokens"],
            total_tokens=ending.usage["total_tokens"],
        )
        last = event(SpeechDone(usage=usage, warnings=list(ending.warnings)))
        await exchange.send([*deltas, last], EVENTS, is_last=True)


def _delta(data: bytes) -> tuple[bytes]:
    return event(SpeechDelta(audio=pybase64.b64encode_as_string(data)))


async def _encoder(exchange: Exchange, form: AudioFormat, audio: Audio) -> Encoder:
    # A process that goes on with the response repeats the number.
    serial = zlib.crc32(f"{exchange.request_id}/{exchange.created}".encode()) >> 1
    return await _run(form, stream_encoder, form, audio.rate, audio.channels, serial)


async def _encoded(source: SoundSource, form: AudioFormat, encoder: Encoder) -> AsyncIterator[bytes | None]:
    """Yield the encoded sound but for the encoder's last bytes, and None after each keep-alive interval without any."""
    async for pcm in source.pcm:
        data = await _run(form, encoder.push, pcm) if pcm else b""
        if data or pcm is None:
            yield data or None


async def _run(form: AudioFormat, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of an encoder, on a thread if the format has a codec."""
    return await asyncio.to_thread(call, *args, **kwargs) if form.codec else call(*args, **kwargs)
