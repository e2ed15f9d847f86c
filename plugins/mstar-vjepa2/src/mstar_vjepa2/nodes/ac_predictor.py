"""The action-conditioned predictor of the node `ac_predictor`. Run by the KV engine, one frame per sequence and pass.

A frame consists of its action, its state, its camera if one is used, and its patches. Its tokens attend to each other
and to all earlier frames, so a pass attends without a mask and appends a whole frame. Cached frames never change:
attention is frame-causal and rotary positions are absolute.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Final, Union

import torch
from torch import nn

from mstar_core.engine.module import NodeModule
from mstar_core.errors import EngineError
from mstar_core.layers.kv_view import AppendOnlyView
from mstar_vjepa2.nodes.blocks import Block, MixCached, attend_all, stack, sum_norm
from mstar_vjepa2.nodes.encoder import LATENT_EPS, latents_of
from mstar_vjepa2.nodes.linear import Branch, branch_of, linear_into
from mstar_vjepa2.nodes.poses import moved
from mstar_vjepa2.nodes.rotary import Rotary3D, Rotation
from mstar_vjepa2.params import MOST_SAMPLES, POSE

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_core.layers.kv_view import KVView
    from mstar_vjepa2.checkpoint.config import ActionConfig

CAMERA: Final = 6
"""Values of a camera pose."""

FRAME_RANK: Final = 3
"""Dimensions of one frame, [1, patches, width]. A value with one more has the sequences on the first axis."""

POSE_RANK: Final = 1
"""Dimensions of one state."""

PerSequence = Union["Tensor", list["Tensor"]]
"""A port's value: shared by all sequences, one per sequence on a first axis, or a list of one per sequence."""


class ActionPredictor(nn.Module, NodeModule):
    """Predictor of the next frame of each sequence from its current frame, action and state, and its cached frames."""

    streamed_outputs = ("next_frame", "next_state")  # the loop's last outputs may feed the scorer

    row: Tensor
    column: Tensor

    def __init__(self, config: ActionConfig) -> None:
        super().__init__()
        sizes, encoder = config.predictor, config.encoder
        self.patches, self.conditions = encoder.frame_tokens, config.conditions
        self.uses_extrinsics = config.uses_extrinsics
        self._inner = sizes.inner
        self.predictor_embed = nn.Linear(encoder.vit.width, sizes.width)
        # float32 in any model dtype: bfloat16 would round a state to millimetres.
        self.action_encoder = nn.Linear(POSE, sizes.width, dtype=torch.float32)
        self.state_encoder = nn.Linear(POSE, sizes.width, dtype=torch.float32)
        # The released file contains it too and does not use it.
        self.extrinsics_encoder = nn.Linear(CAMERA, sizes.width, dtype=torch.float32)
        self.blocks = stack(sizes)
        self.norm = nn.LayerNorm(sizes.width, sizes.eps)
        self.proj = nn.Linear(sizes.width, encoder.vit.width)
        self.rotary = Rotary3D(sizes.width // sizes.heads)
        # Rotation by 0 is the identity: conditions are rotated in time only, like a patch at row 0, column 0.
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
        frame: PerSequence | None = None,
        state: PerSequence | None = None,
        actions: PerSequence | None = None,
        states: PerSequence | None = None,
        extrinsics: PerSequence | None = None,
        given_frames: PerSequence | None = None,
        given_actions: PerSequence | None = None,
        given_states: PerSequence | None = None,
        given_extrinsics: PerSequence | None = None,
    ) -> dict[str, Tensor]:
        """Run one frame of each sequence, all tokens packed.

        positions: int64 [R * frame_tokens], the time step of each token. normalize_reps, step: one number per token.
        Either frame float32 [1, S, width] with state [7] (or `states` [h, 7], one per step) and actions [h, 7], or
        given_frames [h, S, width] with given_states and given_actions [h, 7], indexed by `step`. extrinsics [h, 6]:
        only for checkpoints that use them. Each value may have sequences on an additional first axis, or be a list of
        one tensor per sequence if lengths differ; otherwise all sequences share it. Returns next_frame float32 [R, 1,
        S, width] and next_state float32 [R, 7].
        """
        sequences = positions.numel() // self.frame_tokens
        at = None if step is None else self._per_sequence(step, sequences)
        if given_frames is not None:
            assert given_actions is not None and given_states is not None
            latents = _chosen(given_frames, at, sequences, FRAME_RANK)
            moves, cameras = given_actions, given_extrinsics
            pose = _chosen(given_states, at, sequences, POSE_RANK + 1)
        else:
            assert frame is not None and state is not None and actions is not None
            latents = _chosen(frame, None, sequences, FRAME_RANK)
            moves, cameras = actions, extrinsics
            pose = (
                _each(state, sequences, POSE_RANK) if states is None else _chosen(states, at, sequences, POSE_RANK + 1)
            )
        action = _chosen(moves, at, sequences, POSE_RANK + 1)
        camera = None if cameras is None else _chosen(cameras, at, sequences, POSE_RANK + 1)
        x, rotation, next_state = self.begin(latents, action, pose, camera, positions)
        if isinstance(kv, AppendOnlyView):
            self.keep(x, rotation, kv.inner)
            return {}
        following = self.end(self.run(x, rotation, kv), self._per_sequence(normalize_reps, sequences))[:, None]
        return {"next_frame": following, "next_state": next_state}

    def working_bytes(self, tokens: int) -> int:
        """See NodeModule. Returns the bytes of a plan's candidate frames in float32 and of one pass over `tokens`
        tokens.

        A pass holds the residual stream, its branch, and the larger side of an MLP (QKV and attention are smaller), and
        the frames that enter and leave it.
        """
        width, inner = self.predictor_embed.out_features, self._inner
        value_bytes = self.predictor_embed.weight.element_size()
        latent_bytes = self.predictor_embed.in_features * (torch.float32.itemsize + value_bytes)
        frames = MOST_SAMPLES * self.patches * self.predictor_embed.in_features * torch.float32.itemsize
        return frames + tokens * ((2 * width + 2 * inner) * value_bytes + 2 * latent_bytes)

    def trace(self, compiling: Compiling) -> None:
        """Run the kernels of one frame."""
        self.warm_up()

    def warm_up(self) -> None:
        """Run one frame without a cache, so that kernels are compiled and loaded before the first request."""
        device, width = self.row.device, self.predictor_embed.in_features
        pose = torch.zeros(POSE, device=device)
        number = torch.zeros(self.frame_tokens, dtype=torch.int64, device=device)
        frame = torch.zeros(1, self.patches, width, device=device)
        cameras = torch.zeros(1, CAMERA, device=device) if self.uses_extrinsics else None
        self.forward(
            kv=_Alone(),
            positions=number,
            normalize_reps=number,
            step=number,
            frame=frame,
            state=pose,
            actions=pose[None],
            extrinsics=cameras,
        )

    def begin(
        self, latents: Tensor, action: Tensor, state: Tensor, camera: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Rotation, Tensor]:
        """Return the tokens [R * frame_tokens, P], their rotation and the next states.

        The tokens of a frame are action, state, camera, then patches. latents: [R, S, width]; action, state: [R, 7];
        camera: [R, 6]; positions: int64 [R * frame_tokens].
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
        embedded = [layer(value).to(dtype) for layer, value in pairs]
        x = torch.cat([*(token[:, None] for token in embedded), self.predictor_embed(latents.to(dtype))], dim=1)
        row, column = (ids.expand(len(latents), -1).reshape(-1) for ids in (self.row, self.column))
        return x.flatten(0, 1), self.rotary(positions, row, column), moved(state.float(), action)

    def run(self, x: Tensor, rotation: Rotation, kv: KVView) -> Tensor:
        """Run all blocks and the final norm. x: [R * frame_tokens, P]. Returns x's shape."""
        return sum_norm(*self._through(x, rotation, kv, len(self.blocks)), self.norm)[1]

    def keep(self, x: Tensor, rotation: Rotation, kv: KVView) -> None:
        """Append frames without computing outputs: the last block computes keys and values only. x: as for `run`."""
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

    def end(self, normed: Tensor, is_needed: Tensor) -> Tensor:
        """Return the patches of the next frames as latents, float32 [R, S, width].

        normed: the result of `run`; is_needed: [R], whether latents are normalised.
        """
        tokens = normed.view(len(is_needed), self.frame_tokens, normed.shape[-1])
        if not normed.is_cuda:
            return latents_of(self.proj(tokens[:, self.conditions :]), is_needed)
        if len(is_needed) == 1:
            tokens = tokens[:, self.conditions :]  # for several sequences this is a copy: the kernel skips them instead
        branch = branch_of(tokens.flatten(0, 1), self.proj)
        values = branch.values.view(-1, *tokens.shape[:2], self.proj.out_features)
        skip = tokens.shape[1] - self.patches
        latents: Tensor = _kernels().latents(values, branch.bias, is_needed, LATENT_EPS, skip)
        return latents

    def _per_sequence(self, numbers: Tensor, sequences: int) -> Tensor:
        """Return the number that the tokens of each sequence share: [R]."""
        return numbers.expand(sequences * self.frame_tokens).view(sequences, -1)[:, 0]


