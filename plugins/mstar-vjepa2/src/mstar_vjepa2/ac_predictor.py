"""The action-conditioned predictor behind the node `ac_predictor`. Run by the KV engine, one frame per row and pass.

A frame is its action, its state, its camera where one is used, and its patches. They see each other and all earlier
frames, so a pass attends without a mask and appends a whole frame. What was appended is never changed: frames behind
do not reach it, and rotary positions are absolute.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import linear

from mstar_core.errors import EngineError
from mstar_vjepa2.blocks import stack
from mstar_vjepa2.encoder import latents_of
from mstar_vjepa2.params import POSE
from mstar_vjepa2.poses import moved
from mstar_vjepa2.rotary import Rotary3D

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.kv_view import KVView
    from mstar_vjepa2.facts import ActionFacts

CAMERA: Final = 6
"""Values of a camera pose."""

FRAME_RANK: Final = 3
"""Dimensions of one row's frame, [1, patches, width]; with one more, rows lie on the first axis. So for every port."""


class ActionPredictor(nn.Module):
    """The next frame of every row from this one, its action and state, and the frames in its cache."""

    row: Tensor
    column: Tensor

    def __init__(self, facts: ActionFacts) -> None:
        super().__init__()
        own, encoder = facts.predictor, facts.encoder
        self.patches, self.conditions = encoder.frame_tokens, facts.conditions
        self.uses_extrinsics = facts.uses_extrinsics
        self.predictor_embed = nn.Linear(encoder.vit.width, own.width)
        self.action_encoder, self.state_encoder = nn.Linear(POSE, own.width), nn.Linear(POSE, own.width)
        self.extrinsics_encoder = nn.Linear(CAMERA, own.width)  # in the released file too, which does not use it
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
        frame: Tensor | None = None,
        state: Tensor | None = None,
        actions: Tensor | None = None,
        states: Tensor | None = None,
        extrinsics: Tensor | None = None,
        given_frames: Tensor | None = None,
        given_actions: Tensor | None = None,
        given_states: Tensor | None = None,
        given_extrinsics: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """One frame of each row, all tokens packed.

        positions: int64 [R * frame_tokens], the frame's time at each of its tokens. normalize_reps, step: a number for
        each token. Either frame float32 [1, S, width] with state [7] (or `states` [h, 7], one for each step) and
        actions [h, 7], or given_frames [h, S, width] with given_states and given_actions [h, 7]; `step` says which.
        extrinsics [h, 6]: only where the checkpoint uses them. Each may have rows on a further first axis; a value
        without one is every row's. Returns next_frame float32 [1, S, width] and next_state float32 [7], with that
        axis when anything had it.
        """
        rows = positions.numel() // self.frame_tokens
        at = None if step is None else self._per_row(step, rows)
        if given_frames is not None:
            assert given_actions is not None and given_states is not None
            latents = _chosen(given_frames, at, rows, FRAME_RANK)
            moves, poses, cameras = given_actions, given_states, given_extrinsics
            has_rows = rows > 1 or given_frames.dim() > FRAME_RANK
        else:
            assert frame is not None and state is not None and actions is not None
            latents = _chosen(frame, None, rows, FRAME_RANK)
            moves, poses, cameras = actions, state[..., None, :] if states is None else states, extrinsics
            has_rows = rows > 1 or any(
                each is not None and each.dim() > rank
                for each, rank in ((frame, FRAME_RANK), (state, 1), (actions, 2), (states, 2))
            )
        action = _chosen(moves, at, rows, 2)
        own = _chosen(poses, None if given_frames is None and states is None else at, rows, 2)
        camera = None if cameras is None else _chosen(cameras, at, rows, 2)
        x = self.embed(latents, action, own, camera)
        x = self.run(x, positions, kv)
        following = latents_of(self.predicted(x), self._per_row(normalize_reps, rows))[:, None]
        after = moved(own.float(), action)
        if not has_rows:
            return {"next_frame": following[0], "next_state": after[0]}
        return {"next_frame": following, "next_state": after}

    def embed(self, latents: Tensor, action: Tensor, state: Tensor, camera: Tensor | None) -> Tensor:
        """Tokens of frames [R * frame_tokens, P]: action, state, camera, patches row by row.

        latents: [R, S, width]; action, state: [R, 7]; camera: [R, 6].
        """
        pairs = [(self.action_encoder, action), (self.state_encoder, state)]
        if self.uses_extrinsics:
            assert camera is not None
            pairs.append((self.extrinsics_encoder, camera))
        dtype = self.predictor_embed.weight.dtype
        # In float32: a bfloat16 state would be rounded to millimetres.
        made = [linear(value.float(), layer.weight.float(), layer.bias.float()).to(dtype) for layer, value in pairs]
        parts = [*(each[:, None] for each in made), self.predictor_embed(latents.to(dtype))]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def run(self, x: Tensor, positions: Tensor, kv: KVView) -> Tensor:
        """All blocks. x: [R * frame_tokens, P]; positions: int64 [R * frame_tokens]. Returns x's shape."""
        rows = positions.numel() // self.frame_tokens
        rotation = self.rotary(positions, self.row.repeat(rows), self.column.repeat(rows))
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, partial(kv.attend, layer))
        return x

    def predicted(self, x: Tensor) -> Tensor:
        """The patches of the frame behind each, [R, S, width], as the last layer gives them."""
        patches = x.view(-1, self.frame_tokens, x.shape[-1])[:, self.conditions :]
        out: Tensor = self.proj(self.norm(patches))
        return out

    def _per_row(self, numbers: Tensor, rows: int) -> Tensor:
        """One of the numbers that a row's tokens share: [R]."""
        return numbers.expand(rows * self.frame_tokens).view(rows, -1)[:, 0]


def _chosen(value: Tensor, at: Tensor | None, rows: int, rank: int) -> Tensor:
    """Each row's entry of a list. value: [h, ...] of that rank, or with rows in front; at: int64 [R], None = first."""
    each = value if value.dim() > rank else value.expand(rows, *value.shape)
    if len(each) != rows:
        raise EngineError(
            f"node ac_predictor got values of {len(each)} rows in a step of {rows}",
            f"shape {list(value.shape)}, {rank} dimensions without rows",
            "candidates are rows of the step that computes them",
            node="ac_predictor",
        )
    if at is None:
        return each[:, 0]
    return each[torch.arange(rows, device=each.device), at]
