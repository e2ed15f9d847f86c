"""Judge of `pi05:mini`: closed-loop episodes against a running deployment, from starts that training never saw.

Usage: judge_arm.py URL [--episodes 60]. Exits with 1 below the share of --least. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from mstar_core import MStarClient
from mstar_pi05 import arm

Policy = Callable[[arm.Scenes], arm.Floats]
"""From one scene to joint movements [steps, 2]."""

UNSEEN = 900_001
"""Seed of the judge's scenes. Training draws from pairs of numbers, which give other scenes."""
CHUNKS = 5


def png(pixels: arm.Pixels) -> bytes:
    """Return a picture as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def served(client: MStarClient, seed: int = 1) -> Policy:
    """Return the policy that a deployment serves. It sees three cameras, the joint values and the instruction."""

    def act(scene: arm.Scenes) -> arm.Floats:
        cameras = [png(camera) for camera in arm.render(scene)[0]]
        text = arm.instruction(int(scene.named[0]))
        made = client.act(cameras, text, scene.joints[0].tolist(), seed=seed)
        return np.asarray(made.to_numpy(), dtype=np.float64)[:, :2]

    return act


def episode(policy: Policy, scene: arm.Scenes, chunks: int = CHUNKS) -> float:
    """Run one episode and return the last distance between tip and named target. scene: a batch of one."""
    for _ in range(chunks):
        for movement in policy(scene):
            scene = scene.moved(scene.joints + np.clip(movement, -arm.FASTEST, arm.FASTEST))
    return float(scene.distance()[0])


def judge(policy: Policy, episodes: int, seed: int = UNSEEN, workers: int = 4) -> dict[str, float]:
    """Return the share of episodes that end at the named target, and the median of the last distances."""
    scenes = arm.draw(seed, episodes)
    each = [arm.Scenes(scenes.joints[[item]], scenes.targets[[item]], scenes.named[[item]]) for item in range(episodes)]
    with ThreadPoolExecutor(workers) as pool:
        ends = np.array(list(pool.map(lambda scene: episode(policy, scene), each)))
    return {
        "episodes": episodes,
        "reached": round(float((ends <= arm.TOLERANCE).mean()), 4),
        "median_distance": round(float(np.median(ends)), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--workers", type=int, default=4, help="episodes at a time")
    parser.add_argument("--least", type=float, default=0.95)
    options = parser.parse_args()
    with MStarClient(options.url) as client:
        found = judge(served(client), options.episodes, workers=options.workers)
    print(json.dumps(found))
    return int(found["reached"] < options.least)


if __name__ == "__main__":
    sys.exit(main())
