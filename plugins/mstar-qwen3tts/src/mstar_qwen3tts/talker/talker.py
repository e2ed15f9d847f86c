"""Talker: the speech model, with its code predictor. Run by the KV engine.

One decode step completes the frame of the last code 0, reads that frame with the next text id, and leaves the hidden
state from which the engine draws the next code 0. No part of it synchronizes with the host.
Modules are nested like the checkpoint's keys without the prefix `talker.` (specification sections 6 to 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn.functional import silu

from mstar_core.layers import (
    AttentionSpec,
    CodePredictor,
    CodePredictorSpec,
    DecoderBlock,
    Head,
    RMSNorm,
    Rotary,
    RotarySpec,
    TokenEmbedding,
)
from mstar_core.layers.linear import LinearWeight, project, uses_fused_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView
    from mstar_qwen3tts.checkpoint.config import DecoderSizes, TTSConfig


class Projection(nn.Module):
    """Text column: Linear, SiLU, Linear, both with bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(inputs, inputs)
        self.linear_fc2 = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, outputs]. x: [n, inputs]."""
        return _linear(self.linear_fc2, silu(_linear(self.linear_fc1, x)))


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    if x.is_cuda and uses_fused_kernels(x):
        return project(x, LinearWeight(layer.weight)) + layer.bias
    out: Tensor = layer(x)
    return out


class TalkerDecoder(nn.Module):
    """Input vectors to normalized hidden states, and the embeddings of text and of code group 0."""

    def __init__(self, config: TTSConfig) -> None:
        super().__init__()
        sizes = config.talker
        self.text_embedding = TokenEmbedding(config.text_vocab, config.text_width)
        self.codec_embedding = TokenEmbedding(sizes.vocab, sizes.width)
        spec = AttentionSpec(
            width=sizes.width,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            norm_eps=sizes.norm_eps,
        )
        self.layers = nn.ModuleList(
            DecoderBlock(spec, sizes.mlp, layer, sizes.norm_eps) for layer in range(sizes.layers)
        )
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        # The three streams of positions of the config are always equal, so that rotation is one-dimensional.
        self.rotary = Rotary(RotarySpec(width=sizes.head_dim, base=sizes.rope_base))

    def forward(self, x: Tensor, positions: Tensor, kv: KVView) -> Tensor:
        """Return [T, width]. x: [T, width]; positions: [T]."""
        rotation = self.rotary(positions)
        blocks = cast("list[DecoderBlock]", list(self.layers))
        norms = [*(block.input_layernorm for block in blocks), self.norm]
        normed: Tensor = norms[0](x)
        for block, next_norm in zip(blocks, norms[1:], strict=True):
            x, normed = block.forward_chained(x, normed, kv, rotation, next_norm)
        return normed


class Talker(nn.Module):
    """Rows of a prompt and ids of text to frames of codes."""

    known_ports = ("frame",)

    def __init__(self, config: TTSConfig) -> None:
        super().__init__()
        self.groups, self.eos, self.tts_pad = config.groups, config.codes.eos, config.ids.tts_pad
        self.model = TalkerDecoder(config)
        self.text_projection = Projection(config.text_width, config.talker.width)
        self.codec_head = Head(config.talker.width, config.talker.vocab)
        self.code_predictor = CodePredictor(predictor_spec(config.predictor, config.groups, config.talker.width))

    def forward(
        self,
        *,
        kv: KVView,
        positions: Tensor,
        prompt: Tensor | None = None,
        embeds: Tensor | None = None,
        ignore_eos: Tensor | None = None,
        code0: Tensor | None = None,
        text: Tensor | None = None,
        last_hidden: Tensor | None = None,
        begun: Tensor | None = None,
        random: Tensor | None = None,
        subtalker_temperature: Tensor | None = None,
        subtalker_top_k: Tensor | None = None,
        subtalker_top_p: Tensor | None = None,
        known: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run a prompt pass or one decode step. Returns {"hidden": [T, width + 1], ...}.

        The last value of `hidden` tells the head whether the end of speech may not be drawn.
        Prompt pass: prompt int64 [T, 1 + groups], see `request.prompt`; embeds [T, width] are added; also returns
        last_hidden [T, width] and begun bool [T, 1], false. Decode, one token per sequence: code0 int64 [B]; text
        int64 [B], -1 after the last id; last_hidden and begun as returned before; random float32 [B, groups - 1] in
        [0, 1); the predictor's sampling, [B] each. Also returns frame int64 [B, groups], last_hidden and begun, true.
        Known iterations of one sequence: known int64 [T, groups], their frames, and text int64 [T].
        ignore_eos: bool [T] or [B].
        """
        frame = None
        if prompt is not None:
            x = self.prompt_vectors(prompt)
            if embeds is not None:
                x = x + embeds.to(x.dtype)
            before = torch.zeros((len(x), 1), dtype=torch.bool, device=x.device)
            after = before
        else:
            assert text is not None and begun is not None
            if known is not None:
                frame = known
                before = torch.ones((len(known), 1), dtype=torch.bool, device=known.device)
                before[:1] = begun.view(1, 1)
            else:
                assert code0 is not None and last_hidden is not None and random is not None
                assert subtalker_temperature is not None and subtalker_top_k is not None
                assert subtalker_top_p is not None
                count = len(last_hidden)
                rule = (each.view(count) for each in (subtalker_temperature, subtalker_top_k, subtalker_top_p))
                frame = self.predict(last_hidden, code0.view(count), random, *rule)
                before = begun.view(count, 1)
            x = self.frame_vectors(frame) + self.project_text(torch.where(text < 0, self.tts_pad, text).flatten())
            frame, after = frame.clamp(min=0), torch.ones_like(before)
        hidden = self.model(x, positions, kv)
        # The first two ids are never the end (section 9): the id after a prompt, and that of the first step.
        is_barred = ~before
        if ignore_eos is not None:
            is_barred = is_barred | ignore_eos.bool().view(-1, 1)
        found = {
            "hidden": torch.cat([hidden, is_barred.to(hidden.dtype)], dim=1),
            "last_hidden": hidden,
            "begun": after,
        }
        return found if frame is None else {**found, "frame": frame}

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits of code group 0, float32 [n, vocab]. hidden: [n, width + 1], see `forward`."""
        logits: Tensor = self.codec_head(hidden[:, :-1].contiguous()).float()
        logits[:, self.eos].masked_fill_(hidden[:, -1] > 0, -torch.inf)
        return logits

    def predict(
        self, last_hidden: Tensor, code0: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
    ) -> Tensor:
        """Return the frame of each code 0: int64 [B, groups]. A code is BAD_ROW where its logits are not finite."""
        first = self.model.codec_embedding(code0.clamp(min=0))
        rest = self.code_predictor.predict(last_hidden, first, uniform, temperature, top_k, top_p)
        return torch.cat([code0[:, None], rest], dim=1)

    def frame_vectors(self, frame: Tensor) -> Tensor:
        """Return the sum of the embeddings of all codes of each frame: [B, width]. NaN for a frame with a BAD_ROW."""
        codes = frame.clamp(min=0)
        total = self.model.codec_embedding(codes[:, 0]) + self.code_predictor.model.sum_embeddings(codes[:, 1:])
        return torch.where(frame.amin(dim=1, keepdim=True) < 0, torch.nan, total)

    def prompt_vectors(self, prompt: Tensor) -> Tensor:
        """Return the vectors of a prompt: [T, width]. prompt: int64 [T, 1 + groups], -1 where a row has no code."""
        x, codes = self.project_text(prompt[:, 0].contiguous()), prompt[:, 1:]
        present, codes = codes >= 0, codes.clamp(min=0)
        x = x + self.model.codec_embedding(codes[:, 0]) * present[:, :1]
        rest = self.code_predictor.model.sum_embeddings(codes[:, 1:])
        # Codes of the groups above 0 stand in rows of a recording, and there all of them do.
        total: Tensor = x + rest * present[:, 1:2]
        return total

    def project_text(self, ids: Tensor) -> Tensor:
        """Return T(ids) of section 6: [n, width]. ids: int64 [n]."""
        projected: Tensor = self.text_projection(self.model.text_embedding(ids))
        return projected


def predictor_spec(sizes: DecoderSizes, groups: int, width: int) -> CodePredictorSpec:
    """Return the code predictor of a checkpoint (section 8). width: of the talker."""
    return CodePredictorSpec(
        vocab=sizes.vocab,
        width=sizes.width,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        mlp=sizes.mlp,
        groups=groups,
        input_width=width,
        rope_base=sizes.rope_base,
        norm_eps=sizes.norm_eps,
    )
