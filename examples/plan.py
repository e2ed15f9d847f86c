"""Plan the actions that move a robot arm from the state in one picture to the state in another.

mstarctl up vjepa2_ac:mini -d
mstarctl sample vjepa2_ac --out .
python examples/plan.py start.png goal.png [URL]
"""

from __future__ import annotations

import sys

from mstar_core import MStarClient

STATE = [0.3, 0.0, 0.2, 3.1, 0.0, 0.0, 0.5]  # position (m), Euler angles (rad), gripper

if len(sys.argv) < 3:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
start, goal, *url = sys.argv[1:]
with MStarClient(*url) as client:
    plan = client.plan(start, goal, STATE, samples=64, topk=8, cem_steps=4, horizon=2, seed=1)
print(f"distance of the best candidate: {plan.tensor('best_energy').to_numpy()[0]:.4f}")
for number, action in enumerate(plan.tensor("actions").to_numpy()):
    print(f"action {number}: move {action[:3].round(4)} m, gripper {action[6]:+.2f}")
