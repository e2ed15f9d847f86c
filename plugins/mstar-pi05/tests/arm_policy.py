"""`pi05:mini` in one process: the plugin's processor and nodes over the tests' cache, for episodes of many scenes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mstar_core.plugin.processor import PromptRequest
from mstar_pi05 import arm
from mstar_pi05.nodes.policy import Policy
from mstar_pi05.nodes.siglip import Cameras
from mstar_pi05.params import Params
from mstar_pi05.processor import Processor

from .conftest import SPEC, PackedCache, model_of

STEPS = 10


@dataclass
class ArmPolicy:
    """The served parts of a checkpoint. Tests break them one by one."""

    processor: Processor
    cameras: Cameras
    policy: Policy
    causal: bool = False
    shift: int = 0

    @classmethod
    def of(cls, folder: Path) -> ArmPolicy:
        model, spec = model_of(folder), SPEC.bound(folder, {})
        policy: Any = model.get_submodule(spec.node("LLM"))
        return cls(Processor(folder, {}), model.cameras(), policy)

    def __call__(self, scenes: arm.Scenes) -> arm.Floats:
        """Return movements of each scene, [N, HORIZON, 2]. causal: prefill with a causal mask. shift: of positions."""
        with torch.inference_mode():
            return self._act([self._inputs(scenes, item) for item in range(len(scenes.named))])

    def _inputs(self, scenes: arm.Scenes, item: int) -> dict[str, Any]:
        one = arm.Scenes(scenes.joints[[item]], scenes.targets[[item]], scenes.named[[item]])
        request = PromptRequest(
            text=arm.instruction(int(one.named[0])),
            media=(),
            params=Params(robot_state=tuple(one.joints[0])),
            outputs=frozenset({"action"}),
            seed=item,
            max_seq_len=0,
        )
        return dict(self.processor.prepare(list(arm.render(one)[0]), request).arrays)

    def _act(self, given: list[dict[str, Any]]) -> arm.Floats:
        tensors = [{name: torch.from_numpy(value) for name, value in each.items()} for each in given]
        cache, lengths = PackedCache(len(tensors)), [len(tensor["tokens"]) for tensor in tensors]
        vectors = self.cameras(
            images=torch.stack([tensor["images"] for tensor in tensors]),
            tokens=[tensor["tokens"] for tensor in tensors],
        )["features"]
        segments = list(enumerate(lengths))
        self.policy(
            kv=cache.plan(*segments, causal=self.causal),
            tokens=torch.cat([tensor["tokens"] for tensor in tensors]),
            embeds=torch.cat(vectors),
            positions=torch.cat([torch.arange(length) for length in lengths]),
        )
        horizon = len(tensors[0]["noise"])
        packed = {name: torch.cat([tensor[name] for tensor in tensors]) for name in ("scale", "offset", "noise")}
        actions, robot = packed.pop("noise"), None
        count = len(actions)
        for step in range(STEPS):
            made = self.policy(
                kv=cache.plan(*((item, horizon) for item in range(len(tensors))), writes=False),
                positions=torch.cat([length + self.shift + torch.arange(horizon) for length in lengths]),
                actions=actions,
                num_steps=torch.full((count,), STEPS),
                step=torch.full((count,), step),
                **packed,
            )
            actions, robot = made["actions"], made["robot_actions"]
        assert robot is not None
        return robot.view(len(tensors), horizon, -1)[..., :2].double().numpy()


def reached(policy: ArmPolicy, scenes: arm.Scenes, chunks: int) -> float:
    """Return the share of scenes that end at the named target after `chunks` of movements."""
    for _ in range(chunks):
        for movement in np.moveaxis(policy(scenes), 1, 0):
            scenes = scenes.moved(scenes.joints + np.clip(movement, -arm.FASTEST, arm.FASTEST))
    return float((scenes.distance() <= arm.TOLERANCE).mean())
