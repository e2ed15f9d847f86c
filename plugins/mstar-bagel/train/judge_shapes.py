"""Judge of `bagel:mini`: pictures, descriptions and edits of unseen combinations by a running deployment.

Usage: judge_shapes.py URL [--count 100]. Exits with 1 below the share of --least. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import httpx
import numpy as np
from PIL import Image

from mstar_bagel import shapes

Case = TypeVar("Case")
MODEL = "bagel"
SPLIT_SEED = 20


def png(picture: shapes.Pixels) -> bytes:
    """Return a picture as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def pixels(answer: Any) -> shapes.Pixels:
    """Return the picture of an answer of the images routes."""
    file = io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))
    return np.asarray(Image.open(file).convert("RGB"))


class Served:
    """A deployment, by its OpenAI routes."""

    def __init__(self, url: str, steps: int) -> None:
        self._http, self._steps = httpx.Client(base_url=url, timeout=120), steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def draw(self, sentence: str, seed: int, scale: float | None = None) -> shapes.Pixels:
        size = f"{shapes.SIDE}x{shapes.SIDE}"
        body: dict[str, Any] = {"model": MODEL, "prompt": sentence, "size": size, "seed": seed}
        body |= {"num_timesteps": self._steps} | ({} if scale is None else {"cfg_text_scale": scale})
        return pixels(self._json("/v1/images/generations", json=body))

    def describe(self, picture: shapes.Pixels) -> str:
        url = "data:image/png;base64," + base64.b64encode(png(picture)).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": shapes.QUESTION}]
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 48, "temperature": 0}
        return str(self._json("/v1/chat/completions", json=body)["choices"][0]["message"]["content"])

    def edit(self, picture: shapes.Pixels, sentence: str, seed: int) -> shapes.Pixels:
        data = {"model": MODEL, "prompt": sentence, "seed": str(seed), "num_timesteps": str(self._steps)}
        files = {"image": ("image.png", png(picture), "image/png")}
        return pixels(self._json("/v1/images/edits", data=data, files=files))

    def _json(self, path: str, **sent: Any) -> Any:
        answer = self._http.post(path, **sent)
        answer.raise_for_status()
        return answer.json()


def share(right: Callable[[int, Case], bool], cases: Sequence[Case], workers: int = 8) -> float:
    """Return the share of cases that are right."""
    with ThreadPoolExecutor(workers) as pool:
        return round(float(np.mean(list(pool.map(right, range(len(cases)), cases)))), 4)


def judge(served: Served, count: int, workers: int = 8) -> dict[str, float]:
    """Return the shares of unseen combinations that are drawn, drawn without guidance, described and edited.

    workers: requests at a time.
    """
    _, scenes, _, changes = shapes.split(SPLIT_SEED)
    scenes, changes = scenes[:count], changes[:count]

    def edited(seed: int, edit: shapes.Edit) -> bool:
        before = shapes.draw(shapes.Scene(edit.before), random.Random(seed))
        return shapes.shows(served.edit(before, edit.sentence, seed + 1), shapes.Scene(edit.after))

    return {
        "scenes": len(scenes),
        "edits": len(changes),
        "drawn": share(lambda seed, scene: shapes.shows(served.draw(scene.sentence, seed + 1), scene), scenes, workers),
        "drawn_unguided": share(
            lambda seed, scene: shapes.shows(served.draw(scene.sentence, seed + 1, 1.0), scene), scenes, workers
        ),
        "described": share(
            lambda seed, scene: shapes.describes(served.describe(shapes.draw(scene, random.Random(seed))), scene),
            scenes,
            workers,
        ),
        "edited": share(edited, changes, workers),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--steps", type=int, default=50, help="grid points of the flow")
    parser.add_argument("--workers", type=int, default=8, help="requests at a time")
    parser.add_argument("--least", type=float, default=0.95)
    options = parser.parse_args()
    with Served(options.url, options.steps) as served:
        found = judge(served, options.count, options.workers)
    print(json.dumps(found))
    low = min(found[name] for name in ("drawn", "described", "edited")) < options.least
    return int(low or found["drawn"] <= found["drawn_unguided"])


if __name__ == "__main__":
    sys.exit(main())
