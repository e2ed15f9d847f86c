"""Processor of Pi0.5: cameras, state and instruction to arrays, actions to bytes. Runs in the api's pool; imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import ConfigError, RequestError, WeightsError
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.plugin.observation import besides_pictures, unpacked
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest, SegmentInputs
from mstar_pi05.checkpoint.config import ACTION_WIDTH, CAMERAS, IMAGE, read_sizes
from mstar_pi05.deployment import read_deployment
from mstar_pi05.request.conversion import Values, as_lines, normalise, state_to_model
from mstar_pi05.request.images import FIELD, Floats, Pixels, decoded, fit_pillow, fitted, signed
from mstar_pi05.request.observations import read_observation
from mstar_pi05.request.prompt import PromptTokenizer, pieces
from mstar_pi05.request.uploads import are_quick, as_npy, image_files, sort_uploads
from mstar_pi05.robots.statistics import find_statistics

if TYPE_CHECKING:
    from mstar_pi05.params import Params

INLINE_BYTES: Final = 2048
"""Maximum bytes of a request handled inline: of its text, and of a robot message without its camera images."""


class Processor:
    """Processor of Pi0.5. Created once per pool process, and in the api. Raises WeightsError and ConfigError."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        folder = checkpoint_folder(folder, "pi05")
        self._deployment = read_deployment(model_kwargs)
        self._sizes = read_sizes(folder)
        self._horizon = self._deployment.horizon or self._sizes.horizon
        statistics = find_statistics(folder, self._deployment.norm_stats)
        self._state_moments = statistics.state if statistics else None
        self._action_moments = statistics.actions if statistics else None
        self._folder = folder
        self._tokenizer: PromptTokenizer | None = None
        self._robot_lines: tuple[Floats, Floats] | None = None
        robot = self._deployment.robot
        if robot and self._state_moments and len(self._state_moments) < robot.state:
            raise ConfigError(
                f"the statistics have {len(self._state_moments)} values of state, {robot.name} has {robot.state}",
                hint="choose the robot's own, a file, or none: --set model_kwargs.norm_stats=none",
                key="model_kwargs.norm_stats",
            )

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Return the arrays of a request with files or with a robot message. Raises RequestError naming the field."""
        if request.observation is not None:
            return self._observed(request.observation, request)
        uploads = sort_uploads(request.media)
        params = uploads.joined(request.params)
        counts = self._counts(len(uploads.cameras), params.image_mask)
        images = [uploads.camera(number) for number, is_on in enumerate(counts) if is_on]
        return self.prepare(images, request if params is request.params else replace(request, params=params))

    def warm_up(self) -> None:
        """Load the tokenizer."""
        self.tokenizer.encode(pieces("go", None))

    def is_inline(self, request: PromptRequest) -> bool:
        """Whether the cameras are arrays in the model's format and the rest of the request is small."""
        if len(request.text or "") > INLINE_BYTES:
            return False
        side = self._sizes.vision.image_size
        if request.observation is None:
            return are_quick(request.media, side)
        if len(request.observation) > len(CAMERAS) * 3 * side**2 + INLINE_BYTES:
            return False
        return besides_pictures(request.observation, (side, side, 3)) <= INLINE_BYTES

    def parallel_files(self, request: PromptRequest) -> Sequence[int]:
        """Return the indices of the camera files, if all of them are used image files that stay uint8."""
        if self._deployment.resize != "pillow":
            return ()
        files, mask = image_files(request.media), request.params.image_mask
        return files if mask is None or all(mask[: len(files)]) else ()

    def decode_file(self, part: MediaPart, number: int) -> MediaPart:
        """Return the camera as an array of the model's size. Raises BadMedia."""
        side = self._sizes.vision.image_size
        pixels = decoded(part.data, number)
        if pixels.shape[:2] != (side, side):
            pixels = fit_pillow(pixels, side)
        return replace(part, modality="tensor", data=as_npy(pixels))

    def _observed(self, message: bytes, request: PromptRequest) -> Inputs:
        params: Params = request.params
        robot = self._deployment.robot
        moments = self._state_moments
        size = robot.state if robot is not None else None if moments is None else len(moments)
        seen = read_observation(unpacked(message), robot.name if robot is not None else None, size)
        for field in ("robot_state", "image_mask"):
            if getattr(params, field) is not None:
                hint = "leave the parameter out"
                raise RequestError(f"{field} was sent twice", "the observation contains it", hint, field=field)
        if not seen.images:
            raise RequestError(
                "the observation has no camera image",
                hint=f"send one to three of {', '.join(CAMERAS)}",
                field="images",
                code="missing_field",
            )
        state = seen.state if self._reads_state(params) else None  # robot clients always send a state
        prepared = replace(request, text=seen.prompt, params=replace(params, robot_state=state))
        return self.prepare(seen.images, prepared)

    def prepare(self, images: Sequence[Pixels | Floats], request: PromptRequest) -> Inputs:
        """Return the arrays of a request with decoded images. Only its text and parameters are read.

        images: the used cameras in the model's order, [h, w, 3] of any size, uint8 or float32 in [-1, 1].
        """
        params: Params = request.params
        warnings: list[str] = []
        self._check_steps(params)
        state = self._state(params)
        cameras = self._cameras(images)
        ids = self._ids(request.text, state, warnings)
        room = request.max_seq_len
        tokens = [IMAGE] * (len(cameras) * self._sizes.vision.tokens) + ids
        if room and len(tokens) > room:
            raise RequestError(
                f"{len(cameras)} cameras and {len(ids)} prompt ids make {len(tokens)} positions, allowed are {room}",
                hint="shorten the text, send fewer cameras, or raise max_seq_len",
                field="text",
                code="context_length_exceeded",
                value=str(len(tokens)),
                allowed=f"<= {room}",
            )
        scale, offset = self._lines(params, state, warnings)
        arrays = {
            "images": cameras,
            "tokens": np.array(tokens, dtype=np.int64),
            "noise": self._noise(params, request.seed),
            "scale": scale,
            "offset": offset,
        }
        metadata = {"action": {"normalized": self._is_normalized(params)}}
        places = self._sizes.vision.tokens
        segments = [SegmentInputs(kind="image", arrays={}, length=places) for _ in cameras]  # used for usage only
        return Inputs(arrays=arrays, segments=segments, prompt_tokens=len(tokens), metadata=metadata, warnings=warnings)

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Return actions float32 [horizon, action_dim] as little-endian bytes in row order, with their shape."""
        values = np.ascontiguousarray(output, dtype="<f4")
        return values.tobytes(), {"shape": list(values.shape), "dtype": "float32"}

    @property
    def tokenizer(self) -> PromptTokenizer:
        """The checkpoint's tokenizer, loaded at first use."""
        if self._tokenizer is None:
            tokenizer = PromptTokenizer(self._folder)
            if tokenizer.vocab > self._sizes.vocab:
                raise WeightsError(
                    f"{tokenizer.path} has ids up to {tokenizer.vocab - 1}, the model has {self._sizes.vocab}",
                    hint="use the tokenizer of the checkpoint",
                    file=str(tokenizer.path),
                )
            self._tokenizer = tokenizer
        return self._tokenizer

    # -- cameras --------------------------------------------------------------------------------------------------

    def _counts(self, images: int, mask: Sequence[bool] | None) -> list[bool]:
        most = len(CAMERAS)
        if not 1 <= images <= most:
            code = "missing_field" if not images else "invalid_value"
            raise RequestError(
                f"the request has {images} camera images, allowed are 1 to {most}",
                hint=f"in the order {CAMERAS}",
                field=FIELD,
                value=str(images),
                allowed=f"1 to {most}",
                code=code,
            )
        if mask is None:
            return [True] * images
        if len(mask) < images:
            raise RequestError(
                f"image_mask has {len(mask)} values for {images} images",
                hint="send one value per image",
                field="image_mask",
                value=str(len(mask)),
                allowed=f"{images} to {most} values",
            )
        if any(mask[images:]):
            number = next(index for index in range(images, len(mask)) if mask[index])
            raise RequestError(
                f"image_mask[{number}] is true and there are {images} images",
                hint="send the image, or false",
                field="image_mask",
                value=str(number),
                allowed=f"true up to {images - 1}",
            )
        if not any(mask[:images]):
            raise RequestError(
                "image_mask disables every camera", hint="leave at least one camera true", field="image_mask"
            )
        return list(mask[:images])

    def _cameras(self, images: Sequence[Pixels | Floats]) -> np.ndarray:
        """Return all cameras as one array, uint8 or float32 [c, side, side, 3]."""
        side, resize = self._sizes.vision.image_size, self._deployment.resize
        pictures = [fitted(image, side, resize) for image in images]
        if any(image.dtype != np.uint8 for image in pictures):
            return np.stack([signed(image) for image in pictures])
        return np.stack(pictures)

    # -- state and words ------------------------------------------------------------------------------------------

    def _state(self, params: Params) -> Values | None:
        """Return the state in the model's joint convention, not normalised: float64 [n]."""
        deployment = self._deployment
        if params.robot_state is None:
            if not self._reads_state(params):
                return None
            why = "the prompt contains it" if deployment.state_in_prompt else "actions are relative to it"
            raise RequestError(
                "robot_state is missing", why, "send the joint values", field="robot_state", code="missing_field"
            )
        state = np.array(params.robot_state, dtype=np.float64)
        self._check_length(len(state))
        return state_to_model(state) if deployment.mirrors else state

    def _reads_state(self, params: Params) -> bool:
        """Whether the request needs a state."""
        deployment = self._deployment
        return deployment.state_in_prompt or (bool(deployment.is_delta) and not self._is_normalized(params))

    def _check_length(self, count: int) -> None:
        robot, moments = self._deployment.robot, self._state_moments
        if robot is not None:
            allowed, fits = f"{robot.state} values ({robot.name})", count == robot.state
        else:
            most = min(ACTION_WIDTH, len(moments) if moments is not None else ACTION_WIDTH)
            allowed, fits = f"1 to {most} values", 1 <= count <= most
        if not fits:
            raise RequestError(
                f"robot_state has {count} values, allowed are {allowed}",
                hint="send what the robot reports",
                field="robot_state",
                value=str(count),
                allowed=allowed,
            )

    def _ids(self, text: str | None, state: Values | None, warnings: list[str]) -> list[int]:
        words = (text or "").strip() or (self._deployment.default_prompt or "").strip()
        if not words:
            code = "missing_field" if text is None else "invalid_value"
            raise RequestError(
                "text is empty", "it must contain an instruction", "send an instruction", field="text", code=code
            )
        shown = state if self._deployment.state_in_prompt else None
        if shown is not None:
            shown = shown if self._state_moments is None else normalise(shown, self._state_moments)
            shown = np.pad(shown, (0, ACTION_WIDTH - len(shown))) if self._deployment.pads_state else shown
        elif state is not None and not self._deployment.is_delta:
            warnings.append("robot_state has no effect: this deployment's prompt does not contain it")
        ids = self.tokenizer.encode(pieces(words, shown))
        most = self._sizes.prompt_ids
        if len(ids) > most:
            warnings.append(f"the prompt was truncated from {len(ids)} to {most} ids")
        return ids[:most]

    # -- actions --------------------------------------------------------------------------------------------------

    def _check_steps(self, params: Params) -> None:
        most = self._deployment.max_num_steps
        if params.num_steps > most:
            raise RequestError(
                f"num_steps is {params.num_steps}, this deployment takes up to {most}",
                hint="send a smaller value, or start the deployment with a higher max_num_steps",
                field="num_steps",
                value=str(params.num_steps),
                allowed=f"1 to {most}",
            )

    def _is_normalized(self, params: Params) -> bool:
        return self._action_moments is None if params.return_normalized is None else params.return_normalized

    def _lines(self, params: Params, state: Values | None, warnings: list[str]) -> tuple[Floats, Floats]:
        """Return factor and term of every action value: float32 [horizon, 32] each, read-only."""
        if self._is_normalized(params):
            if self._action_moments is None:
                warnings.append("this deployment has no statistics: actions are in the model's normalised units")
            return self._plans(np.ones(ACTION_WIDTH), np.zeros(ACTION_WIDTH))
        if self._action_moments is None:
            raise RequestError(
                "return_normalized is false and the deployment has no statistics of actions",
                hint="omit it, or start the deployment with norm_stats",
                field="return_normalized",
                value="false",
                allowed="true",
            )
        if self._deployment.is_delta:
            return self._plans(*as_lines(self._action_moments, state, self._deployment))
        if self._robot_lines is None:  # independent of the state
            self._robot_lines = self._plans(*as_lines(self._action_moments, None, self._deployment))
        return self._robot_lines

    def _plans(self, factor: Values, term: Values) -> tuple[Floats, Floats]:
        plan = (self._horizon, ACTION_WIDTH)
        scale, offset = (np.broadcast_to(line.astype(np.float32), plan).copy() for line in (factor, term))
        return scale, offset

    def _noise(self, params: Params, seed: int) -> np.ndarray:
        """Return the flow's start, float32 [horizon, 32]: the client's noise, or noise from the request's seed."""
        if params.noise is None:
            chosen = params.seed if params.seed is not None else seed
            return np.random.default_rng(chosen).standard_normal((self._horizon, ACTION_WIDTH), dtype=np.float32)
        if len(params.noise) != self._horizon:
            raise RequestError(
                f"noise has {len(params.noise)} rows, the horizon is {self._horizon}",
                hint="send one row per action step",
                field="noise",
                value=str(len(params.noise)),
                allowed=f"[{self._horizon}, {ACTION_WIDTH}]",
            )
        return np.array(params.noise, dtype=np.float32)
