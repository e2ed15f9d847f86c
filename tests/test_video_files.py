"""Writer of MP4 files."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import numpy as np

from mstar_core.video_files import Film

HEIGHT, WIDTH, FRAMES, RATE = 128, 160, 9, 24
COPIES = 12


def moving_waves() -> np.ndarray:
    """Return a video with motion and noise, uint8 [FRAMES, HEIGHT, WIDTH, 3]: the encoder has choices to make."""
    t, y, x, color = np.ogrid[:FRAMES, :HEIGHT, :WIDTH, :3]
    waves = 128 + 100 * np.sin((x + 3 * t + 7 * color) / 9) * np.cos((y - 2 * t) / 7)
    noise = np.random.default_rng(0).normal(0, 12, waves.shape)
    return np.clip(waves + noise, 0, 255).astype(np.uint8)


def written(path: Path, frames: np.ndarray) -> bytes:
    film = Film(path, WIDTH, HEIGHT, RATE)
    for start, stop in ((0, 1), (1, 5), (5, FRAMES)):
        film.add(frames[start:stop])
    film.close()
    return path.read_bytes()


def test_equal_frames_give_equal_files(tmp_path: Path) -> None:
    frames = moving_waves()
    with ThreadPoolExecutor(3) as threads:
        files = list(threads.map(lambda number: written(tmp_path / f"{number}.mp4", frames), range(COPIES)))
    assert len(set(files)) == 1


def test_a_file_holds_all_frames_at_their_rate(tmp_path: Path) -> None:
    frames = moving_waves()
    with av.open(io.BytesIO(written(tmp_path / "video.mp4", frames))) as container:
        (stream,) = container.streams.video
        assert stream.average_rate == RATE
        shown = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
    # The file has half the colour resolution, so brightness is compared.
    assert shown.shape == frames.shape
    assert np.corrcoef(shown.mean(-1).ravel(), frames.mean(-1).ravel())[0, 1] > 0.95
