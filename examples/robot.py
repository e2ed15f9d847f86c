"""Run a robot's control loop over the robot policy socket, as openpi's clients do.

mstarctl up pi05_droid, then: python examples/robot.py base.png wrist.png "pick up the block" [ws://HOST:PORT]
"""

from __future__ import annotations

import sys

import numpy as np
from PIL import Image
from websockets.sync.client import connect

from mstar_core.plugin.observation import packed, unpacked

base, wrist, text, *where = sys.argv[1:]
observation = {
    "observation/exterior_image_1_left": np.asarray(Image.open(base).convert("RGB")),
    "observation/wrist_image_left": np.asarray(Image.open(wrist).convert("RGB")),
    "observation/joint_position": np.zeros(7),
    "observation/gripper_position": np.zeros(1),
    "prompt": text,
}
with connect(where[0] if where else "ws://localhost:8000", compression=None, max_size=None) as socket:
    print("server metadata:", unpacked(socket.recv()))
    for _ in range(3):  # a robot executes the first actions and observes again
        socket.send(packed(observation))
        answer = socket.recv()
        if isinstance(answer, str):
            sys.exit(answer)
        chunk = unpacked(answer)
        print(f"{chunk['actions'].shape[0]} steps in {chunk['server_timing']['infer_ms']:.0f} ms:", chunk["actions"][0])
