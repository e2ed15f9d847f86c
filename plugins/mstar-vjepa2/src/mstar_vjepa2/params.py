"""Request parameters of both V-JEPA 2 models. Read by the api, the programs and the processors."""

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
"""Maximum latent frames of a rollout in any deployment, context included; `max_latent_frames` sets a lower limit."""

POSE: Final = 7
"""Values of a state or an action: position, Euler angles, gripper."""

MOST_SAMPLES: Final = 4096
"""Maximum candidates of one planning step."""

AXES: Final = ("x", "y", "z", "gripper")
MOST_FIXED: Final = 1.0
"""Largest absolute value of a fixed axis: metres, or the full range of the gripper."""

FEW_CANDIDATES: Final = 8
"""Up to this many scored candidates return latents by default; more return energies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Parameters of both models. Names after `output_dtype` are those of an earlier system."""

    returns: tuple[str, ...] | None = param(
        None,
        f"of {', '.join(RETURNS)}. Default latents; energies for more than {FEW_CANDIDATES} scored candidates",
        aliases=("return",),
        max_items=len(RETURNS),
    )
    output_format: str = param("raw", "format of tensors", choices=("raw", "npy", "safetensors", "json"))
    output_dtype: str = param("float32", "dtype of tensors", choices=("float32", "float16", "bfloat16"))
    skip_predictor: bool = param(False, "earlier name of task encode")
    rollout_horizon: int | None = param(
        None, "earlier name of horizon; above 1 it also means task rollout", ge=1, le=MOST_FRAMES
    )
    stream_rollout: bool = param(
        True, "earlier name, ignored: steps are sent as they finish; streaming=false sends all at the end"
    )

    def check(self) -> Iterator[RequestError]:
        """Yield violations of rules across fields."""
        for name in self.returns or ():
            if name not in RETURNS:
                yield RequestError(
                    f"return contains {name!r}",
                    hint=f"use {', '.join(RETURNS)}",
                    field="return",
                    value=name,
                    allowed=", ".join(RETURNS),
                )
        if self.output_format == "npy" and self.output_dtype == "bfloat16":
            yield RequestError(
                "npy cannot store bfloat16", hint="use safetensors or raw, or float16", field="output_dtype"
            )


