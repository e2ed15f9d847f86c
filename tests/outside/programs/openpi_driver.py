"""openpi's policy client: metadata at connection, then actions for observations of the miniature's robot."""

import json
import os
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import report
from openpi_client.websocket_client_policy import WebsocketClientPolicy

URL = os.environ["BASE_URL"]
CARD = json.load(urlopen(f"{URL}/v1/models"))["data"][0]["robot"]


def observation():
    images = {name: np.zeros((64, 64, 3), np.uint8) for name in CARD["cameras"]}
    return {"state": np.zeros(CARD["state"] or 8, np.float32), "images": images, "prompt": "reach the block"}


def policy():
    where = urlsplit(URL)
    return WebsocketClientPolicy(where.hostname, where.port)


def metadata_comes_at_connection():
    assert isinstance(policy().get_server_metadata(), dict)


def actions_have_the_shape_of_the_model():
    actions = policy().infer(observation())["actions"]
    assert actions.shape == (CARD["horizon"], CARD["action"]), actions.shape


def one_connection_serves_many_observations():
    client = policy()
    for _ in range(20):
        client.infer(observation())


report.run([metadata_comes_at_connection, actions_have_the_shape_of_the_model, one_connection_serves_many_observations])
