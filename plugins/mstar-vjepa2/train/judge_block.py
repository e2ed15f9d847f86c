"""Judge of `vjepa2_ac:mini`: plans to goal pictures by a running deployment, executed in the world, step by step.

Usage: judge_block.py URL [--episodes 40]. Exits with 1 below the share of --least. Prints one JSON object.
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
from mstar_vjepa2 import block

Planner = Callable[[block.Floats, block.Floats], tuple[block.Floats, float]]
"""From the places of block and goal, [2] each, to moves [steps, 2] and the energy of the best candidate."""

UNSEEN = 900_001
PLANS = 5
FAR = 0.1
"""Smallest distance between a start and its goal."""


def png(pixels: block.Pixels) -> bytes:
    """Return a picture as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def served(client: MStarClient, seed: int = 1, samples: int = 64) -> Planner:
    """Return the planner that a deployment serves. It sees two pictures and the arm's place."""

    def plan(place: block.Floats, goal: block.Floats) -> tuple[block.Floats, float]:
        now, wanted = (png(each) for each in block.render(np.stack([place, goal])))
        made = client.plan(
            now,
            wanted,
            block.poses(place).tolist(),
            samples=samples,
            topk=8,
            cem_steps=5,
            horizon=2,
            maxnorm=block.FASTEST,
            axis={"z": 0.0, "gripper": 0.0},
            seed=seed,
        )
        actions = np.asarray(made.tensor("actions").to_numpy(), dtype=np.float64)
        return actions[:, :2], float(made.tensor("best_energy").to_numpy()[0])

    return plan


def episode(planner: Planner, place: block.Floats, goal: block.Floats) -> tuple[float, list[float]]:
    """Run one episode. Return the last distance to the goal and the energies of all plans.

    All moves of a plan are made: its energy is that of the last frame, so the first move alone may lead away.
    """
    energies = []
    for _ in range(PLANS):
        moves, energy = planner(place, goal)
        energies.append(energy)
        for move in moves:
            place = block.moved(place, move)
    return float(np.linalg.norm(place - goal)), energies


def judge(planner: Planner, episodes: int, seed: int = UNSEEN, workers: int = 4) -> dict[str, float]:
    """Return the share of episodes that end at the goal, and the share whose energy fell from first plan to last."""
    places = block.draw(seed, 8 * episodes).reshape(-1, 2, 2)
    places = places[np.linalg.norm(places[:, 0] - places[:, 1], axis=-1) > FAR][:episodes]
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda pair: episode(planner, pair[0], pair[1]), places))
    ends = np.array([end for end, _ in found])
    falls = np.array([energies[-1] < energies[0] for _, energies in found])
    return {
        "episodes": len(found),
        "reached": round(float((ends <= block.TOLERANCE).mean()), 4),
        "median_distance": round(float(np.median(ends)), 4),
        "energy_fell": round(float(falls.mean()), 4),
        "first_energy": round(float(np.mean([energies[0] for _, energies in found])), 4),
        "last_energy": round(float(np.mean([energies[-1] for _, energies in found])), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--workers", type=int, default=4, help="episodes at a time")
    parser.add_argument("--least", type=float, default=0.9)
    options = parser.parse_args()
    with MStarClient(options.url) as client:
        found = judge(served(client), options.episodes, workers=options.workers)
    print(json.dumps(found))
    return int(found["reached"] < options.least or found["energy_fell"] < options.least)


if __name__ == "__main__":
    sys.exit(main())
