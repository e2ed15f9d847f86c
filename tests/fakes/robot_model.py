"""A model for robots, without weights: its actions are the observation's state, repeated for each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mstar_core.errors import RequestError
from mstar_core.messages.requests import NewRequest
from mstar_core.plugin import Action, Image, ModelSpec, Surface, Text, param
from mstar_core.plugin.observation import unpacked
from mstar_core.plugin.processor import Inputs, PromptRequest
from tests.fakes.conductor import FakeDeployment
from tests.fakes.speech_model import SPEC as SPEECH
from tests.fakes.speech_model import Processor as SpeechProcessor

STEPS: Final = 4
GREETING: Final = {"reset_pose": [0.0, -1.5], "name": "arm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    num_steps: int = param(10, "flow steps", ge=1, le=20)
    output_format: str = param("raw", "form of the actions", choices=("raw", "npy"))
    seed: int | None = param(None, "seed", ge=0)


class Processor(SpeechProcessor):
    """Processor that returns the state as ids of the prompt."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        super().__init__(folder, model_kwargs)

    def process_prompt(self, request: PromptRequest) -> Inputs:
        if request.observation is None:
            raise RequestError("this model answers robots alone", field="text")
        seen = unpacked(request.observation)
        if "state" not in seen:
            raise RequestError("state is missing", hint="send it", field="state", code="missing_field")
        ids = np.asarray(seen["state"]).astype(np.int64)
        return Inputs(
            arrays={"tokens": ids},
            prompt_tokens=len(ids),
            metadata={"action": {"normalized": False}},
            warnings=["a warning"] if seen.get("warns") else [],
        )


SPEC: Final[ModelSpec] = dataclasses.replace(
    SPEECH,
    name="fake_robot",
    inputs=(Text(), Image(max_count=3)),
    outputs=(Action(horizon=STEPS),),
    params=Params,
    routes=frozenset({"robot_policy"}),
    surfaces={"robot_policy": Surface(metadata=GREETING)},
    processor="tests.fakes.robot_model:Processor",
)


def act(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: the state, once for each step, and the end."""
    state = fake._tensors.copy(request.inputs["tokens"]).astype(np.float32)
    fake.output(request.handle, "action", np.stack([state + step for step in range(STEPS)]))
    fake.finish(request.handle)
