"""The action-conditioned predictor behind the node `ac_predictor`. Run by the KV engine, one frame per row and pass.

A frame is its action, its state, its camera where one is used, and its patches. They see each other and all earlier
frames, so a pass attends without a mask and appends a whole frame. What was appended is never changed: frames behind
do not reach it, and rotary positions are absolute.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Final, Union

import torch
from torch import nn

from mstar_core.errors import EngineError
from mstar_core.layers.kv_view import SilentView
from mstar_vjepa2.nodes.blocks import Block, MixCached, attend_all, stack, sum_norm
from mstar_vjepa2.nodes.encoder import LATENT_EPS, latents_of
from mstar_vjepa2.nodes.linear import Branch, branch_of, linear_into
from mstar_vjepa2.nodes.poses import moved
from mstar_vjepa2.nodes.rotary import Rotary3D, Rotation
from mstar_vjepa2.params import MOST_SAMPLES, POSE

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView
    from mstar_vjepa2.checkpoint.config import ActionConfig

CAMERA: Final = 6
"""Values of a camera pose."""

FRAME_RANK: Final = 3
"""Dimensions of one row's frame, [1, patches, width]; with one more, rows lie on the first axis. So for every port."""

POSE_RANK: Final = 1
"""Dimensions of one state."""

Rows = Union["Tensor", list["Tensor"]]
"""A port's value: every row's, one for each row on a first axis, or a list of one for each row."""


