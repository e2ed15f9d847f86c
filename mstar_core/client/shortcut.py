"""What the clients' shorter calls ask of `generate`: one function each, shared by both clients."""

from __future__ import annotations

from typing import Any

from mstar_core.client.media import Media

Arguments = dict[str, Any]
"""Keyword arguments of `generate`. What the caller gives stands above what is meant here."""


def image_arguments(prompt: str, given: Arguments) -> Arguments:
    return {"text": prompt, "output_modalities": ("image",), **given}


def edit_arguments(prompt: str, image: Media, given: Arguments) -> Arguments:
    return {"text": prompt, "images": image, "output_modalities": ("image",), **given}


def speech_arguments(text: str, voice: str | None, given: Arguments) -> Arguments:
    return {"text": text, "voice": voice, "output_modalities": ("audio",), **given}


def action_arguments(images: Media, text: str | None, robot_state: Any, given: Arguments) -> Arguments:
    return {
        "images": images, "text": text, "robot_state": robot_state, "output_modalities": ("action",), **given
    }  # fmt: skip


def encode_arguments(video: Any, given: Arguments) -> Arguments:
    return {**_frames(video), "task": "encode", "output_modalities": ("tensor",), **given}


def rollout_arguments(video: Any, actions: Any, states: Any, goal: Any, given: Arguments) -> Arguments:
    asked = {"task": "rollout", "actions": actions, "states": states, "output_modalities": ("tensor", "scalar")}
    return {**_frames(video, goal), **asked, **given}


def plan_arguments(image: Any, goal: Any, state: Any, given: Arguments) -> Arguments:
    asked = {"task": "plan", "states": [state], "output_modalities": ("tensor", "scalar")}
    return {**_frames(image, goal), **asked, **given}


def _frames(frames: Any, goal: Any = None) -> Arguments:
    """The frames, then the goal behind them: world models tell the two apart by their order.

    Frames in files go as `video`, whose bytes say what each is; arrays go as tensors.
    """
    frame_list, goals = _listed(frames), [] if goal is None else [goal]
    is_tensor = [hasattr(item, "__array__") for item in (*frame_list, *goals)]
    if not any(is_tensor):
        return {"video": [*frame_list, *goals]}
    if all(is_tensor):
        return {"tensors": [*frame_list, *goals]}
    if is_tensor[-1] and not any(is_tensor[:-1]):
        return {"video": frame_list, "tensors": goals}
    raise TypeError("frames are files or arrays, not both; only the goal may be an array beside files")


def _listed(media: Any) -> list[Any]:
    return list(media) if isinstance(media, list) else [media]
