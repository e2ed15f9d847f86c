"""Each limit of media and of bodies, just below and just above; hostile files; restrictions of pool processes."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from mstar_core.api.preprocess.media_check import check_media, heard_s
from mstar_core.errors import BadMedia, MstarError, TooLarge
from mstar_core.plugin.media import MediaLimits, VideoFile, read_image, read_sound
from mstar_core.plugin.media.containers import container_format
from mstar_core.plugin.processor import MediaPart
from tests.api.conftest import Api, Started, running
from tests.fakes import media
from tests.fakes.conductor import echo
from tests.fakes.omni_model import SPEC

VIDEO = media.video(32, 16, frames=20, rate=10)


def part(modality: str, data: bytes) -> MediaPart:
    return MediaPart(modality=modality, data=data)


LIMITS: list[tuple[str, bytes, str, Any, Any]] = [
    ("image", media.image(10, 6), "image_pixels", 60, 59),
    ("image", media.image(10, 6), "image_side", 10, 9),
    ("image", media.image(10, 6), "decoded_bytes", 180, 179),
    ("audio", media.wav(0.5), "audio_s", 0.5, 0.49),
    ("audio", media.wav(0.5, 16_000), "decoded_bytes", 32_000, 31_999),
    ("video", VIDEO, "video_s", 2.0, 1.9),
    ("video", VIDEO, "video_width", 32, 31),
    ("video", VIDEO, "video_height", 16, 15),
    ("tensor", b"\x93NUMPY", "decoded_bytes", 6, 5),
]


@pytest.mark.parametrize("modality, data, name, enough, short", LIMITS, ids=[f"{c[0]}-{c[2]}" for c in LIMITS])
def test_a_limit_holds_at_its_value_and_not_below(
    modality: str, data: bytes, name: str, enough: Any, short: Any
) -> None:
    check_media([part(modality, data)], MediaLimits(**{name: enough}))
    with pytest.raises(TooLarge) as over:
        check_media([part(modality, data)], MediaLimits(**{name: short}))
    assert (over.value.code, over.value.status, over.value.field) == ("media_too_large", 413, "files")


def test_the_files_of_a_request_share_the_limit_of_bytes() -> None:
    parts = [part("image", media.image(10, 6))] * 2
    check_media(parts, MediaLimits(decoded_bytes=360))
    with pytest.raises(TooLarge):
        check_media(parts, MediaLimits(decoded_bytes=359))


def test_frames_of_a_video_are_counted_while_they_are_decoded() -> None:
    frame = 32 * 16 * 3
    for limits, ok in (
        (MediaLimits(video_frames=3), True),
        (MediaLimits(video_frames=2), False),
        (MediaLimits(decoded_bytes=3 * frame), True),
        (MediaLimits(decoded_bytes=3 * frame - 1), False),
    ):
        with VideoFile(VIDEO, limits) as video:
            if ok:
                assert len(list(video.frames([0, 4, 9]))) == 3
            else:
                with pytest.raises(TooLarge):
                    list(video.frames([0, 4, 9]))


def test_the_frames_asked_for_come_and_a_missing_one_is_an_error() -> None:
    with VideoFile(VIDEO, MediaLimits()) as video:
        assert (video.count(), video.size, video.rate, video.seconds) == (20, (32, 16), 10.0, 2.0)
        levels = [int(frame.mean()) for frame in video.frames([0, 5, 5, 9])]
        assert all(abs(level - wanted) < 12 for level, wanted in zip(levels, (0, 100, 100, 180), strict=True))
    with VideoFile(VIDEO, MediaLimits()) as video, pytest.raises(BadMedia) as short:
        list(video.frames([0, 20]))
    assert short.value.code == "too_few_frames"


def test_images_come_upright_in_rgb() -> None:
    from PIL import Image

    file = io.BytesIO()
    image = Image.new("RGB", (8, 4), "red")
    exif = image.getexif()
    exif[274] = 6  # rotated by 90 degrees
    image.save(file, "JPEG", exif=exif)
    assert read_image(file.getvalue(), MediaLimits()).size == (4, 8)
    clear = io.BytesIO()
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(clear, "PNG")
    assert read_image(clear.getvalue(), MediaLimits()).getpixel((0, 0)) == (255, 255, 255)
    deep = io.BytesIO()
    Image.fromarray(np.full((2, 2), 40_000, np.uint16)).save(deep, "PNG")
    grey = read_image(deep.getvalue(), MediaLimits()).getpixel((0, 0))
    assert isinstance(grey, tuple) and abs(grey[0] - 156) <= 1
    two = io.BytesIO()
    Image.new("RGB", (3, 3)).save(two, "GIF", save_all=True, append_images=[Image.new("RGB", (3, 3), "white")])
    assert read_image(two.getvalue(), MediaLimits()).getpixel((0, 0)) == (0, 0, 0)  # only the first frame


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "TIFF", "PNG"])
def test_an_image_is_rotated_by_its_tag_and_can_be_used_once_its_file_is_closed(form: str) -> None:
    from PIL import Image, ImageOps

    file, pixels = io.BytesIO(), np.random.default_rng(1).integers(0, 256, (4, 8, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[274] = 6
    image.save(file, form, exif=exif)
    with Image.open(io.BytesIO(file.getvalue())) as stored:
        expected = ImageOps.exif_transpose(stored).convert("RGB")
    actual = read_image(file.getvalue(), MediaLimits())
    assert actual.size == (4, 8) and np.array_equal(np.asarray(actual), np.asarray(expected))
    assert np.array_equal(np.dstack([np.asarray(band) for band in actual.split()]), np.asarray(expected))


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "BMP", "TIFF", "GIF", "PNG"])
def test_every_kind_of_image_is_read(form: str) -> None:
    check_media([part("image", media.image(9, 7, form))], MediaLimits())
    assert read_image(media.image(9, 7, form), MediaLimits()).size == (9, 7)


def test_sound_keeps_its_length_and_pitch_when_resampled() -> None:
    samples = read_sound(media.wav(1.0, 48_000, 2), 16_000, MediaLimits())
    assert samples.dtype == np.float32 and abs(len(samples) - 16_000) <= 1
    assert 0.2 < float(np.abs(samples).max()) < 0.3
    aac = read_sound(media.coded("ipod", "aac", 1.0), 48_000, MediaLimits())
    assert abs(len(aac) - 48_000) <= 2048


def png_of(width: int, height: int) -> bytes:
    """Return a file whose header declares an image of this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


