"""Golden vectors, and models and caches for the tests. MSTAR_GOLDEN selects another set: a folder with `pi05/`."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.plugin import ModelSpec
from mstar_core.plugin.model import ModelContext
from mstar_pi05.checkpoint.config import IMAGE
from mstar_pi05.model import Pi05
from mstar_pi05.nodes.flow import flow_times
from mstar_pi05.nodes.policy import Policy
from mstar_pi05.nodes.siglip import Cameras
from mstar_pi05.plugin import mstar_models
from mstar_pi05.sources.tiny import write_tiny

SPEC = mstar_models()[0]


@dataclass(frozen=True)
class Golden:
    """One set of reference vectors; every size comes from its files."""

    folder: Path

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(self.json("config.json"))

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        return load_file(self.folder / "inputs.safetensors")

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        (path,) = self.folder.glob("expected_*steps.safetensors")
        return load_file(path)

    @cached_property
    def prepost(self) -> dict[str, Any]:
        return dict(self.json("prepost.json"))

    @property
    def steps(self) -> int:
        return len(self.expected["time"])

    @property
    def horizon(self) -> int:
        return int(self.inputs["noise"].shape[1])

    @property
    def batch(self) -> int:
        return len(self.inputs["tokens"])

    def images(self, item: int) -> Tensor:
        """Return the used cameras of an item, channels last: [c, S, S, 3]."""
        return self.inputs["images"][item][self.inputs["image_masks"][item]].permute(0, 2, 3, 1).contiguous()

    def prompt(self, item: int) -> Tensor:
        """Return the ids of an item's prompt without padding."""
        return self.inputs["tokens"][item][self.inputs["token_masks"][item]]

    @property
    def image_tokens(self) -> int:
        return int(self.expected["image_embeds"].shape[2])

    def valid(self, item: int) -> Tensor:
        """Return which positions of the padded prefix are valid: bool [P]."""
        cameras = self.inputs["image_masks"][item].repeat_interleave(self.image_tokens)
        return torch.cat([cameras, self.inputs["token_masks"][item]])

    def length(self, item: int) -> int:
        return int(self.valid(item).sum())

    def tokens(self, item: int) -> Tensor:
        """Return an item's packed prefix: IMAGE tokens, then the prompt's ids."""
        count = len(self.images(item)) * self.image_tokens
        return torch.cat([torch.full((count,), IMAGE), self.prompt(item)])


ROOT = os.environ.get("MSTAR_GOLDEN")
GOLDEN = Golden(Path(ROOT) / "pi05" if ROOT else Path(__file__).parent / "golden")
ITEMS = tuple(range(GOLDEN.batch))
"""Items of the set."""


@dataclass(frozen=True)
class Built:
    """A checkpoint with its bound spec and both nodes, on the CPU in float32.

    policy: with its dense layers and no table. acting: the served one.
    """

    folder: Path
    spec: ModelSpec
    cameras: Cameras
    policy: Policy
    acting: Policy


class PackedCache:
    """A minimal KVView: keys and values of each sequence and layer in one tensor.

    segments: (sequence, tokens) of the next pass. writes, causal: of all of them.
    """

    def __init__(self, rows: int) -> None:
        self.keys: list[dict[int, Tensor]] = [{} for _ in range(rows)]
        self.values: list[dict[int, Tensor]] = [{} for _ in range(rows)]
        self.segments: list[tuple[int, int]] = []
        self.writes = True
        self.causal = False

    def plan(self, *segments: tuple[int, int], writes: bool = True, causal: bool = False) -> PackedCache:
        self.segments, self.writes, self.causal = list(segments), writes, causal
        return self

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        parts, at = [], 0
        for row, count in self.segments:
            span = slice(at, at + count)
            keys, values = key[span], value[span]
            if layer in self.keys[row]:
                keys = torch.cat([self.keys[row][layer], keys])
                values = torch.cat([self.values[row][layer], values])
            if self.writes:
                self.keys[row][layer], self.values[row][layer] = keys, values
            parts.append(attention(query[span], keys, values, self._mask(count, len(keys)), scale))
            at += count
        assert at == len(query)
        return torch.cat(parts)

    def _mask(self, rows: int, columns: int) -> Tensor | None:
        if not self.causal:
            return None
        return torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)


class PaddedCache:
    """A KVView over requests padded to one length, as in the reference: invalid positions are masked."""

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        shape = self.valid.shape
        self.keys[layer], self.values[layer] = (x.unflatten(0, shape) for x in (key, value))
        rows = zip(query.unflatten(0, shape), self.keys[layer], self.values[layer], self.valid, strict=True)
        parts = [attention(q, k, v, mask[None].expand(len(q), -1), scale) for q, k, v, mask in rows]
        return torch.cat(parts)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the attention of queries [T, heads, d] over keys and values [C, kv heads, d]."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (key, value))
    mixed = scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=mask, scale=scale)
    return mixed.transpose(0, 1)


