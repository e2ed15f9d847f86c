"""Ask a robot policy for its next actions.

mstarctl up pi05:mini -d
mstarctl sample pi05 --out .
python examples/act.py base.png left_wrist.png right_wrist.png "reach the red target" 0.2,1.2 [URL]
"""

from __future__ import annotations

import sys

from mstar_core import MStarClient

if len(sys.argv) < 4:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
*cameras, text, state = [word for word in sys.argv[1:] if not word.startswith("http")]
with MStarClient(*[word for word in sys.argv[1:] if word.startswith("http")]) as client:
    action = client.act(cameras, text, [float(value) for value in state.split(",")])
units = "the model's units" if action.is_normalized else "the robot's units"
print(f"{action.shape[0]} steps of {action.shape[1]} values in {units}; the first: {action.to_numpy()[0]}")