class ActionPredictor(nn.Module):
    """The next frame of every row from this one, its action and state, and the frames in its cache."""

    streamed_outputs: Final = ("next_frame", "next_state")  # what a loop ends with may go on to the scorer

    row: Tensor
    column: Tensor

    def __init__(self, config: ActionConfig) -> None:
        super().__init__()
        own, encoder = config.predictor, config.encoder
        self.patches, self.conditions = encoder.frame_tokens, config.conditions
        self.uses_extrinsics = config.uses_extrinsics
        self._inner = own.inner
        self.predictor_embed = nn.Linear(encoder.vit.width, own.width)
        # In float32 whatever the model's dtype: a bfloat16 state would be rounded to millimetres.
        self.action_encoder = nn.Linear(POSE, own.width, dtype=torch.float32)
        self.state_encoder = nn.Linear(POSE, own.width, dtype=torch.float32)
        # In the released file too, which does not use it.
        self.extrinsics_encoder = nn.Linear(CAMERA, own.width, dtype=torch.float32)
        self.blocks = stack(own)
        self.norm = nn.LayerNorm(own.width, own.eps)
        self.proj = nn.Linear(own.width, encoder.vit.width)
        self.rotary = Rotary3D(own.width // own.heads)
        # Turning by 0 changes nothing: a condition is rotated in time alone, like a patch in the corner.
        ids = torch.cat([torch.zeros(self.conditions, dtype=torch.int64), torch.arange(self.patches)])
        self.register_buffer("row", ids // encoder.grid, persistent=False)
        self.register_buffer("column", ids % encoder.grid, persistent=False)

    @property
    def frame_tokens(self) -> int:
        """Tokens of one frame."""
        return self.conditions + self.patches

    def forward(
        self,
        *,
        kv: KVView,
        positions: Tensor,
        normalize_reps: Tensor,
        step: Tensor | None = None,
        frame: Rows | None = None,
        state: Rows | None = None,
        actions: Rows | None = None,
        states: Rows | None = None,
        extrinsics: Rows | None = None,
        given_frames: Rows | None = None,
        given_actions: Rows | None = None,
        given_states: Rows | None = None,
        given_extrinsics: Rows | None = None,
    ) -> dict[str, Tensor]:
        """One frame of each row, all tokens packed.

        positions: int64 [R * frame_tokens], the frame's time at each of its tokens. normalize_reps, step: a number for
        each token. Either frame float32 [1, S, width] with state [7] (or `states` [h, 7], one for each step) and
        actions [h, 7], or given_frames [h, S, width] with given_states and given_actions [h, 7]; `step` says which.
        extrinsics [h, 6]: only where the checkpoint uses them. Each has rows on a further first axis, or is a list of
        one tensor per row where lengths differ; a value without that axis is every row's. Returns next_frame float32
        [R, 1, S, width] and next_state float32 [R, 7].
        """
        rows = positions.numel() // self.frame_tokens
        at = None if step is None else self._per_row(step, rows)
        if given_frames is not None:
            assert given_actions is not None and given_states is not None
            latents = _chosen(given_frames, at, rows, FRAME_RANK)
            moves, cameras = given_actions, given_extrinsics
            own = _chosen(given_states, at, rows, POSE_RANK + 1)
        else:
            assert frame is not None and state is not None and actions is not None
            latents = _chosen(frame, None, rows, FRAME_RANK)
            moves, cameras = actions, extrinsics
            own = _each(state, rows, POSE_RANK) if states is None else _chosen(states, at, rows, POSE_RANK + 1)
        action = _chosen(moves, at, rows, POSE_RANK + 1)
        camera = None if cameras is None else _chosen(cameras, at, rows, POSE_RANK + 1)
        x, rotation, next_state = self.begin(latents, action, own, camera, positions)
        if isinstance(kv, SilentView):
            self.keep(x, rotation, kv)
            return {}
        following = self.end(self.run(x, rotation, kv), self._per_row(normalize_reps, rows))[:, None]
        return {"next_frame": following, "next_state": next_state}

    def working_bytes(self, tokens: int) -> int:
        """See NeedsMemory: the frames of a plan's candidates, in float32, and what one pass of so many tokens computes.

        A pass holds its residual, the branch behind it, and the larger of an MLP's two sides (joined projections and
        attention are smaller); its frames come in and leave beside that.
        """
        width, inner = self.predictor_embed.out_features, self._inner
        value_bytes = self.predictor_embed.weight.element_size()
        latent_bytes = self.predictor_embed.in_features * (torch.float32.itemsize + value_bytes)
        frames = MOST_SAMPLES * self.patches * self.predictor_embed.in_features * torch.float32.itemsize
        return frames + tokens * ((2 * width + 2 * inner) * value_bytes + 2 * latent_bytes)

    def warm_up(self) -> None:
        """Run one frame without a cache, so that kernels are compiled and loaded before the first request."""
        device, width = self.row.device, self.predictor_embed.in_features
        pose = torch.zeros(POSE, device=device)
        number = torch.zeros(self.frame_tokens, dtype=torch.int64, device=device)
        frame = torch.zeros(1, self.patches, width, device=device)
        cameras = torch.zeros(1, CAMERA, device=device) if self.uses_extrinsics else None
        self.forward(
            kv=_Alone(), positions=number, normalize_reps=number, step=number, frame=frame, state=pose,
            actions=pose[None], extrinsics=cameras,
        )  # fmt: skip

    def begin(
        self, latents: Tensor, action: Tensor, state: Tensor, camera: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Rotation, Tensor]:
        """Tokens of frames [R * frame_tokens, P], action, state, camera, patches row by row; rotation; next states.

        latents: [R, S, width]; action, state: [R, 7]; camera: [R, 6]; positions: int64 [R * frame_tokens].
        """
        pairs = [(self.action_encoder, action.float()), (self.state_encoder, state.float())]
        if self.uses_extrinsics:
            assert camera is not None
            pairs.append((self.extrinsics_encoder, camera.float()))
        dtype = self.predictor_embed.weight.dtype
        if latents.is_cuda:
            begun = _kernels().embed_frame(latents, pairs, positions, (self.row, self.column), self.rotary, dtype)
            linear_into(begun.x[:, len(pairs) :], begun.given, self.predictor_embed)
            return begun.x.flatten(0, 1), begun.rotation, begun.next_state
        made = [layer(value).to(dtype) for layer, value in pairs]
        x = torch.cat([*(each[:, None] for each in made), self.predictor_embed(latents.to(dtype))], dim=1)
        row, column = (each.expand(len(latents), -1).reshape(-1) for each in (self.row, self.column))
        return x.flatten(0, 1), self.rotary(positions, row, column), moved(state.float(), action)

    def run(self, x: Tensor, rotation: Rotation, kv: KVView) -> Tensor:
        """All blocks and the norm. x: [R * frame_tokens, P], with the rotation of all. Returns x's shape."""
        return sum_norm(*self._through(x, rotation, kv, len(self.blocks)), self.norm)[1]

    def keep(self, x: Tensor, rotation: Rotation, kv: KVView) -> None:
        """Append frames of which nothing else is wanted: of the last block keys and values alone. x: as for `run`."""
        layer = len(self.blocks) - 1
        last = self.blocks[layer]
        assert isinstance(last, Block)
        normed = sum_norm(*self._through(x, rotation, kv, layer), last.norm1)[1]
        MixCached(kv, layer).keep(normed, last.attn.qkv, rotation, last.attn.heads)

    def _through(self, x: Tensor, rotation: Rotation, kv: KVView, layers: int) -> tuple[Tensor, Branch | None]:
        branch = None
        for layer, block in enumerate(self.blocks[:layers]):
            x, branch = block(x, branch, rotation, MixCached(kv, layer))
        return x, branch

    def end(self, normed: Tensor, wanted: Tensor) -> Tensor:
        """The patches of the frame behind each as latents, float32 [R, S, width].

        normed: what `run` gives; wanted: [R], whether they are normed.
        """
        tokens = normed.view(len(wanted), self.frame_tokens, normed.shape[-1])
        if not normed.is_cuda:
            return latents_of(self.proj(tokens[:, self.conditions :]), wanted)
        if len(wanted) == 1:
            tokens = tokens[:, self.conditions :]  # of several rows these are apart: the kernel leaves the others out
        branch = branch_of(tokens.flatten(0, 1), self.proj)
        values = branch.values.view(-1, *tokens.shape[:2], self.proj.out_features)
        skip = tokens.shape[1] - self.patches
        made: Tensor = _kernels().latents(values, branch.bias, wanted, LATENT_EPS, skip)
        return made

    def _per_row(self, numbers: Tensor, rows: int) -> Tensor:
        """One of the numbers that a row's tokens share: [R]."""
        return numbers.expand(rows * self.frame_tokens).view(rows, -1)[:, 0]


def _kernels() -> ModuleType:
    """The kernels; importing them needs triton, which only a CUDA build of torch brings."""
    return importlib.import_module("mstar_vjepa2.kernels.embed_head")


class _Alone:
    """The view of a frame that has none before it, and is not kept."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        assert scale is None
        return attend_all(query[None], key[None], value[None])[0]


def _chosen(value: Rows, at: Tensor | None, rows: int, rank: int) -> Tensor:
    """Each row's entry of a list, [R, ...]. value: as `_each` takes it; at: int64 [R], None = first.

    A list of one is that of the row's own step, as the engine cuts it.
    """
    if isinstance(value, list):
        return _from_lists(value, at, rows, rank)
    each = _each(value, rows, rank)
    if at is None or each.shape[1] == 1:
        return each[:, 0]
    return each[torch.arange(rows, device=each.device), at]


def _each(value: Rows, rows: int, rank: int) -> Tensor:
    """One value for each row, [R, ...]. value: [...] of that rank, every row's, or with rows in front."""
    if isinstance(value, list):
        value = torch.stack(value)
    each = value if value.dim() > rank else value.expand(rows, *value.shape)
    if len(each) != rows:
        raise _wrong_rows(len(each), rows, f"shape {list(value.shape)}, {rank} dimensions without rows")
    return each


def _from_lists(values: list[Tensor], at: Tensor | None, rows: int, rank: int) -> Tensor:
    """Entries of lists that differ in length: laid end to end, so that one look-up finds those of all rows."""
    if len(values) != rows or any(value.dim() != rank for value in values):
        raise _wrong_rows(len(values), rows, f"shapes {[list(value.shape) for value in values]}")
    lengths = [0, *(len(value) for value in values[:-1])]
    starts = torch.tensor(lengths).cumsum(0).to(values[0].device, non_blocking=True)
    return torch.cat(values).index_select(0, starts if at is None else starts + at)


def _wrong_rows(found: int, rows: int, detail: str) -> EngineError:
    return EngineError(
        f"node ac_predictor got values of {found} rows in a step of {rows}",
        detail,
        "candidates are rows of the step that computes them",
        node="ac_predictor",
    )
