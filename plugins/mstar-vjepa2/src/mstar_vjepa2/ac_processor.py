"""Processor of V-JEPA 2-AC: frames, actions, states and a goal to arrays. Runs in the api's pool; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import RequestError, TooLarge
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest
from mstar_vjepa2.checkpoint.config import ActionConfig, read_action
from mstar_vjepa2.graph import MOST_SCORED
from mstar_vjepa2.program import CLIP
from mstar_vjepa2.request.answers import check_wire, missing_media, sent_as_video
from mstar_vjepa2.request.media import read_image, read_video
from mstar_vjepa2.request.tensors import as_float32, float_clip_of, read_tensor
from mstar_vjepa2.request.trajectories import Trajectories, planning, read_trajectories, require_movements, taught
from mstar_vjepa2.request.transforms import squared

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_vjepa2.params import ActionParams

    Array = npt.NDArray[Any]

ROLLING: Final = ("rollout", "plan")
WELL_KNOWN: Final = 16
"""Latent frames above which a rollout gets a warning."""


class ActionProcessor:
    """Processor of V-JEPA 2-AC. Created once per pool process."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        folder = checkpoint_folder(folder, "vjepa2_ac")
        config = read_action(folder)
        most = model_kwargs.get("max_latent_frames") or config.most_frames
        self._config: ActionConfig = replace(config, most_frames=most)

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Return the frames and the other inputs of the task. Raises RequestError naming the field."""
        params: ActionParams = request.params
        check_wire(params, request.outputs)
        task = params.chosen_task(request.outputs)
        for problem in params.problems_of(task):
            raise problem
        self._check_frames(task, params, request.max_seq_len)
        if task == "predict":
            require_movements(params)
        media, goal = self._split(task, request.media, params)
        goal_arrays = self._goal(goal, params)
        self._check_goal(task, params, has_goal=bool(goal_arrays))
        frames, notes = self._frames(task, media, params)
        arrays: dict[str, Array] = {}
        match task:
            case "encode":
                arrays[CLIP] = frames
            case "predict":
                arrays = {CLIP: frames, **taught(params, self._config, len(frames))}
            case _:
                moves = read_trajectories(params, self._config, is_planning=task == "plan")
                arrays = _rolled(frames, moves) | goal_arrays
                _check_scored(task, params, has_goal=bool(goal_arrays))
                if task == "plan":
                    arrays |= planning(params)
        notes += self._beyond_training(task, params)
        tokens = (len(frames) + ("goal_frame" in arrays)) * self._config.encoder.frame_tokens
        usage = {"encoder_tokens": tokens, **self._predicted(task, params, len(frames))}
        return Inputs(arrays=arrays, prompt_tokens=tokens, warnings=notes, metadata=self._metadata(params), usage=usage)

    def postprocess(self, output: Array, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Return latents as float32 bytes, for requests with output modality `video`."""
        return sent_as_video(output)

    def _metadata(self, params: ActionParams) -> dict[str, dict[str, Any]]:
        """Return the metadata of every tensor: picture size, patch grid, and whether latents are normalised."""
        encoder = self._config.encoder
        config = {"crop": encoder.crop, "grid": [encoder.grid] * 2, "normalize_reps": params.normalize_reps}
        return {"tensor": config}

    def _predicted(self, task: str, params: ActionParams, frames: int) -> dict[str, int]:
        """Return predictor tokens over all candidates, and the steps of a rollout or plan."""
        frame_tokens = self._config.conditions + self._config.encoder.frame_tokens
        match task:
            case "rollout":
                passes, steps = params.candidates * params.steps, params.steps
            case "plan":
                passes, steps = params.cem_steps * params.samples * params.plan_steps, params.cem_steps
            case _:
                return {"predictor_tokens": frames * frame_tokens if task == "predict" else 0}
        return {"predictor_tokens": (params.context_frames - 1 + passes) * frame_tokens, "steps": steps}

    # -- sizes --------------------------------------------------------------------------------------------------

    def _check_frames(self, task: str, params: ActionParams, max_seq_len: int) -> None:
        """Raise RequestError if a rollout needs more latent frames than the deployment allows."""
        if task not in ROLLING:
            return
        steps = params.plan_steps if task == "plan" else params.steps
        most, why = self._config.most_frames, "max_latent_frames"
        frame = self._config.conditions + self._config.encoder.frame_tokens
        if max_seq_len and max_seq_len // frame < most:
            most, why = max_seq_len // frame, f"max_seq_len is {max_seq_len} tokens of {frame} a frame"
        if params.context_frames + steps - 1 > most:
            raise RequestError(
                f"horizon is {steps}, allowed is <= {max(0, most - params.context_frames + 1)}",
                f"{params.context_frames} context frames; this deployment takes {most} latent frames ({why})",
                "lower horizon or context_frames",
                field="horizon" if params.context_frames <= most else "context_frames",
                value=str(steps),
            )

    def _beyond_training(self, task: str, params: ActionParams) -> list[str]:
        steps = params.plan_steps if task == "plan" else params.steps
        frames = params.context_frames + steps - 1
        if task not in ROLLING or frames <= WELL_KNOWN:
            return []
        return [f"{frames} latent frames: the model was trained on 8 and is unreliable above {WELL_KNOWN}"]

    # -- media --------------------------------------------------------------------------------------------------

    def _split(
        self, task: str, media: Sequence[MediaPart], params: ActionParams
    ) -> tuple[Sequence[MediaPart], MediaPart | None]:
        """Split the files into frames and an optional goal."""
        if not media:
            raise missing_media("image")
        odd = next((part.modality for part in media if part.modality not in ("image", "video", "tensor")), None)
        if odd is not None:
            raise RequestError(f"vjepa2_ac does not accept {odd}", hint="send images, a video or tensors", field=odd)
        are_images = media[0].modality == "image"
        count = (params.context_frames if task in ROLLING else len(media)) if are_images else 1
        frames, rest = media[:count], media[count:]
        is_mixed = any(part.modality != media[0].modality for part in frames)
        if is_mixed or len(rest) > 1 or (rest and task not in ROLLING):
            hint = "send frames first (a video, a tensor, or one image per frame), then at most one goal"
            raise RequestError(f"{len(media)} files do not fit task {task}", hint=hint, field=media[-1].modality)
        if are_images and len(frames) < count:
            raise _too_few("context_frames", count, len(frames))
        return frames, rest[0] if rest else None

    def _frames(self, task: str, media: Sequence[MediaPart], params: ActionParams) -> tuple[Array, list[str]]:
        """Return normalised float32 frames [t, 3, crop, crop]: the context, one per action, or all of them."""
        needed = {"encode": None, "predict": params.action_count}.get(task, params.context_frames)
        field = "actions" if task == "predict" else "context_frames"
        crop = self._config.encoder.crop

        def choose(total: int, rate: float = 0.0) -> range:
            count = total if needed is None else needed
            if count > total:
                raise _too_few(field, count, total)
            self._check_count(count)
            return range(count)

        match media[0].modality:
            case "image":
                total = len(media)
                pixels = np.stack([squared(read_image(media[index]), crop) for index in choose(total)])
            case "tensor":
                whole = float_clip_of(media[0], self._config.encoder)
                total = len(whole)
                pixels = np.ascontiguousarray(whole[list(choose(total))])
            case _:
                needs_total = needed is None
                clip = read_video(media[0], choose, lambda frame: squared(frame, crop), needs_total=needs_total)
                pixels, total = np.stack(clip.frames), clip.total
        notes = [f"{total} frames were sent, the first {len(pixels)} were used"] if total > len(pixels) else []
        return pixels, notes

    def _check_count(self, count: int) -> None:
        most = self._config.most_frames
        if count > most:
            raise TooLarge(
                f"{count} frames were sent, the model takes at most {most}",
                "each frame of the clip is one time step",
                "send fewer; the model was trained on 4 frames per second",
                field="video",
                value=str(count),
                allowed=str(most),
            )

    # -- goal ---------------------------------------------------------------------------------------------------

    def _goal(self, part: MediaPart | None, params: ActionParams) -> dict[str, Array]:
        goals = [
            name
            for name, value in (("goal", params.goal), ("goal_hidden_fill", params.goal_hidden_fill))
            if value is not None
        ]
        if len(goals) + (part is not None) > 1:
            raise RequestError("more than one goal was sent", hint="send one", field=goals[-1])
        if part is not None:
            return self._uploaded_goal(part)
        encoder = self._config.encoder
        shape = (encoder.frame_tokens, encoder.vit.width)
        if params.goal_hidden_fill is not None:
            return {"goal_latents": np.full(shape, params.goal_hidden_fill, dtype=np.float32)}
        if params.goal is None:
            return {}
        return {"goal_latents": self._latents(as_float32(params.goal, "goal"))}

    def _uploaded_goal(self, part: MediaPart) -> dict[str, Array]:
        encoder = self._config.encoder
        match part.modality:
            case "image":
                return {"goal_frame": squared(read_image(part), encoder.crop)[None]}
            case "tensor":
                value = read_tensor(part, "goal")
                if value.ndim >= 4:
                    frames = float_clip_of(part, encoder)
                    if len(frames) != 1:
                        raise RequestError(f"the goal has {len(frames)} frames", hint="send one", field="goal")
                    return {"goal_frame": frames}
                return {"goal_latents": self._latents(as_float32(value, "goal"))}
            case other:
                raise RequestError(
                    f"a goal cannot be {other}", hint="send an image, or latents as a tensor", field="goal"
                )

    def _latents(self, value: Array) -> Array:
        encoder = self._config.encoder
        shape = (encoder.frame_tokens, encoder.vit.width)
        if value.ndim == 3 and value.shape[0] == 1:
            value = value[0]
        if value.shape != shape:
            raise RequestError(
                f"goal has shape {list(value.shape)}, allowed is {list(shape)}",
                hint="send one vector per patch of a frame, as encode returns them",
                field="goal",
                value=str(list(value.shape)),
                allowed=str(list(shape)),
            )
        return value

    def _check_goal(self, task: str, params: ActionParams, *, has_goal: bool) -> None:
        if task in ROLLING and not has_goal:
            wants = "task" if task == "plan" else "mpc" if params.mpc else "return"
            if wants != "return" or "energies" in (params.returns or ()):
                hint = "upload an image after the frames, or send goal"
                raise RequestError(
                    f"{wants} needs a goal", "energies are distances to it", hint, field="goal", code="missing_field"
                )
        if task not in ROLLING and has_goal:
            raise RequestError(f"task {task} takes no goal", hint="use rollout or plan", field="goal")


def _check_scored(task: str, params: ActionParams, *, has_goal: bool) -> None:
    """Raise RequestError for too many scored candidates: all of them keep their caches during the rollout."""
    if task == "rollout" and has_goal and params.candidates > MOST_SCORED:
        raise RequestError(
            f"actions have {params.candidates} candidates, with a goal allowed are {MOST_SCORED}",
            hint="send them in several requests",
            field="actions",
            value=str(params.candidates),
            allowed=str(MOST_SCORED),
        )


def _rolled(frames: Array, moves: Trajectories) -> dict[str, Array]:
    """Return frames and movements of a rollout, with the last context frame separate from the earlier ones."""
    arrays: dict[str, Array] = {CLIP: frames[-1:], **moves.arrays}
    return arrays | {"context": frames[:-1], **moves.past} if len(frames) > 1 else arrays


def _too_few(field: str, needed: int, sent: int) -> RequestError:
    return RequestError(
        f"{field} needs {needed} frames, {sent} were sent",
        hint="send that many frames, in order",
        field=field,
        value=str(needed),
        allowed=f"<= {sent}",
    )