BOMBS = {
    "wide": ("image", png_of(60_000, 2), 413),
    "pixels": ("image", png_of(16_000, 16_000), 413),
    "enormous": ("image", png_of(2**31 - 1, 2**31 - 1), 413),
    "zero": ("image", png_of(0, 5), 422),
    "lies": ("image", png_of(3000, 3000), 422),
    "cut image": ("image", media.image(64, 64, "JPEG")[:200], 422),
    "cut sound": ("audio", media.coded("flac", "flac")[:60], 422),
    "cut video": ("video", VIDEO[:300], 422),
    "empty": ("image", b"\x89PNG\r\n\x1a\n", 422),
    "endless sound": ("audio", media.wav(0.01)[:40] + struct.pack("<I", 0xFFFFFFF0) + bytes(64), 422),
}


async def post(api: Api, modality: str, data: bytes) -> tuple[int, str]:
    answer = await api.client.post("/generate", data={"text": "x"}, files={"files": ("a", data)})
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]


async def test_hostile_files_are_refused_and_the_server_goes_on() -> None:
    async with running(echo, model=SPEC) as api:
        for name, (modality, data, status) in BOMBS.items():
            got, code = await post(api, modality, data)
            assert got in ({status, 200} if name == "endless sound" else {status}), (name, got, code)
            assert code in ("", "media_too_large", "undecodable_media"), (name, code)
        assert await post(api, "image", media.image()) == (200, "")
        await api.clean()


async def test_the_deployments_limits_reach_the_pool() -> None:
    limits = {"max_image_pixels": 60, "max_audio_s": 0.5, "max_video_s": 2.0, "max_video_frames": 2}
    async with running(echo, model=SPEC, **limits) as api:
        assert await post(api, "image", media.image(10, 6)) == (200, "")
        assert await post(api, "image", media.image(10, 7)) == (413, "media_too_large")
        assert await post(api, "audio", media.wav(0.5)) == (200, "")
        assert await post(api, "audio", media.wav(0.6)) == (413, "media_too_large")
        assert await post(api, "video", VIDEO) == (200, "")
        assert await post(api, "video", media.video(frames=25)) == (413, "media_too_large")
        many = await api.client.post("/generate", data={"text": "x", "frames": "3"}, files={"files": ("a", VIDEO)})
        assert (many.status_code, many.json()["error"]["code"]) == (413, "media_too_large")


