"""Preprocessing against the reference's, and decoding of uploaded media."""

from __future__ import annotations

import io
import threading
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mstar_core.errors import BadMedia, MstarError, RequestError, TooLarge
from mstar_core.plugin.processor import MediaPart
from mstar_vjepa2.checkpoint.config import STD
from mstar_vjepa2.request import media
from mstar_vjepa2.request.frame_sampling import Sampling, spread
from mstar_vjepa2.request.media import THREADS, ahead, read_image, read_video
from mstar_vjepa2.request.transforms import cropped, normalised, shortest_edge, squared

from .conftest import Golden, film, gap, picture

LEVEL = 1 / (255 * min(STD)) + 1e-5
"""One grey level: the reference and Pillow round resize weights differently."""


def clips(golden: Golden) -> list[tuple[np.ndarray, int]]:
    given = golden.given
    return [(given[name].numpy(), int(name.rpartition("_")[2])) for name in sorted(given)]


def test_clips_of_the_base_model(pre: Golden) -> None:
    config = pre.json("config.json")
    assert shortest_edge(config["crop_size"]) == config["shortest_edge"]
    for frames, number in clips(pre):
        actual = normalised(np.stack([cropped(frame, config["crop_size"]) for frame in frames]))
        expected = pre.expected[f"base_{number}"].numpy()
        assert gap(actual, expected) < LEVEL
        assert float(np.mean(np.abs(actual - expected) > 1e-4)) < 0.1, "most values are the same"


def test_frames_of_the_action_model(pre: Golden) -> None:
    crop = pre.json("config.json")["crop_size"]
    for frames, number in clips(pre):
        actual = np.stack([squared(frame, crop) for frame in frames], axis=1)
        assert gap(actual, pre.expected[f"ac_{number}"]) < 1e-5


def test_the_two_models_see_the_same_frame_differently(pre: Golden) -> None:
    frame, crop = clips(pre)[0][0][0], pre.json("config.json")["crop_size"]
    assert gap(normalised(cropped(frame, crop)), squared(frame, crop)) > 0.1


@pytest.mark.parametrize(("width", "height"), [(64, 48), (48, 64), (33, 33), (7, 300), (1, 1), (500, 3)])
def test_every_shape_gives_a_square(width: int, height: int) -> None:
    frame = np.full((height, width, 3), 77, dtype=np.uint8)
    assert cropped(frame, 32).shape == squared(frame, 32).shape == (3, 32, 32)
    assert set(np.unique(cropped(frame, 32)).tolist()) == {77}


def test_a_frame_that_is_all_length_is_refused() -> None:
    with pytest.raises(RequestError, match="too long and thin"):
        cropped(np.zeros((1, 100_000, 3), dtype=np.uint8), 256)


def test_frames_are_spread_by_whole_numbers() -> None:
    assert list(spread(10, 4)) == [0, 2, 5, 7]
    assert list(spread(64, 64)) == list(range(64))
    assert list(spread(3, 1)) == [0]


@pytest.mark.parametrize(
    ("asked", "total", "rate", "count"),
    [
        ({}, 100, 30.0, 64),
        ({}, 31, 30.0, 30),
        ({}, 1, 30.0, 1),
        ({"num_frames": 7}, 10, 30.0, 7),
        ({"fps": 4.0}, 300, 30.0, 40),
        ({"fps": 0.01}, 300, 30.0, 1),
        ({"fps": 29.97}, 90, 30000 / 1001, 89),
    ],
)
def test_how_many_frames_are_taken(asked: dict[str, Any], total: int, rate: float, count: int) -> None:
    sampling = Sampling(**{"num_frames": None, "fps": None, "default": 64, **asked})
    assert sampling.count(total, rate) == count


@pytest.mark.parametrize(
    ("asked", "rate", "field"),
    [
        ({"num_frames": 11}, 30.0, "num_frames"),
        ({"fps": 60.0}, 30.0, "fps"),
        ({"fps": 4.0}, 0.0, "fps"),
        ({"fps": 4.0}, float("inf"), "fps"),
    ],
)
def test_frames_that_are_not_there_cannot_be_taken(asked: dict[str, Any], rate: float, field: str) -> None:
    with pytest.raises(RequestError) as error:
        Sampling(**{"num_frames": None, "fps": None, "default": 64, **asked}).count(10, rate)
    assert error.value.field == field


def levels(part: MediaPart, chosen: list[int], *, needs_total: bool = True) -> list[int]:
    """Return the mean grey level of chosen frames."""
    clip = read_video(part, lambda _total, _rate: chosen, lambda f: round(float(f.mean())), needs_total=needs_total)
    return clip.frames


@pytest.mark.parametrize(
    ("form", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("matroska", "ffv1"), ("avi", "mpeg4")]
)
def test_the_chosen_frames_of_a_video(form: str, codec: str) -> None:
    actual = levels(film(12, codec=codec, form=form), [0, 3, 3, 11])
    assert all(abs(level - expected) < 8 for level, expected in zip(actual, (0, 60, 60, 220), strict=True))


def test_one_frame_wanted_many_times_is_made_once_and_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    actual: list[int] = []
    whole = media._upright
    monkeypatch.setattr(media, "_upright", lambda frame: actual.append(threading.get_ident()) or whole(frame))
    assert len(levels(film(2), [0] * 40 + [1] * 40)) == 80
    assert actual == [threading.get_ident()] * 2


@pytest.mark.parametrize("rate", [Fraction(30000, 1001), Fraction(1, 3), 240, 15])
def test_odd_rates_are_told(rate: Fraction | int) -> None:
    clip = read_video(film(6, rate=rate), lambda _total, _rate: [0], lambda _: 0)
    assert clip.total == 6
    assert clip.rate == pytest.approx(float(rate), rel=0.02)


