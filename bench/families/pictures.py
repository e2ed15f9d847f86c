"""Clients of a BAGEL server over HTTP: images, edits, and streamed answers about images."""

from __future__ import annotations

import concurrent.futures
import io
import json
import time
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import numpy as np
from PIL import Image

TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRequest:
    """One `/generate` request. images: PNG files. params: of the model."""

    text: str
    images: tuple[bytes, ...] = ()
    paints: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    def fields(self, seed: int) -> dict[str, str]:
        """Return the form's fields."""
        kinds = ["image"] * len(self.images) + ["text"]
        return {
            "text": self.text,
            "input_modalities": ",".join(kinds),
            "streaming": "true",
            "output_modalities": "image" if self.paints else "text",
            "model_kwargs": json.dumps({**self.params, "seed": seed}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Times of one answer in seconds: its first and its last line. lines: outputs received."""

    first_s: float
    last_s: float
    lines: int


def picture(side: int, seed: int = 1) -> bytes:
    """Return a noisy PNG of side x side pixels; images of other seeds share no prefix."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


class Clients:
    """Clients of one server, with kept connections: a client of its own per request costs 20 ms of CPU for TLS."""

    def __init__(self, port: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, limits=limits)

    def ask(self, request: PictureRequest, seed: int) -> Heard:
        """Send a request and read its stream. Raises RuntimeError for an error, in the status or in the stream."""
        files = [("files", (f"{number}.png", data)) for number, data in enumerate(request.images)]
        start, times = time.perf_counter(), list[float]()
        with self._http.stream("POST", "/generate", data=request.fields(seed), files=files or None) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read().decode()[:500]}")
            for line in answer.iter_lines():
                if not line:
                    continue
                if '"modality": "error"' in line[:40] or '"modality":"error"' in line[:40]:
                    raise RuntimeError(line[:500])
                times.append(time.perf_counter() - start)
        if not times:
            raise RuntimeError("an empty answer")
        return Heard(first_s=times[0], last_s=times[-1], lines=len(times))

    def together(self, requests: list[PictureRequest], first_seed: int = 1) -> list[Heard]:
        """Send requests at once and return their times."""
        with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
            numbered = enumerate(requests, start=first_seed)
            return list(pool.map(lambda pair: self.ask(pair[1], pair[0]), numbered))
