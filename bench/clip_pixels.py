"""CPU time from an H.264 clip to the pixels of V-JEPA 2: decoding, colour conversion, resizing.

Run from the repository root: `python -m bench.clip_pixels [--frames 64] [--width 1920] [--height 1080] [--crop 256]`.
Prints JSON: CPU seconds of each part for all frames on one thread; wall and CPU seconds of the whole as in requests.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable
from typing import Any

import av
import numpy as np

from bench.serving.figures import head
from mstar_core.plugin.processor import MediaPart
from mstar_vjepa2.request.media import read_video
from mstar_vjepa2.request.transforms import cropped, squared

BLOCK = 8
"""Side of a block of equal colour in pixels. Per-pixel noise would measure only the decoder."""


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("frames", 64), ("width", 1920), ("height", 1080), ("crop", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    part = clip(options.frames, options.width, options.height)
    decoded: list[Any] = []
    with av.open(io.BytesIO(part.data), "r") as container:
        found = {"decode": spent(lambda: decoded.extend(container.decode(video=0)))}
    frames: list[np.ndarray] = []
    found["colours"] = spent(lambda: frames.extend(frame.to_ndarray(format="rgb24") for frame in decoded))
    found["resize_clip"] = spent(lambda: [cropped(frame, options.crop) for frame in frames])
    found["resize_action_model"] = spent(lambda: [squared(frame, options.crop) for frame in frames])
    start = time.monotonic()
    found["whole"] = spent(
        lambda: read_video(part, lambda total, rate: range(total), lambda f: cropped(f, options.crop))
    )
    whole_s = round(time.monotonic() - start, 3)
    print(json.dumps({**head(), "clip_bytes": len(part.data), "cpu_s": found, "whole_s": whole_s}, indent=1))


def spent(run: Callable[[], object]) -> float:
    """Return the CPU seconds of a run over all threads."""
    start = time.process_time()
    run()
    return round(time.process_time() - start, 3)


def clip(frames: int, width: int, height: int) -> MediaPart:
    """Encode a clip of coloured blocks that move sideways."""
    blocks = np.random.default_rng(0).integers(0, 256, (-(-height // BLOCK), -(-width // BLOCK), 3), dtype=np.uint8)
    picture = blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)[:height, :width]
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, BLOCK * number, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return MediaPart(modality="video", data=file.getvalue(), name="clip.mp4")


if __name__ == "__main__":
    main()
