"""Run a robot's control loop over the robot policy socket, as openpi's clients do.

mstarctl up pi05:mini -d
mstarctl sample pi05 --out .
python examples/robot.py base.png left_wrist.png right_wrist.png "reach the red target" 0.2,1.2 [ws://HOST:PORT]

The cameras are in the model's order. With --robot droid they are DROID's, for a deployment of pi05_droid: its state has
seven joints and the gripper.
"""

from __future__ import annotations

import sys

import numpy as np
from PIL import Image
from websockets.sync.client import connect

from mstar_core.plugin.observation import packed, unpacked

CAMERAS = {
    "": ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
    "droid": ("observation/exterior_image_1_left", "observation/wrist_image_left"),
}


def observation(robot: str, files: list[str], text: str, state: list[float]) -> dict[str, object]:
    """Return what the deployment expects: the model's own keys, or those of a robot."""
    images = {
        key: np.asarray(Image.open(file).convert("RGB")) for key, file in zip(CAMERAS[robot], files, strict=False)
    }
    if robot == "droid":
        joints = {
            "observation/joint_position": np.array(state[:7]),
            "observation/gripper_position": np.array(state[7:]),
        }
        return {**images, **joints, "prompt": text}
    return {"images": images, "state": np.array(state), "prompt": text}


words = sys.argv[1:]
robot = words.pop(words.index("--robot") + 1) if "--robot" in words[:-1] else ""
given = [word for word in words if word != "--robot" and not word.startswith("ws")]
if len(given) < 3 or robot not in CAMERAS:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
*files, text, numbers = given
seen = packed(observation(robot, files, text, [float(number) for number in numbers.split(",")]))
url = next((word for word in words if word.startswith("ws")), "ws://localhost:8000")
with connect(url, compression=None, max_size=None) as socket:
    print("server metadata:", unpacked(socket.recv()))
    for _ in range(3):  # a robot executes the first actions and observes again
        socket.send(seen)
        answer = socket.recv()
        if isinstance(answer, str):
            sys.exit(answer)
        chunk = unpacked(answer)
        print(f"{chunk['actions'].shape[0]} steps in {chunk['server_timing']['infer_ms']:.0f} ms:", chunk["actions"][0])