async def test_bodies_texts_and_files_hold_their_limits(started: Started) -> None:
    limits = {"max_body_bytes": 4000, "max_text_bytes": 1000, "max_files": 2, "max_speech_chars": 50, "max_n": 2}
    async with started(echo, model=SPEC, **limits) as api:

        async def chat(body: dict[str, Any]) -> tuple[int, str]:
            answer = await api.client.post("/v1/chat/completions", json=body)
            return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]

        def texts(*sizes: int) -> dict[str, Any]:
            return {"messages": [{"role": "user", "content": "x" * size} for size in sizes]}

        assert await chat(texts(500, 500)) == (200, "")
        assert await chat(texts(500, 501)) == (413, "body_too_large")
        assert (await chat({**texts(1), "user": "u" * 3900}))[0] == 200
        assert await chat({**texts(1), "user": "u" * 4000}) == (413, "body_too_large")
        url = "data:image/png;base64," + base64.b64encode(media.image()).decode()
        for count, wanted in ((2, 200), (3, 413)):
            parts = [{"type": "image_url", "image_url": {"url": url}}] * count
            assert (await chat({"messages": [{"role": "user", "content": parts}]}))[0] == wanted
        assert (await chat({**texts(1), "n": 2}))[0] == 200
        assert await chat({**texts(1), "n": 3}) == (400, "invalid_value")
        for size, status in ((50, 200), (51, 413)):
            spoken = await api.client.post("/v1/audio/speech", json={"input": "x" * size})
            assert spoken.status_code == status


async def test_headers_over_their_limit_are_refused(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        for size, statuses in ((30_000, {200}), (40_000, {413, 431, 400})):
            answer = await api.client.get("/health", headers={"X-Long": "x" * size})
            assert answer.status_code in statuses


def test_a_container_is_opened_by_its_first_bytes_alone() -> None:
    kinds = {
        "mov": VIDEO,
        "wav": media.wav(),
        "flac": media.coded("flac", "flac"),
        "ogg": media.coded("ogg", "libopus"),
        "aac": media.coded("adts", "aac"),
        "matroska": media.coded("webm", "libopus"),
        "mp3": media.coded("mp3", "libmp3lame"),
    }
    for name, data in kinds.items():
        assert container_format(data) == name
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    assert container_format(playlist) is None
    for modality in ("audio", "video"):
        with pytest.raises(MstarError):
            check_media([part(modality, playlist)], MediaLimits())


async def test_a_pool_process_has_no_network() -> None:
    async with running(echo, model=SPEC) as api:
        assert api.process.pool.pids
        code = (
            "import socket, sys\nfrom mstar_core.api.preprocess.seccomp import deny_network\n"
            "assert deny_network()\nsocket.socketpair()\n"
            "try:\n    socket.create_connection(('127.0.0.1', int(sys.argv[1])), 1)\n"
            "except PermissionError:\n    sys.exit(7)\n"
        )
        with socket.create_server(("127.0.0.1", 0)) as open_port:
            port = str(open_port.getsockname()[1])
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, port)
            assert await process.wait() == 7
        for pid in api.process.pool.pids:
            assert "Seccomp:\t2\n" in await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)


async def test_more_images_than_the_model_reads_are_refused_before_any_is_decoded() -> None:
    """The pool would respond 422: they start as PNG files but are invalid."""
    async with running(echo, model=SPEC) as api:
        broken = [("files", (f"{number}.png", b"\x89PNG\r\n\x1a\n" + b"\0" * 40)) for number in range(3)]
        answer = await api.client.post("/generate", data={"text": "x"}, files=broken)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "files")
        assert "3 images" in answer.json()["detail"] and "at most 2" in answer.json()["detail"]
        answer = await api.client.post("/generate", data={"text": "x"}, files=broken[:2])
        assert answer.status_code == 422


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG"])
def test_the_seconds_of_audio_are_those_of_the_header(form: str) -> None:
    data = io.BytesIO()
    soundfile.write(data, np.zeros(12_000, np.float32), 16_000, format=form)
    parts = [MediaPart(modality="audio", data=data.getvalue()), MediaPart(modality="text", data=b"x")]
    assert heard_s([*parts, *parts]) == pytest.approx(1.5)