def _same_horizon(horizon: int | None, earlier: int | None) -> Iterator[RequestError]:
    if horizon is not None and earlier is not None and horizon != earlier:
        hint = "send horizon alone"
        yield RequestError(f"horizon is {horizon} and rollout_horizon is {earlier}", hint=hint, field="rollout_horizon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(Common):
    """Parameters of V-JEPA 2: encode, predict, roll out without actions, classify."""

    task: str | None = param(
        None,
        "what to do. Default encode; predict if video is requested",
        choices=("encode", "predict", "rollout", "classify"),
    )
    num_frames: int | None = param(
        None, "frames sampled from the clip. Default 64, or all of a shorter clip", ge=1, le=768
    )
    fps: float | None = param(None, "sampled frames per second, instead of num_frames", gt=0, le=240)
    pooling: str = param(
        "none", "pooling of the encoder's tokens; attentive needs a classifier checkpoint", choices=POOLINGS
    )
    layers: tuple[int, ...] | None = param(
        None,
        "encoder blocks whose outputs are returned, 0 = patches. Default the last, normalised",
        ge=0,
        le=64,
        max_items=65,
    )
    context_mask: tuple[int, ...] | None = param(
        None, "token ids that the predictor sees. Default all", ge=0, max_items=65_536
    )
    target_mask: tuple[int, ...] | None = param(
        None, "token ids to predict; they may be past the clip. Default all", ge=0, max_items=65_536
    )
    horizon: int | None = param(None, "rollout steps. Default 1", ge=1, le=MOST_FRAMES)
    anticipation_s: float = param(
        0.0, "rollout without masks: seconds between the clip and the prediction", ge=0, le=60
    )

    @property
    def steps(self) -> int:
        """Requested rollout steps."""
        return self.horizon or self.rollout_horizon or 1

    def chosen_task(self, outputs: frozenset[str]) -> str:
        """Return the task. Without `task` it follows from the earlier names."""
        if self.task is not None:
            return self.task
        if self.skip_predictor:
            return "encode"
        if (self.rollout_horizon or 0) > 1:
            return "rollout"
        return "predict" if "video" in outputs else "encode"

    def check(self) -> Iterator[RequestError]:
        """Yield violations of rules across fields."""
        yield from Common.check(self)
        yield from _same_horizon(self.horizon, self.rollout_horizon)
        if self.num_frames is not None and self.fps is not None:
            yield RequestError("num_frames and fps are both given", hint="send one of them", field="fps")
        if (self.context_mask is None) != (self.target_mask is None):
            lacking = "context_mask" if self.context_mask is None else "target_mask"
            yield RequestError(f"{lacking} is missing", hint="send both masks or neither", field=lacking)
        for name, mask in (("context_mask", self.context_mask), ("target_mask", self.target_mask)):
            if mask == ():
                yield RequestError(f"{name} is empty", hint="name at least one token, or omit both masks", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionParams(Common):
    """Parameters of V-JEPA 2-AC: encode, predict, roll out candidate actions, plan."""

    task: str | None = param(
        None, "what to do. Default encode; see the earlier names", choices=("encode", "predict", "rollout", "plan")
    )
    actions: object = param(
        None, "[H, 7] or [candidates, H, 7]: position (m), Euler angles (rad), gripper, each as a change"
    )
    states: object = param(
        None, "[context frames, 7], or [7] for one; with state_mode given, one per action, optionally per candidate"
    )
    state_mode: str = param("integrate", "source of later states", choices=("integrate", "given"))
    extrinsics: object = param(None, "[H, 6] camera poses, for checkpoints that use them")
    context_frames: int = param(1, "first frames of the clip that precede the rollout", ge=1, le=MOST_FRAMES)
    horizon: int | None = param(None, "rollout steps. Default from actions; plan 2", ge=1, le=MOST_FRAMES)
    normalize_reps: bool = param(True, "normalise latents between steps, as in training")
    cost: str = param("l1", "distance to the goal", choices=COSTS)
    samples: int = param(400, "candidates per planning step", ge=2, le=MOST_SAMPLES)
    topk: int = param(10, "best candidates that update the next step", ge=2, le=MOST_SAMPLES)
    cem_steps: int = param(10, "planning steps", ge=1, le=1000)
    maxnorm: float = param(0.05, "maximum metres per axis and action", gt=0, le=1)
    momentum_mean: float = param(0.15, "weight of the previous mean", ge=0, le=1)
    momentum_std: float = param(0.15, "weight of the previous spread", ge=0, le=1)
    momentum_mean_gripper: float = param(0.15, "momentum_mean of the gripper", ge=0, le=1)
    momentum_std_gripper: float = param(0.15, "momentum_std of the gripper", ge=0, le=1)
    close_gripper: int | None = param(None, "first step with a closed gripper", ge=0, le=MOST_FRAMES)
    axis: object = param(None, "fixed values of planned axes x, y, z, gripper")
    noise: object = param(None, "[cem_steps, horizon, samples, 4] instead of random numbers")
    seed: int = param(0, "seed of planning: the same seed gives the same plan", ge=0, le=2**63 - 1, openai="seed")
    mpc: bool = param(False, "earlier name of a scored rollout")
    goal: object = param(
        None, "goal latents [tokens, width]; a goal image is a second upload", aliases=("goal_hidden",)
    )
    goal_hidden_fill: float | None = param(None, "earlier way to send goal latents of one value")

    def __post_init__(self) -> None:
        """Read one state that was sent as [7] as [1, 7]."""
        one = self.states
        if isinstance(one, (list, tuple)) and len(one) == POSE and not any(isinstance(v, (list, tuple)) for v in one):
            object.__setattr__(self, "states", [one])

    @property
    def action_count(self) -> int:
        """Actions per candidate; 0 without actions."""
        return 0 if self.actions is None else shape_of(self.actions, "actions")[-2]

    @property
    def candidates(self) -> int:
        """Number of candidate action sequences."""
        shape = () if self.actions is None else shape_of(self.actions, "actions")
        return shape[0] if len(shape) == 3 else 1

    @property
    def steps(self) -> int:
        """Rollout steps."""
        steps = self.horizon or self.rollout_horizon
        return steps or max(1, self.action_count - self.context_frames + 1)

    @property
    def plan_steps(self) -> int:
        """Steps of a plan."""
        return self.horizon or self.rollout_horizon or 2

    def chosen_task(self, outputs: frozenset[str]) -> str:
        """Return the task. Without `task` it follows from the earlier names."""
        if self.task is not None:
            return self.task
        if self.skip_predictor:
            return "encode"
        if self.mpc or (self.rollout_horizon or 0) > 1:
            return "rollout"
        return "predict" if "video" in outputs else "encode"

    def check(self) -> Iterator[RequestError]:
        """Yield violations of rules across fields. The processor checks rules that need the media."""
        yield from Common.check(self)
        yield from _same_horizon(self.horizon, self.rollout_horizon)
        yield from check_shape(self.actions, "actions", (None, POSE), (None, None, POSE))
        yield from check_shape(self.states, "states", (POSE,), (None, POSE), (None, None, POSE))
        yield from check_shape(self.extrinsics, "extrinsics", (None, 6))
        yield from check_shape(self.goal, "goal", (None, None))
        is_planning = self.task == "plan"
        if is_planning:
            yield from check_shape(self.noise, "noise", (self.cem_steps, self.plan_steps, self.samples, 4))
            yield from self._check_plan()
        yield from self._check_horizon()
        yield from self.problems_of(self.task)

    def problems_of(self, task: str | None) -> Iterator[RequestError]:
        """Yield violations of the rules of one task. Checked again when the task follows from earlier names."""
        if task == "rollout":
            yield from self._check_rollout()

    @property
    def fixed_axes(self) -> Mapping[str, float]:
        """Planned axes with a fixed value."""
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
            yield RequestError("axis must be an object", hint='send {"x": 0.02}', field="axis")
            return
        for name, value in axes.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name not in AXES or not is_number or not abs(value) <= MOST_FIXED:
                hint = f"{', '.join(AXES)}, each with an absolute value of at most {MOST_FIXED:g}"
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
                f"actions have {self.action_count} steps, needed are {needed}",
                hint="send more, or lower horizon",
                field="actions",
            )
        known = 0 if self.states is None else shape_of(self.states, "states")[-2]
        expected = needed if self.state_mode == "given" else self.context_frames
        if known != expected:
            hint = "send one per context frame; with state_mode given, one per action"
            yield RequestError(f"states have {known} frames, needed are {expected}", hint=hint, field="states")


def shape_of(value: object, field: str) -> tuple[int, ...]:
    """Return the shape of a nested list of finite numbers. Raises RequestError for a ragged list or another value."""
    if isinstance(value, (list, tuple)):
        inner = {shape_of(item, field) for item in value}
        if len(inner) != 1:
            raise RequestError(
                f"{field} must be a table of numbers",
                hint="all rows need the same length and at least one value",
                field=field,
            )
        return (len(value), *inner.pop())
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{field} contains {value!r}"[:80], hint="send finite numbers", field=field)
    return ()


def check_shape(value: object, field: str, *forms: tuple[int | None, ...]) -> Iterator[RequestError]:
    """Yield an error unless `value` is None or has one of the given shapes. None in a shape matches any length."""
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
