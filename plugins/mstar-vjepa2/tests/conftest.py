"""Golden vectors, and models, deployments and media for the tests. MSTAR_GOLDEN selects another set: a folder with
`vjepa2/`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin import ModelSpec
from mstar_core.plugin.model import ModelContext
from mstar_core.plugin.processor import MediaPart
from mstar_vjepa2.checkpoint.config import ActionConfig, BaseConfig, EncoderConfig, read_action, read_base
from mstar_vjepa2.model import Vjepa2, Vjepa2Ac
from mstar_vjepa2.plugin import mstar_models
from mstar_vjepa2.tiny import write_ac, write_base
from tests.runtime.deployment import Deployment, Served

from .server import AC, BASE, Server

SPECS = {spec.name: spec for spec in mstar_models()}


@dataclass(frozen=True)
class Golden:
    """One folder of reference vectors; every size comes from its files."""

    folder: Path

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")

    @property
    def given(self) -> dict[str, Tensor]:
        return self.tensors("inputs")

    @property
    def expected(self) -> dict[str, Tensor]:
        return self.tensors("expected")

    @cached_property
    def sizes(self) -> BaseConfig | ActionConfig:
        """Sizes of the set's model, from its config.json."""
        return read_action(self.folder) if "ac_predictor" in self.json("config.json") else read_base(self.folder)

    @property
    def encoder(self) -> EncoderConfig:
        return self.sizes.encoder

    def numbers(self, prefix: str) -> list[int]:
        """Return the numbers at the ends of the expected tensors whose names start with `prefix`."""
        return sorted(int(name.removeprefix(prefix)) for name in self.expected if name.startswith(prefix))


class RowsView:
    """A minimal KVView for sequences of one frame each, every one with its own cache.

    Sequences that join a cache of one sequence share it, as candidates share their context.
    """

    def __init__(self, frame_tokens: int) -> None:
        self.frame_tokens = frame_tokens
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        q, k, v = (each.view(-1, self.frame_tokens, *each.shape[1:]) for each in (query, key, value))
        if layer in self.held:
            before = (each.expand(len(k), -1, -1, -1) for each in self.held[layer])
            k, v = (torch.cat(pair, dim=1) for pair in zip(before, (k, v), strict=True))
        self.held[layer] = (k, v)
        mixed = scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), scale=scale)
        return mixed.transpose(1, 2).flatten(0, 1)


class BlockView:
    """A KVView over all frames of one sequence with a frame-causal mask and no cache."""

    def __init__(self, frame_tokens: int) -> None:
        self.frame_tokens = frame_tokens

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        frame = torch.arange(len(query)) // self.frame_tokens
        heads = (each.transpose(0, 1) for each in (query, key, value))
        mixed = scaled_dot_product_attention(*heads, attn_mask=frame[:, None] >= frame, scale=scale)
        return mixed.transpose(0, 1)


def build(name: str, folder: Path, dtype: torch.dtype = torch.float32, **model_kwargs: Any) -> dict[str, Any]:
    """Build every node of a model on the CPU, by name."""
    spec: ModelSpec = SPECS[name].bound(folder, {**SPECS[name].model_kwargs, **model_kwargs})
    made: Any = {"vjepa2": Vjepa2, "vjepa2_ac": Vjepa2Ac}[name]
    context = ModelContext(
        spec=spec, folder=folder, device=torch.device("cpu"), dtype=dtype, model_kwargs=spec.model_kwargs
    )
    model = made(context)
    return {node.name: model.get_submodule(node) for node in spec.nodes}


