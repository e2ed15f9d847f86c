"""Judge a served `wan22:mini`: it generates videos of moves, and image arithmetic decides whether they are right.

    python judge_moves.py URL [--videos 60] [--workers 1] [--least 0.9]

Prints a JSON line with the shares of trained and unseen moves that are right. Exits with 1 below the share of --least.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from mstar_wan22 import moves

SPLIT_SEED = 22
"""Of the split that the miniature was trained with."""

TIMEOUT_S = 300.0


class Served:
    """A deployment of the miniature."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_S)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def video(self, text: str, seed: int) -> moves.Pixels:
        """Return the video of a text, uint8 [F, side, side, 3]."""
        body = {"text": text, "output_modalities": ["video"], "seed": seed, **moves.PARAMS}
        frames = []
        with self._client.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                event: dict[str, Any] = json.loads(line)
                if event.get("modality") == "video":
                    data = np.frombuffer(base64.b64decode(event["data"]), np.uint8)
                    frames.append(data.reshape(event["metadata"]["shape"]))
        return np.concatenate(frames)


def chosen(count: int) -> list[tuple[moves.Move, bool]]:
    """Return so many moves, each with whether it was trained; unseen ones first, then trained ones in turn."""
    seen, unseen = moves.split(SPLIT_SEED)
    every = [*((move, False) for move in unseen), *((move, True) for move in seen)]
    return [every[number % len(every)] for number in range(count)]


def judge(served: Served, count: int, workers: int = 1) -> dict[str, Any]:
    """Return the shares of right videos: of all, of trained and of unseen moves. workers: requests at a time."""

    def judged(number: int) -> tuple[bool, bool]:
        move, trained = tasks[number]
        return trained, moves.shows(served.video(move.sentence, number), move)

    tasks = chosen(count)
    with ThreadPoolExecutor(workers) as threads:
        results = list(threads.map(judged, range(count)))
    return {
        "videos": len(results),
        "right": sum(right for _, right in results),
        "share": float(np.mean([right for _, right in results])),
        **{
            name: float(np.mean([right for was, right in results if was is trained] or [0.0]))
            for name, trained in (("trained", True), ("unseen", False))
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--videos", type=int, default=60)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--least", type=float, default=0.9)
    given = parser.parse_args()
    with Served(given.url) as served:
        verdict = judge(served, given.videos, given.workers)
    print(json.dumps(verdict))
    sys.exit(verdict["share"] < given.least)