class Run:
    """Runs the modules directly, over a cache of the tests."""

    def __init__(self, golden: Golden, built: Built, policy: Policy | None = None) -> None:
        self.golden = golden
        self.built = built
        self.policy = policy or built.acting
        self.cache = PackedCache(golden.batch)

    def features(self, *items: int) -> list[Tensor]:
        """Return the output of `vit_encoder` for some items, each alone."""
        golden, made = self.golden, []
        for item in items:
            tokens = golden.tokens(item)[None]
            made += self.built.cameras(images=golden.images(item)[None], tokens=tokens)["features"]
        return made

    def prefill(self, *items: int, causal: bool = False) -> None:
        """Prefill some items in one pass."""
        tokens = [self.golden.tokens(item) for item in items]
        segments = [(item, len(each)) for item, each in zip(items, tokens, strict=True)]
        self.policy(
            kv=self.cache.plan(*segments, causal=causal),
            tokens=torch.cat(tokens),
            embeds=torch.cat(self.features(*items)),
            positions=torch.cat([torch.arange(len(t)) for t in tokens]),
        )

    def step(self, rows: list[tuple[int, Tensor, int]], steps: int, start: int | None = None) -> list[Tensor]:
        """Run one flow step of some items: (item, actions [H, 32], step). start: first position, by default the prefix
        length.
        """
        golden, horizon = self.golden, self.golden.horizon
        count = len(rows) * horizon
        starts = [golden.length(item) if start is None else start for item, _, _ in rows]
        made = self.policy(
            kv=self.cache.plan(*((item, horizon) for item, _, _ in rows), writes=False),
            positions=torch.cat([torch.arange(begin, begin + horizon) for begin in starts]),
            actions=torch.cat([actions for _, actions, _ in rows]),
            scale=torch.ones(count, 32),
            offset=torch.zeros(count, 32),
            num_steps=torch.full((count,), steps),
            step=torch.cat([torch.full((horizon,), number) for _, _, number in rows]),
        )
        return list(made["actions"].split(horizon))

    def flow(self, *items: int) -> list[Tensor]:
        """Run all steps of some items together, from the golden noise."""
        actions = [self.golden.inputs["noise"][item] for item in items]
        for number in range(self.golden.steps):
            rows = [(item, each, number) for item, each in zip(items, actions, strict=True)]
            actions = self.step(rows, self.golden.steps)
        return actions


def lay_out(golden: Golden, folder: Path) -> Path:
    """Write the golden model as a checkpoint folder."""
    folder.mkdir(parents=True)
    shutil.copyfile(golden.folder / "config.json", folder / "config.json")
    shutil.copyfile(golden.folder / "weights.safetensors", folder / "model.safetensors")
    return folder


def model_of(folder: Path, dtype: torch.dtype = torch.float32) -> Pi05:
    spec = SPEC.bound(folder, {})
    context = ModelContext(
        spec=spec, folder=folder, device=torch.device("cpu"), dtype=dtype, model_kwargs=spec.model_kwargs
    )
    return Pi05(context)


def build(folder: Path) -> Built:
    spec, model = SPEC.bound(folder, {}), model_of(folder)
    acting = model.get_submodule(spec.node("LLM"))
    assert isinstance(acting, Policy)
    return Built(folder, spec, model.cameras(), model.policy(), acting)


def with_times(policy: Policy, times: Tensor) -> Policy:
    """Give the policy a table of these times only, float32 [steps]."""
    count = len(times)
    rows = torch.zeros(count + 1, count, dtype=torch.int64)
    rows[count] = torch.arange(count)
    policy.tabulate(times, rows)
    return policy


def own_times(steps: int) -> Tensor:
    return torch.tensor(flow_times(steps))


@pytest.fixture(scope="session")
def golden() -> Golden:
    return GOLDEN


@pytest.fixture
def pair() -> tuple[int, int]:
    """Return two items of the set."""
    if len(ITEMS) < 2:
        pytest.skip(f"runs when MSTAR_GOLDEN names a set of two items or more; {GOLDEN.folder} holds {len(ITEMS)}")
    return ITEMS[0], ITEMS[1]


@pytest.fixture(scope="session")
def reference(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the golden model from a checkpoint folder."""
    return build(lay_out(golden, tmp_path_factory.mktemp("reference") / "checkpoint"))


@pytest.fixture
def checkpoint(golden: Golden, tmp_path: Path) -> Path:
    """Return a checkpoint folder that a test may damage."""
    return lay_out(golden, tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "pi05")


@pytest.fixture
def run(golden: Golden, reference: Built) -> Run:
    return Run(golden, reference)


@pytest.fixture
def exact(golden: Golden, reference: Built) -> Run:
    """Return a run at the reference's stored times."""
    policy = with_times(reference.policy, golden.expected["time"][:, 0])
    return Run(golden, reference, policy)


@pytest.fixture
def models() -> Any:
    """Return a function that makes the model of a folder."""
    return model_of


@pytest.fixture
def padded_cache() -> type[PaddedCache]:
    return PaddedCache


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield
