"""Robot requests for Pi0.5, and the checkpoint files that its processor reads. Used by the benchmarks."""

from __future__ import annotations

import http.client
import io
import json
import shutil
import socket
import time
from http import HTTPStatus
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from mstar_pi05.checkpoint.config import Sizes
from mstar_pi05.sources.tiny import write_tiny

STATE: Final = [0.1, -0.2, 0.3, 0.0, 0.5, -0.5, 0.25, 0.75]
TEXT: Final = "pick up the red block and put it on the blue plate beside the cup"


BOUNDARY: Final = "between-the-parts-of-a-robot"
FORMS: Final = ("png", "npy")


def images_of(side: int, form: str = "png") -> list[bytes]:
    """Return three camera images of noise with `side` pixels per side: stored PNGs, or npy arrays."""
    generator = np.random.default_rng(1)
    found = []
    for _ in range(3):
        file = io.BytesIO()
        pixels = generator.integers(0, 256, (side, side, 3), dtype=np.uint8)
        if form == "png":
            Image.fromarray(pixels).save(file, "PNG", compress_level=0)
        else:
            np.save(file, pixels)
        found.append(file.getvalue())
    return found


class Robot:
    """A client over one connection that sends prepared bytes. Used by one thread.

    It uses a quarter of httpx's CPU time (0.8 and 3.1 ms per request), so that sixteen clients in one process do not
    dominate the measurement.
    """

    def __init__(self, port: int, images: list[bytes]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fields = {"text": TEXT, "robot_state": json.dumps(STATE), "streaming": "false"}
        parts = [_part(f'name="{name}"', value.encode()) for name, value in fields.items()]
        parts += [_part(f'name="files"; filename="{number}"', data) for number, data in enumerate(images)]
        self._parts = b"".join(parts)

    def ask(self, seed: int) -> float:
        """Send a request and return the seconds until its last byte. Raises RuntimeError for a status other
        than 200.
        """
        start = time.monotonic()
        body = self._parts + _part('name="seed"', str(seed).encode()) + f"--{BOUNDARY}--\r\n".encode()
        kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        self._connection.request("POST", "/generate", body=body, headers=kind)
        answer = self._connection.getresponse()
        data = answer.read()
        seconds = time.monotonic() - start
        if answer.status != HTTPStatus.OK:
            raise RuntimeError(f"the server answered {answer.status}: {data[:500].decode(errors='replace')}")
        return seconds

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _part(names: str, data: bytes) -> bytes:
    return f"--{BOUNDARY}\r\nContent-Disposition: form-data; {names}\r\n\r\n".encode() + data + b"\r\n"


def write_config(folder: Path, sizes: Sizes) -> None:
    """Write the checkpoint files that a processor reads: all except the weights."""
    tiny = write_tiny(folder.parent / f"{folder.name}.tiny" / "pi05")
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = json.loads((tiny / "config.json").read_text())
    config |= {
        "vocab_size": sizes.vocab,
        "max_token_len": sizes.prompt_ids,
        "action_horizon": sizes.horizon,
        "vision": {
            "width": sizes.vision.width,
            "layers": sizes.vision.layers,
            "heads": sizes.vision.heads,
            "mlp": sizes.vision.mlp,
            "image_size": sizes.vision.image_size,
            "patch_size": sizes.vision.patch_size,
        },
    }
    for name, tower in (("language", sizes.language), ("expert", sizes.expert)):
        config[name] = {
            "width": tower.width,
            "layers": tower.layers,
            "mlp": tower.mlp,
            "heads": tower.heads,
            "kv_heads": tower.kv_heads,
            "head_dim": tower.head_dim,
        }
    (folder / "config.json").write_text(json.dumps(config))