def test_reading_ends_with_the_last_frame_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(media, "_upright", lambda frame: seen.append(1) or np.zeros((2, 2, 3), np.uint8))
    assert len(levels(film(20), [0, 1], needs_total=False)) == 2
    assert len(seen) == 2


@pytest.mark.parametrize("pix_fmt", ["gray", "yuv444p", "yuv422p10le"])
def test_other_pixel_formats(pix_fmt: str) -> None:
    actual = levels(film(3, codec="ffv1", form="matroska", pix_fmt=pix_fmt), [2])
    assert abs(actual[0] - 40) < 4


def test_portrait_and_odd_sizes() -> None:
    clip = read_video(film(2, width=18, height=50), lambda _t, _r: [0], lambda frame: frame.shape)
    assert clip.frames == [(50, 18, 3)]


def turned(part: MediaPart, degrees: int) -> MediaPart:
    """Return the H.264 clip with a display matrix."""
    out = io.BytesIO()
    with av.open(io.BytesIO(part.data)) as source, av.open(out, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        change = av.bitstream.BitStreamFilterContext(
            f"h264_metadata=display_orientation=insert:rotate={degrees}", source.streams.video[0], stream
        )
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                for each in change.filter(packet):
                    each.stream = stream
                    target.mux(each)
    return MediaPart(modality="video", data=out.getvalue())


def test_a_clip_that_is_to_be_turned_comes_upright() -> None:
    half = np.zeros((32, 48, 3), dtype=np.uint8)
    half[:16] = 255  # white above
    part = turned(film(2, paint=lambda _: half), 90)
    frame = read_video(part, lambda _t, _r: [0], lambda each: each).frames[0]
    with av.open(io.BytesIO(part.data)) as container:
        noted = next(container.decode(video=0)).rotation
    assert abs(noted) == 90 and frame.shape == (48, 32, 3)
    white = [frame[:, :16].mean() > 128, frame[:, 16:].mean() > 128]
    # A counter-clockwise rotation by 90 degrees moves the upper half to the left.
    assert white == ([True, False] if noted == 90 else [False, True])


@pytest.mark.parametrize("cut", [60, 500, 1200])
def test_a_video_that_is_cut_short_is_refused(cut: int) -> None:
    whole = film(20).data
    with pytest.raises(MstarError) as error:
        levels(MediaPart(modality="video", data=whole[:cut]), [0, 19])
    assert isinstance(error.value, BadMedia) and error.value.field == "video"


@pytest.mark.parametrize(
    "data", [b"", b"no video", b"#EXTM3U\nfile:///etc/passwd", b"\0\0\0\x20ftypisom" + bytes(99), b"\x1aE\xdf\xa3" * 9]
)
def test_what_is_no_video_is_refused(data: bytes) -> None:
    with pytest.raises(BadMedia) as error:
        levels(MediaPart(modality="video", data=data), [0])
    assert error.value.field == "video"


def test_a_sound_file_has_no_picture() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16000)
        stream.layout = "mono"
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 16000
        for packet in [*stream.encode(sound), *stream.encode()]:
            container.mux(packet)
    with pytest.raises(BadMedia, match="no video stream"):
        levels(MediaPart(modality="video", data=file.getvalue()), [0])


def test_too_many_pixels_or_frames_are_refused_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MOST_PIXELS", 1000)
    for read in (lambda: levels(film(2), [0]), lambda: read_image(picture())):
        with pytest.raises(TooLarge, match="allowed are 1000"):
            read()
    monkeypatch.undo()
    monkeypatch.setattr(media, "MOST_FRAMES", 5)
    with pytest.raises(TooLarge, match="more than 5 frames"):
        levels(film(6), [0])


def test_an_image_beyond_the_limit_is_refused_before_it_is_decoded() -> None:
    """The header suffices: 60000 x 60000 pixels would need 10 GB."""
    data = bytearray(picture().data)
    data[16:24] = (60000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    with pytest.raises(MstarError) as error:
        read_image(MediaPart(modality="image", data=bytes(data)))
    assert isinstance(error.value, TooLarge | BadMedia)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "CMYK", "1", "I;16"])
def test_images_of_every_mode(mode: str) -> None:
    frame = read_image(picture(mode=mode, form="TIFF" if mode == "CMYK" else "PNG"))
    assert frame.shape == (32, 40, 3) and frame.dtype == np.uint8
    if mode == "RGBA":
        assert np.array_equal(frame, read_image(picture())), "what is see-through keeps its colour"
    if mode == "I;16":
        assert abs(int(frame[0, -1, 0]) - 255) <= 1, "16 bits are scaled, not cut"


def test_an_image_comes_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(picture(40, 32, form="JPEG", exif=exif)).shape == (40, 32, 3)


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", picture().data[:200], b"GIF89a"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(BadMedia) as error:
        read_image(MediaPart(modality="image", data=data))
    assert error.value.field == "image"


def test_frames_become_pixels_side_by_side_and_keep_their_order() -> None:
    """Each conversion waits for the others of its batch; with one thread the barrier breaks."""
    together = threading.Barrier(THREADS, timeout=60)

    def keep(frame: np.ndarray) -> float:
        together.wait()
        return float(frame.mean())

    clip = read_video(film(2 * THREADS), lambda total, rate: range(total), keep)
    assert len(clip.frames) == 2 * THREADS and clip.frames == sorted(clip.frames)


def test_few_large_frames_are_held_at_once() -> None:
    assert [ahead(1920, 1080), ahead(3840, 2160), ahead(5000, 4000), ahead(8000, 5000)] == [4, 4, 2, 1]
