"""Request parameters of both V-JEPA 2 models. Read by api, programs and processor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import RequestError
from mstar_core.plugin import param

TASKS: Final = ("encode", "predict", "rollout", "plan", "classify")
POOLINGS: Final = ("none", "mean", "mean_space", "attentive")
COSTS: Final = ("l1", "l2", "cosine")
RETURNS: Final = ("latents", "pooled", "energies", "states", "final_only")
MOST_FRAMES: Final = 256
"""Latent frames of one rollout, context included, that any deployment may take; max_latent_frames tells of one."""

POSE: Final = 7
"""Values of a state or an action: position, Euler angles, gripper."""

MOST_SAMPLES: Final = 4096
"""Candidates of one planning step."""

AXES: Final = ("x", "y", "z", "gripper")
MOST_FIXED: Final = 1.0
"""Largest value, either way, that an axis may be held at: metres, or all of the gripper's way."""

FEW_CANDIDATES: Final = 8
"""Up to so many candidates send their latents unasked; more send energies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What both models take. The names after `output_dtype` are those of the earlier system."""

    returns: tuple[str, ...] | None = param(
        None, f"of {', '.join(RETURNS)}. Default latents; energies for more than {FEW_CANDIDATES} scored candidates",
        aliases=("return",), max_items=len(RETURNS),
    )  # fmt: skip
    output_format: str = param("raw", "form of tensors", choices=("raw", "npy", "safetensors", "json"))
    output_dtype: str = param("float32", "number type of tensors", choices=("float32", "float16", "bfloat16"))
    skip_predictor: bool = param(False, "earlier name of task encode")
    rollout_horizon: int | None = param(
        None, "earlier name of horizon; above 1 it also means task rollout", ge=1, le=MOST_FRAMES
    )
    stream_rollout: bool = param(
        True, "earlier name: steps are sent as they end whatever it says; streaming=false sends all at the end"
    )

    def check(self) -> Iterator[RequestError]:
        """Rules across fields."""
        for name in self.returns or ():
            if name not in RETURNS:
                yield RequestError(
                    f"return names {name!r}",
                    hint=f"of {', '.join(RETURNS)}",
                    field="return",
                    value=name,
                    allowed=", ".join(RETURNS),
                )
        if self.output_format == "npy" and self.output_dtype == "bfloat16":
            yield RequestError(
                "npy holds no bfloat16", hint="ask for safetensors or raw, or for float16", field="output_dtype"
            )


