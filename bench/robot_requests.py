"""What a robot sends to Pi0.5, and the checkpoint's files that its processor reads. Used by the measurements."""

from __future__ import annotations

import io
import json
import shutil
import time
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from PIL import Image

from mstar_pi05.sizes import Sizes
from mstar_pi05.tiny import write_tiny

STATE: Final = [0.1, -0.2, 0.3, 0.0, 0.5, -0.5, 0.25, 0.75]
TEXT: Final = "pick up the red block and put it on the blue plate beside the cup"


FORMS: Final = ("png", "npy")


def images_of(side: int, form: str = "png") -> list[bytes]:
    """Three camera images of noise, files of `side` pixels a side: stored PNGs, or arrays as numpy writes them."""
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


def ask(client: httpx.Client, images: list[bytes], seed: int) -> float:
    """Seconds from before the request to after its last byte."""
    files = [("files", (str(number), data, "application/octet-stream")) for number, data in enumerate(images)]
    fields = {"text": TEXT, "robot_state": json.dumps(STATE), "seed": str(seed), "streaming": "false"}
    start = time.monotonic()
    answer = client.post("/generate", data=fields, files=files)
    seconds = time.monotonic() - start
    if answer.status_code != 200:
        raise RuntimeError(f"the server answered {answer.status_code}: {answer.text[:500]}")
    return seconds


def write_config(folder: Path, sizes: Sizes) -> None:
    """What a processor reads of a checkpoint: everything but its weights."""
    tiny = write_tiny(folder.parent / f"{folder.name}.tiny" / "pi05")
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = json.loads((tiny / "config.json").read_text())
    config |= {
        "vocab_size": sizes.vocab, "max_token_len": sizes.prompt_ids, "action_horizon": sizes.horizon,
        "vision": {
            "width": sizes.vision.width, "layers": sizes.vision.layers, "heads": sizes.vision.heads,
            "mlp": sizes.vision.mlp, "image_size": sizes.vision.image_size, "patch_size": sizes.vision.patch_size,
        },
    }  # fmt: skip
    for name, tower in (("language", sizes.language), ("expert", sizes.expert)):
        config[name] = {
            "width": tower.width, "layers": tower.layers, "mlp": tower.mlp, "heads": tower.heads,
            "kv_heads": tower.kv_heads, "head_dim": tower.head_dim,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
