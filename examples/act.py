"""Ask a robot policy for its next actions.

mstarctl up pi05, then: python examples/act.py base.png wrist.png "pick up the block" 0.1,-0.2,0.3,0,0.5,-0.5 [URL]
"""

from __future__ import annotations

import sys

from mstar_core import MStarClient

*cameras, text, state = [word for word in sys.argv[1:] if not word.startswith("http")]
with MStarClient(*[word for word in sys.argv[1:] if word.startswith("http")]) as client:
    action = client.act(cameras, text, [float(value) for value in state.split(",")])
units = "the model's units" if action.is_normalized else "the robot's units"
print(f"{action.shape[0]} steps of {action.shape[1]} values in {units}; the first: {action.to_numpy()[0]}")