def lay_out(folder: Path, config: Any, tensors: Mapping[str, Tensor] | None = None, **files: Path) -> Path:
    """Write a checkpoint folder: config, `model.safetensors` of these tensors, and copies of files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    for name, path in files.items():
        shutil.copyfile(path, folder / f"{name}.pt")
    return folder


def classifier_weights(base: Golden) -> dict[str, Tensor]:
    """Return base model and classifier as in a hub file, with the prefix of the backbone."""
    return {f"vjepa2.{name}": value for name, value in base.tensors("model").items()} | base.tensors("classifier")


def root() -> Path:
    given = os.environ.get("MSTAR_GOLDEN")
    return Path(given) / "vjepa2" if given else Path(__file__).parent / "golden"


BASE_SET, AC_SET, PREPROCESS_SET = (Golden(root() / name) for name in ("base", "ac", "preprocess"))


PLANS = sorted(path.name.removesuffix("_params.json") for path in AC_SET.folder.glob("*_params.json"))
"""Planner cases of the AC set."""


def rows(port: str) -> range:
    """Return the batch indices of an input of the base set."""
    return range(len(BASE_SET.given[port]))


@pytest.fixture(scope="session")
def base() -> Golden:
    return BASE_SET


@pytest.fixture(scope="session")
def ac() -> Golden:
    return AC_SET


@pytest.fixture(scope="session")
def pre() -> Golden:
    return PREPROCESS_SET


@pytest.fixture(scope="session")
def base_folder(base: Golden, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("base") / "vjepa2", base.json("config.json"), classifier_weights(base))


@pytest.fixture(scope="session")
def ac_folder(ac: Golden, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("ac") / "vjepa2_ac", ac.json("config.json"), ac.tensors("model"))


Ways = LocalRuntime | Server
"""Both ways to run a model: in this process, and over HTTP in separate processes."""


def benched(name: str, folder: Path) -> Iterator[LocalRuntime]:
    """Run a model with these weights in this process, and check for leaks after its last test."""
    bench = LocalRuntime(SPECS[name].bound(folder, SPECS[name].model_kwargs), folder)
    yield bench
    assert bench.leaks() == []


def deployed(served: Served, folder: Path) -> Iterator[Server]:
    """Run a model with these weights in separate processes, and check for leaks after its last test."""
    with Deployment(served=served, folder=folder) as running:
        server = Server(running)
        yield server
        assert server.leaks() == []


@pytest.fixture(scope="session")
def base_server(base_folder: Path) -> Iterator[Server]:
    yield from deployed(BASE, base_folder)


@pytest.fixture(scope="session")
def ac_server(ac_folder: Path) -> Iterator[Server]:
    yield from deployed(AC, ac_folder)


@pytest.fixture(scope="session", params=["bench", "http"])
def base_bench(request: pytest.FixtureRequest, base_folder: Path) -> Iterator[Ways]:
    if request.param == "http":
        yield request.getfixturevalue("base_server")
    else:
        yield from benched("vjepa2", base_folder)


@pytest.fixture(scope="session", params=["bench", "http"])
def ac_bench(request: pytest.FixtureRequest, ac_folder: Path) -> Iterator[Ways]:
    if request.param == "http":
        yield request.getfixturevalue("ac_server")
    else:
        yield from benched("vjepa2_ac", ac_folder)


@pytest.fixture(scope="session")
def base_nodes(base_folder: Path) -> dict[str, Any]:
    return build("vjepa2", base_folder)


@pytest.fixture(scope="session")
def ac_nodes(ac_folder: Path) -> dict[str, Any]:
    return build("vjepa2_ac", ac_folder)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("tiny") / "vjepa2")


@pytest.fixture(scope="session")
def tiny_ac(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ac(tmp_path_factory.mktemp("tiny") / "vjepa2_ac")


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield


def gap(one: Any, other: Any) -> float:
    """Return the largest absolute difference. Shapes must be equal."""
    left, right = (
        (each if isinstance(each, Tensor) else torch.from_numpy(np.array(each))).double() for each in (one, other)
    )
    assert left.shape == right.shape, (left.shape, right.shape)
    return float((left - right).abs().max())


# -- files that clients send --------------------------------------------------------------------------------------


def npy(value: Any) -> MediaPart:
    file = io.BytesIO()
    np.save(file, np.asarray(value))
    return MediaPart(modality="tensor", data=file.getvalue(), name="a.npy")


def picture(width: int = 40, height: int = 32, mode: str = "RGB", form: str = "PNG", **save: Any) -> MediaPart:
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([across, down, across / 2 + down / 2, np.full_like(across, 128)], axis=-1).astype(np.uint8)
    if mode == "I;16":
        image = Image.fromarray((across * 257).astype(np.uint16))
    else:
        image = Image.fromarray(pixels, "RGBA")
        image = (image if "A" in mode else image.convert("RGB")).convert(mode)
    file = io.BytesIO()
    image.save(file, form, **save)
    return MediaPart(modality="image", data=file.getvalue(), name="a.png")


def png(pixels: Any) -> MediaPart:
    """Encode pixels, uint8 [H, W, 3], without loss."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(file, "PNG")
    return MediaPart(modality="image", data=file.getvalue(), name="a.png")


Paint = Callable[[int], np.ndarray]


def film(
    frames: int = 10,
    width: int = 48,
    height: int = 32,
    rate: Fraction | int = 30,
    codec: str = "libx264",
    form: str = "mp4",
    pix_fmt: str = "yuv420p",
    paint: Paint | None = None,
) -> MediaPart:
    """Encode a clip of different frames, by default of grey level 20 * i."""
    # GPU machines may lack PyAV, and GPU tests use no clips.
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        for index in range(frames):
            pixels = paint(index) if paint else np.full((height, width, 3), 20 * index % 256, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return MediaPart(modality="video", data=file.getvalue(), name=f"a.{form}")
