"""Sound files: WAV, raw PCM, FLAC, MP3 and Opus, as whole files and as streams. Used by the api and the client.

Samples are PCM16 little endian, interleaved. PyAV is imported by the first encoder.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Protocol

from mstar_core.codec import wav_header


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFormat:
    """A `response_format`. container, codec: names of PyAV; empty if no encoder is needed."""

    name: str
    content_type: str
    container: str = ""
    codec: str = ""
    bit_rate: int = 0


FORMATS: Final = {
    "wav": AudioFormat(name="wav", content_type="audio/wav"),
    "pcm": AudioFormat(name="pcm", content_type="audio/pcm"),
    "flac": AudioFormat(name="flac", content_type="audio/flac", container="flac", codec="flac"),
    "mp3": AudioFormat(name="mp3", content_type="audio/mpeg", container="mp3", codec="libmp3lame", bit_rate=96_000),
    "opus": AudioFormat(name="opus", content_type="audio/ogg", container="ogg", codec="libopus", bit_rate=48_000),
}


def can_encode(form: AudioFormat) -> bool:
    """Return whether the installed libraries include the encoder."""
    try:
        import av
    except ImportError:
        return False
    try:
        av.Codec(form.codec, "w")
    except ValueError:  # base class of av.codec.codec.UnknownCodecError
        return False
    return True


class Encoder(Protocol):
    """Incremental encoder of PCM16."""

    def push(self, pcm: bytes) -> bytes: ...

    def end(self) -> bytes: ...


class PcmEncoder:
    """Passes PCM16 through, after `head`."""

    def __init__(self, head: bytes = b"") -> None:
        self._head = head

    def push(self, pcm: bytes) -> bytes:
        head, self._head = self._head, b""
        return head + pcm

    def end(self) -> bytes:
        return self.push(b"")


class _Sink(io.BytesIO):
    """Sink of a streaming muxer, which may not seek."""

    def seekable(self) -> bool:
        return False

    def take(self) -> bytes:
        data = self.getvalue()
        self.seek(0)
        self.truncate()
        return data


class AvEncoder:
    """FLAC, MP3 or Opus encoder of PyAV. Not thread safe.

    serial: number of the stream in an Ogg file; None: random. With a number, equal samples give equal bytes.
    """

    def __init__(self, form: AudioFormat, rate: int, channels: int, sink: BinaryIO, serial: int | None = None) -> None:
        import av

        self._rate = rate
        self._layout = "mono" if channels == 1 else "stereo"
        self._sink = sink
        options = {"write_xing": "0"} if form.container == "mp3" and isinstance(sink, _Sink) else {}
        if form.container == "ogg" and serial is not None:
            options = {"fflags": "+bitexact", "serial_offset": str(serial)}
        self._container = av.open(sink, mode="w", format=form.container, options=options)
        codec: Any = form.codec
        self._stream: Any = self._container.add_stream(codec, rate=rate)
        self._stream.layout = self._layout
        if form.bit_rate:
            self._stream.bit_rate = form.bit_rate
        if form.container == "ogg" and isinstance(sink, _Sink):
            self._container.options["page_duration"] = "100000"
        context = self._stream.codec_context
        self._container.start_encoding()  # writes the header even without samples
        self._resampler = av.AudioResampler(
            format=context.format, layout=self._layout, rate=context.sample_rate, frame_size=context.frame_size or 4096
        )

    def push(self, pcm: bytes) -> bytes:
        import av
        import numpy as np

        if pcm:
            samples = np.frombuffer(pcm, dtype="<i2").reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=self._layout)
            frame.sample_rate = self._rate
            self._encode(self._resampler.resample(frame))
        return self._taken()

    def end(self) -> bytes:
        self._encode(self._resampler.resample(None))
        self._mux(self._stream.encode(None))
        self._container.close()
        return self._taken()

    def _encode(self, frames: list[Any]) -> None:
        for frame in frames:
            self._mux(self._stream.encode(frame))

    def _mux(self, packets: Any) -> None:
        for packet in packets:
            self._container.mux(packet)

    def _taken(self) -> bytes:
        return self._sink.take() if isinstance(self._sink, _Sink) else b""


def stream_encoder(form: AudioFormat, rate: int, channels: int, serial: int | None = None) -> Encoder:
    """Return an encoder for streaming. serial: as for `AvEncoder`, at most 2**31 - 1."""
    if form.codec:
        return AvEncoder(form, rate, channels, _Sink(), serial)
    return PcmEncoder(wav_header(rate, channels, None) if form.name == "wav" else b"")


def encode_whole(form: AudioFormat, pcm: bytes, rate: int, channels: int) -> bytes:
    """Encode a complete file, with the correct sizes in its header."""
    if not form.codec:
        return (wav_header(rate, channels, len(pcm)) if form.name == "wav" else b"") + pcm
    sink = io.BytesIO()
    encoder = AvEncoder(form, rate, channels, sink)
    encoder.push(pcm)
    encoder.end()
    return sink.getvalue()
