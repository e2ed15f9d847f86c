"""Predict the results of several action sequences step by step, and find the one nearest to a goal.

mstarctl up vjepa2_ac:mini -d
mstarctl sample vjepa2_ac --out .
python examples/rollout.py start.png goal.png [URL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from mstar_core import MStarClient
from mstar_core.client import ScalarChunk, TensorChunk

STATE = [0.3, 0.0, 0.2, 3.1, 0.0, 0.0, 0.5]  # position (m), Euler angles (rad), gripper
CANDIDATES = [[[x, 0, 0, 0, 0, 0, 0]] * 3 for x in (-0.05, 0.0, 0.05)]  # three actions each: left, still, right

if len(sys.argv) < 3:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
start, goal, *url = sys.argv[1:]
params = {"task": "rollout", "actions": CANDIDATES, "states": [STATE], "return": ["latents", "energies"]}
with MStarClient(*url) as client:
    files = [Path(start), Path(goal)]
    for event in client.stream(images=files, output_modalities=("tensor", "scalar"), **params):
        if isinstance(event, TensorChunk) and event.name == "energies":
            print(f"step {event.metadata['step']}: distances to the goal {event.to_numpy()[:, 0].round(4)}")
        elif isinstance(event, ScalarChunk):
            print(f"nearest at the end: candidate {event.value}")