def _same_horizon(horizon: int | None, earlier: int | None) -> Iterator[RequestError]:
    if horizon is not None and earlier is not None and horizon != earlier:
        hint = "send horizon alone"
        yield RequestError(f"horizon is {horizon} and rollout_horizon is {earlier}", hint=hint, field="rollout_horizon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(Common):
    """V-JEPA 2: encode, predict, roll out without actions, classify."""

    task: str | None = param(
        None,
        "what to do. Default encode; predict where video is asked for",
        choices=("encode", "predict", "rollout", "classify"),
    )
    num_frames: int | None = param(
        None, "frames taken from the clip. Default 64, or all of a shorter one", ge=1, le=768
    )
    fps: float | None = param(None, "frames per second taken from the clip, in place of num_frames", gt=0, le=240)
    pooling: str = param(
        "none", "reduce the encoder's tokens; attentive needs a classifier checkpoint", choices=POOLINGS
    )
    layers: tuple[int, ...] | None = param(
        None, "encoder blocks whose output to return, 0 = patches. Default the last, normed", ge=0, le=64, max_items=65
    )
    context_mask: tuple[int, ...] | None = param(
        None, "token ids that the predictor sees. Default all", ge=0, max_items=65_536
    )
    target_mask: tuple[int, ...] | None = param(
        None, "token ids to predict; may lie past the clip. Default all", ge=0, max_items=65_536
    )
    horizon: int | None = param(None, "rollout steps. Default 1", ge=1, le=MOST_FRAMES)
    anticipation_s: float = param(
        0.0, "rollout: seconds between the clip and what is predicted, without masks", ge=0, le=60
    )

    @property
    def steps(self) -> int:
        """Rollout steps asked for."""
        return self.horizon or self.rollout_horizon or 1

    def chosen_task(self, outputs: frozenset[str]) -> str:
        """The task, read from the earlier names where it is not given."""
        if self.task is not None:
            return self.task
        if self.skip_predictor:
            return "encode"
        if (self.rollout_horizon or 0) > 1:
            return "rollout"
        return "predict" if "video" in outputs else "encode"

    def check(self) -> Iterator[RequestError]:
        """Rules across fields."""
        yield from Common.check(self)
        yield from _same_horizon(self.horizon, self.rollout_horizon)
        if self.num_frames is not None and self.fps is not None:
            yield RequestError("num_frames and fps are both given", hint="send one of them", field="fps")
        if (self.context_mask is None) != (self.target_mask is None):
            lacking = "context_mask" if self.context_mask is None else "target_mask"
            yield RequestError(f"{lacking} is missing", hint="send both masks or neither", field=lacking)
        for name, mask in (("context_mask", self.context_mask), ("target_mask", self.target_mask)):
            if mask == ():
                yield RequestError(
                    f"{name} is empty", hint="name at least one token, or leave both masks out", field=name
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionParams(Common):
    """V-JEPA 2-AC: encode, predict, roll candidate actions out, plan."""

    task: str | None = param(
        None, "what to do. Default encode; see the earlier names", choices=("encode", "predict", "rollout", "plan")
    )
    actions: object = param(
        None, "[H, 7] or [candidates, H, 7]: position (m), Euler angles (rad), gripper, each as a change"
    )
    states: object = param(None, "[context frames, 7]; with state_mode given, one for each action, or per candidate")
    state_mode: str = param("integrate", "where later states come from", choices=("integrate", "given"))
    extrinsics: object = param(None, "[H, 6] camera poses, for checkpoints that take them")
    context_frames: int = param(1, "first frames of the clip that are seen before the rollout", ge=1, le=MOST_FRAMES)
    horizon: int | None = param(None, "rollout steps. Default from actions; plan 2", ge=1, le=MOST_FRAMES)
    normalize_reps: bool = param(True, "normalise latents between steps, as in training")
    cost: str = param("l1", "distance to the goal", choices=COSTS)
    samples: int = param(400, "candidates per planning step", ge=2, le=MOST_SAMPLES)
    topk: int = param(10, "best candidates that shape the next step", ge=2, le=MOST_SAMPLES)
    cem_steps: int = param(10, "planning steps", ge=1, le=1000)
    maxnorm: float = param(0.05, "most metres per axis and action", gt=0, le=1)
    momentum_mean: float = param(0.15, "share of the former mean that stays", ge=0, le=1)
    momentum_std: float = param(0.15, "share of the former spread that stays", ge=0, le=1)
    momentum_mean_gripper: float = param(0.15, "momentum_mean of the gripper", ge=0, le=1)
    momentum_std_gripper: float = param(0.15, "momentum_std of the gripper", ge=0, le=1)
    close_gripper: int | None = param(None, "step from which the gripper is held closed", ge=0, le=MOST_FRAMES)
    axis: object = param(None, "fixed values of planned axes, by x, y, z, gripper")
    noise: object = param(None, "[cem_steps, horizon, samples, 4] in place of drawn numbers")
    seed: int = param(0, "of planning: same seed, same plan", ge=0, le=2**63 - 1, openai="seed")
    mpc: bool = param(False, "earlier name of a rollout that is scored against a goal")
    goal: object = param(
        None, "goal latents [tokens, width]; a goal image is a second upload", aliases=("goal_hidden",)
    )
    goal_hidden_fill: float | None = param(None, "earlier way to send goal latents of one value")

    @property
    def action_count(self) -> int:
        """Actions per candidate; 0 without any."""
        return 0 if self.actions is None else shape_of(self.actions, "actions")[-2]

    @property
    def candidates(self) -> int:
        """Sequences of actions sent."""
        shape = () if self.actions is None else shape_of(self.actions, "actions")
        return shape[0] if len(shape) == 3 else 1

    @property
    def steps(self) -> int:
        """Steps to roll out."""
        asked = self.horizon or self.rollout_horizon
        return asked or max(1, self.action_count - self.context_frames + 1)

    @property
    def plan_steps(self) -> int:
        """Steps of a plan."""
        return self.horizon or self.rollout_horizon or 2

    def chosen_task(self, outputs: frozenset[str]) -> str:
        """The task, read from the earlier names where it is not given."""
        if self.task is not None:
            return self.task
        if self.skip_predictor:
            return "encode"
        if self.mpc or (self.rollout_horizon or 0) > 1:
            return "rollout"
        return "predict" if "video" in outputs else "encode"

    def check(self) -> Iterator[RequestError]:
        """Rules across fields; those that need the media are the processor's."""
        yield from Common.check(self)
        yield from _same_horizon(self.horizon, self.rollout_horizon)
        yield from check_shape(self.actions, "actions", (None, POSE), (None, None, POSE))
        yield from check_shape(self.states, "states", (None, POSE), (None, None, POSE))
        yield from check_shape(self.extrinsics, "extrinsics", (None, 6))
        yield from check_shape(self.goal, "goal", (None, None))
        is_planning = self.task == "plan"
        if is_planning:
            yield from check_shape(self.noise, "noise", (self.cem_steps, self.plan_steps, self.samples, 4))
            yield from self._check_plan()
        yield from self._check_horizon()
        yield from self.problems_of(self.task)

    def problems_of(self, task: str | None) -> Iterator[RequestError]:
        """Rules of one task; asked again where the task follows from earlier names."""
        if task == "rollout":
            yield from self._check_rollout()

    @property
    def fixed_axes(self) -> Mapping[str, float]:
        """Planned axes that are held at a value."""
        return self.axis if isinstance(self.axis, dict) else {}

    def _check_horizon(self) -> Iterator[RequestError]:
        steps = self.plan_steps if self.task == "plan" else self.steps
        if self.context_frames + steps - 1 > MOST_FRAMES:
            most = MOST_FRAMES - self.context_frames + 1
            yield RequestError(
                f"horizon is {steps}, allowed is <= {most}",
                f"{self.context_frames} context frames",
                field="horizon",
                value=str(steps),
            )

    def _check_plan(self) -> Iterator[RequestError]:
        if self.topk > self.samples:
            yield RequestError(
                f"topk is {self.topk}, above samples {self.samples}",
                hint="lower topk",
                field="topk",
                value=str(self.topk),
            )
        axes = {} if self.axis is None else self.axis
        if not isinstance(axes, dict):
            yield RequestError("axis is no object", hint='send {"x": 0.02}', field="axis")
            return
        for name, value in axes.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name not in AXES or not is_number or not abs(value) <= MOST_FIXED:
                hint = f"{', '.join(AXES)}, each with a number of at most {MOST_FIXED:g}"
                yield RequestError(f"axis {name!r} cannot be fixed to {value!r}", hint=hint, field="axis")

    def _check_rollout(self) -> Iterator[RequestError]:
        for name, value in (("actions", self.actions), ("states", self.states)):
            if value is None:
                yield RequestError(
                    f"{name} is missing", hint="a rollout needs actions and states", field=name, code="missing_field"
                )
        needed = self.context_frames + self.steps - 1
        if self.actions is not None and self.action_count < needed:
            yield RequestError(
                f"actions hold {self.action_count} steps, needed are {needed}",
                hint="send more, or lower horizon",
                field="actions",
            )
        known = 0 if self.states is None else shape_of(self.states, "states")[-2]
        wanted = needed if self.state_mode == "given" else self.context_frames
        if known != wanted:
            hint = "one for each context frame; with state_mode given, one for each action"
            yield RequestError(f"states hold {known} frames, needed are {wanted}", hint=hint, field="states")


def shape_of(value: object, field: str) -> tuple[int, ...]:
    """Shape of a nested list of finite numbers. Raises RequestError when it is ragged or holds something else."""
    if isinstance(value, (list, tuple)):
        inner = {shape_of(item, field) for item in value}
        if len(inner) != 1:
            raise RequestError(
                f"{field} is not a table of numbers",
                hint="every row needs the same length, and at least one",
                field=field,
            )
        return (len(value), *inner.pop())
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{field} holds {value!r}"[:80], hint="send finite numbers", field=field)
    return ()


def check_shape(value: object, field: str, *forms: tuple[int | None, ...]) -> Iterator[RequestError]:
    """Nothing when `value` is None or has one of the forms (None: any length), else the error that says so."""
    if value is None:
        return
    try:
        shape = shape_of(value, field)
    except RequestError as error:
        yield error
        return
    fits = (
        len(shape) == len(form) and all(want in (None, got) for got, want in zip(shape, form, strict=True))
        for form in forms
    )
    if not any(fits):
        allowed = " or ".join(str(["n" if size is None else size for size in form]).replace("'", "") for form in forms)
        yield RequestError(
            f"{field} has shape {list(shape)}, allowed is {allowed}",
            field=field,
            value=str(list(shape)),
            allowed=allowed,
        )
