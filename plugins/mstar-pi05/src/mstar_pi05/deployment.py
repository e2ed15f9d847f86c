"""Deployment options of Pi0.5 (`model_kwargs`). Standard library only.

Read by `plugin.py` in every process and by the processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from mstar_core.errors import ConfigError, did_you_mean
from mstar_pi05.checkpoint.config import ACTION_WIDTH
from mstar_pi05.robots.specs import ROBOTS, Robot

LONGEST_HORIZON: Final = 1000
MOST_STEPS: Final = 100
RESIZES: Final = ("pillow", "tensor")
VISION_DTYPES: Final = ("float32", "tf32", "bfloat16")

MODEL_KWARGS: Final[Mapping[str, Any]] = {
    "action_horizon": None,
    "action_dim": None,
    "max_num_steps": 20,
    "expected_num_steps": None,
    "state_in_prompt": True,
    "pad_state": False,
    "norm_stats": None,
    "robot": None,
    "adapt_to_pi": True,
    "delta_actions": None,
    "resize": "pillow",
    "default_prompt": None,
    "vision_dtype": None,
    "metadata": None,
}
"""Options with their defaults, as the plugin's README documents them. None: the robot's or the checkpoint's value."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Validated options. horizon: None = the checkpoint's. is_delta: per action value, whether it is relative to the
    state.

    expected_num_steps: flow steps that a GPU compiles and captures before it is ready. vision_dtype: None = chosen by
    `tower_dtype`. metadata: sent to robot clients when they connect.
    """

    horizon: int | None = None
    action_dim: int = ACTION_WIDTH
    max_num_steps: int = 20
    expected_num_steps: tuple[int, ...] = (10,)
    state_in_prompt: bool = True
    pads_state: bool = False
    norm_stats: str | None = None
    robot: Robot | None = None
    mirrors: bool = False
    is_delta: tuple[bool, ...] = ()
    resize: str = "pillow"
    default_prompt: str | None = None
    vision_dtype: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_deployment(model_kwargs: Mapping[str, Any]) -> Deployment:
    """Validate the options. Raises ConfigError naming key, value and allowed values."""
    for key in model_kwargs:
        if key not in MODEL_KWARGS:
            hint = did_you_mean(key, MODEL_KWARGS)
            raise ConfigError(f"pi05 has no model_kwargs key {key!r}", hint=hint, key=f"model_kwargs.{key}")
    kwargs = {**MODEL_KWARGS, **model_kwargs}
    robot = _robot(kwargs["robot"])
    wants_delta = _flag(kwargs, "delta_actions", bool(robot and any(robot.is_delta)))
    if wants_delta and not (robot and robot.is_delta):
        raise _wrong("delta_actions", True, f"only with a robot that names its joints: {_with_delta()}")
    return Deployment(
        horizon=_number(kwargs, "action_horizon", LONGEST_HORIZON, None),
        action_dim=_number(kwargs, "action_dim", ACTION_WIDTH, robot.actions if robot else ACTION_WIDTH),
        max_num_steps=(most := _number(kwargs, "max_num_steps", MOST_STEPS, 20)),
        expected_num_steps=_numbers(kwargs, "expected_num_steps", most, (min(10, most),)),
        state_in_prompt=_flag(kwargs, "state_in_prompt", True),
        pads_state=_flag(kwargs, "pad_state", False),
        norm_stats=_text(kwargs, "norm_stats"),
        robot=robot,
        mirrors=_flag(kwargs, "adapt_to_pi", True) and bool(robot and robot.mirrors),
        is_delta=robot.is_delta if robot and wants_delta else (),
        resize=_one_of(kwargs, "resize", RESIZES),
        default_prompt=_text(kwargs, "default_prompt"),
        vision_dtype=None if kwargs["vision_dtype"] is None else _one_of(kwargs, "vision_dtype", VISION_DTYPES),
        metadata=_map(kwargs, "metadata"),
    )


def tower_dtype(chosen: str | None, is_half: bool) -> str:
    """Return the dtype of the image tower. is_half: whether the next node reads its output in half
    precision.

    With half precision the default is TF32: it changes the vectors by 4e-4, rounding to half by 17e-4, bfloat16 in the
    tower by 130e-4.
    """
    return chosen or ("tf32" if is_half else "float32")


def _robot(name: object) -> Robot | None:
    if name is None:
        return None
    if not isinstance(name, str) or name not in ROBOTS:
        raise _wrong("robot", name, did_you_mean(str(name), ROBOTS))
    return ROBOTS[name]


def _one_of(kwargs: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> str:
    if kwargs[key] not in allowed:
        raise _wrong(key, kwargs[key], f"choose one of: {', '.join(allowed)}")
    return str(kwargs[key])


def _with_delta() -> str:
    return ", ".join(name for name, robot in ROBOTS.items() if robot.is_delta)


def _number(kwargs: Mapping[str, Any], key: str, most: int, default: T) -> int | T:
    value = kwargs[key]
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _wrong(key, value, f"a whole number from 1 to {most}")
    return value


def _numbers(kwargs: Mapping[str, Any], key: str, most: int, default: tuple[int, ...]) -> tuple[int, ...]:
    value = kwargs[key]
    if value is None:
        return default
    if not isinstance(value, list | tuple):
        raise _wrong(key, value, f"a list of whole numbers from 1 to {most}, such as [10]; [] for none")
    return tuple(sorted({_number({key: item}, key, most, 0) for item in value}))


def _flag(kwargs: Mapping[str, Any], key: str, default: bool) -> bool:
    value = kwargs[key]
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(key, value, "write true or false")
    return value


def _text(kwargs: Mapping[str, Any], key: str) -> str | None:
    value = kwargs[key]
    if value is not None and not isinstance(value, str):
        raise _wrong(key, value, "write a text")
    return value


def _map(kwargs: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = kwargs[key]
    if value is not None and not isinstance(value, Mapping):
        raise _wrong(key, value, "write keys and values, such as {reset_pose: [0, 0, 0, 0, 0, 0]}")
    return value or {}


def _wrong(key: str, value: object, hint: str) -> ConfigError:
    return ConfigError(f"model_kwargs.{key} is {value!r}", hint=hint, key=f"model_kwargs.{key}")
