"""Robots at the socket of a real deployment: responses in openpi's format, and refusals."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from mstar_core.config.resolved import KVCacheConfig
from mstar_core.plugin.observation import packed, unpacked
from mstar_core.workloads.media import png
from tests.runtime.deployment import REPO, Deployment, Served

HORIZON, DIM = 10, 8
LIMIT_S = 120.0
OWN = {"reset_pose": [0.0, -1.5, 1.5, 0.0]}
METADATA = {
    "cameras": ["observation/exterior_image_1_left", "observation/wrist_image_left"],
    "state": 8,
    "action_shape": [HORIZON, DIM],
    **OWN,
}
PI05 = Served(
    model="pi05",
    plugin="pi05",
    nodes=("vit_encoder", "LLM"),
    settings={
        "max_seq_len": 1024,
        "kv_cache": KVCacheConfig(pages=256),
        "model_kwargs": {"robot": "droid", "metadata": OWN},
    },
)


@pytest.fixture(scope="module")
def server() -> Iterator[Deployment]:
    with Deployment(served=PI05) as running:
        yield running
        running.assert_clean()


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (36, 48, 3), dtype=np.uint8)


def observation(**changes: Any) -> dict[str, Any]:
    """Return the observation of a DROID robot."""
    made = {
        "observation/exterior_image_1_left": picture(1),
        "observation/wrist_image_left": picture(2),
        "observation/joint_position": np.linspace(-0.5, 0.5, 7),
        "observation/gripper_position": np.array([0.25]),
        "prompt": "pick up the block",
        **changes,
    }
    return {key: value for key, value in made.items() if value is not None}


@contextmanager
def opened(server: Deployment, query: str = "") -> Iterator[ClientConnection]:
    """Open a connection and read its greeting."""
    address = f"ws://127.0.0.1:{server.port}/v1/robot/policy{query}"
    with connect(address, compression=None, max_size=None, open_timeout=LIMIT_S) as socket:
        assert told(socket) == METADATA
        yield socket


def told(socket: ClientConnection) -> Any:
    message = socket.recv(LIMIT_S)
    assert isinstance(message, bytes), message
    return unpacked(message)


def test_a_robot_gets_the_actions_that_generate_gives(server: Deployment) -> None:
    seen = observation()
    with opened(server, "?seed=7&num_steps=5") as socket:
        for _ in range(2):
            socket.send(packed(seen))
            answer = told(socket)
    cameras = [seen["observation/exterior_image_1_left"], seen["observation/wrist_image_left"]]
    state = [*seen["observation/joint_position"].tolist(), 0.25]
    whole = httpx.post(
        f"{server.url}/generate",
        timeout=LIMIT_S,
        files=[("files", ("a.png", png(camera))) for camera in cameras],
        data={
            "text": seen["prompt"],
            "robot_state": json.dumps(state),
            "seed": "7",
            "num_steps": "5",
            "output_format": "json",
            "streaming": "false",
        },
    ).json()
    (entry,) = whole["outputs"]["action"]
    assert answer["actions"].shape == (HORIZON, DIM) and answer["actions"].dtype == np.float32
    assert entry["metadata"]["normalized"] is answer["normalized"] is False
    np.testing.assert_allclose(answer["actions"], json.loads(base64.b64decode(entry["data"])), atol=1e-5)
    assert answer["server_timing"]["infer_ms"] >= answer["policy_timing"]["infer_ms"] > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"observation/wrist_image_left": None}, "observation/wrist_image_left is missing; send observation/exterior"),
        ({"observation/joint_position": np.zeros(6)}, "robot_state has 7 values, allowed are 8 values"),
        ({"observation/joint_position": np.full(7, np.nan)}, "observation/joint_position contains a value"),
        ({"observation/exterior_image_1_left": np.zeros((4, 4))}, "observation/exterior_image_1_left has shape"),
        ({"prompt": None}, "text is empty"),
    ],
)
def test_a_wrong_observation_is_told_by_its_key(change: dict[str, Any], said: str, server: Deployment) -> None:
    with opened(server) as socket:
        socket.send(packed(observation(**change)))
        text = socket.recv(LIMIT_S)
        assert isinstance(text, str) and said in text
        with pytest.raises(ConnectionClosed):
            socket.recv(LIMIT_S)
        assert socket.close_code == 1011


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_the_published_client_drives_a_robot_as_it_is(server: Deployment) -> None:
    """The client is not a development requirement: it pins an older numpy."""
    pytest.importorskip(
        "openpi_client", reason="runs where openpi-client is installed: pip install --no-deps openpi-client"
    )
    broker_module = import_module("openpi_client.action_chunk_broker")
    policy = import_module("openpi_client.websocket_client_policy").WebsocketClientPolicy("127.0.0.1", server.port)
    assert policy.get_server_metadata() == METADATA
    whole = policy.infer(observation())
    assert whole["actions"].shape == (HORIZON, DIM)
    broker = broker_module.ActionChunkBroker(policy, action_horizon=8)
    steps = [broker.infer(observation())["actions"] for _ in range(9)]
    assert all(step.shape == (DIM,) for step in steps)
    with pytest.raises(RuntimeError, match="observation/joint_position is missing"):
        policy.infer(observation(**{"observation/joint_position": None}))


def test_the_example_runs(server: Deployment, tmp_path: Path) -> None:
    for number, name in enumerate(("base.png", "wrist.png")):
        (tmp_path / name).write_bytes(png(picture(number)))
    words = (
        "base.png",
        "wrist.png",
        "pick up the block",
        "0,0,0,0,0,0,0,0",
        "--robot",
        "droid",
        f"ws://127.0.0.1:{server.port}",
    )
    command = [sys.executable, str(REPO / "examples" / "robot.py"), *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=server.environment(), text=True, capture_output=True, timeout=LIMIT_S
    )
    assert done.returncode == 0 and done.stdout.count(f"{HORIZON} steps in") == 3, done.stderr
    assert "reset_pose" in done.stdout