def _kernels() -> ModuleType:
    """Import the Triton kernels. Triton comes with CUDA builds of torch only."""
    return importlib.import_module("mstar_vjepa2.kernels.embed_head")


class _Alone:
    """KV view of a single frame without a cache."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Attend to this frame alone."""
        assert scale is None
        return attend_all(query[None], key[None], value[None])[0]


def _chosen(value: PerSequence, at: Tensor | None, sequences: int, rank: int) -> Tensor:
    """Return one list entry per sequence, [R, ...]. value: as for `_each`; at: int64 [R], None = first entry.

    A list of one entry is already the entry of the sequence's step.
    """
    if isinstance(value, list):
        return _from_lists(value, at, sequences, rank)
    values = _each(value, sequences, rank)
    if at is None or values.shape[1] == 1:
        return values[:, 0]
    return values[torch.arange(sequences, device=values.device), at]


def _each(value: PerSequence, sequences: int, rank: int) -> Tensor:
    """Return one value per sequence, [R, ...]. value: shared, of `rank` dimensions, or with sequences in front."""
    if isinstance(value, list):
        value = torch.stack(value)
    values = value if value.dim() > rank else value.expand(sequences, *value.shape)
    if len(values) != sequences:
        raise _wrong_count(len(values), sequences, f"shape {list(value.shape)}, {rank} dimensions without sequences")
    return values


def _from_lists(values: list[Tensor], at: Tensor | None, sequences: int, rank: int) -> Tensor:
    """Return one entry per sequence from lists of different lengths, by one lookup in their concatenation."""
    if len(values) != sequences or any(value.dim() != rank for value in values):
        raise _wrong_count(len(values), sequences, f"shapes {[list(value.shape) for value in values]}")
    lengths = [0, *(len(value) for value in values[:-1])]
    starts = torch.tensor(lengths).cumsum(0).to(values[0].device, non_blocking=True)
    return torch.cat(values).index_select(0, starts if at is None else starts + at)


def _wrong_count(count: int, sequences: int, detail: str) -> EngineError:
    return EngineError(
        f"node ac_predictor got values of {count} sequences in a step of {sequences}",
        detail,
        "each candidate is a sequence of the step that computes it",
        node="ac_predictor",
    )
