"""Talker: the mixture-of-experts speech model, with its residual code predictor. Run by the KV engine.

One decode step completes the frame of the last code 0, reads that frame with the next text id, and leaves the hidden
state from which the engine draws the next code 0. No part of it synchronizes with the host.
Modules are nested like the checkpoint's keys without the prefix `talker.`. `text_embedding` is the thinker's table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from mstar_core.errors import WeightsError
from mstar_core.layers import CodePredictor, CodePredictorSpec, Head, RMSNorm, Rotary, TokenEmbedding
from mstar_core.parallel.shards import WHOLE, Shard
from mstar_qwen3omni.params import VOICES
from mstar_qwen3omni.talker.projections import Projection
from mstar_qwen3omni.thinker.thinker import moe_blocks, rotary_spec

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers import DecoderBlock
    from mstar_core.layers.kv_view import KVView
    from mstar_qwen3omni.checkpoint.config import DecoderSizes, OmniConfig


def predictor_spec(sizes: DecoderSizes, groups: int) -> CodePredictorSpec:
    """Return the code predictor of a checkpoint (section 11)."""
    return CodePredictorSpec(
        vocab=sizes.vocab,
        width=sizes.width,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        mlp=sizes.mlp,
        groups=groups,
        rope_base=sizes.rope_base,
        norm_eps=sizes.norm_eps,
    )


class TalkerDecoder(nn.Module):
    """Input vectors to normalized hidden states, and the embedding of code group 0."""

    def __init__(self, sizes: DecoderSizes, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.codec_embedding = TokenEmbedding(sizes.vocab, sizes.width)
        self.layers = nn.ModuleList(moe_blocks(sizes, shard))
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.rotary = Rotary(rotary_spec(sizes))

    def forward(self, x: Tensor, positions: Tensor, kv: KVView) -> Tensor:
        """Return [T, width]. x: [T, width]; positions: [T] or [3, T]."""
        rotation = self.rotary(positions)
        blocks = cast("list[DecoderBlock]", list(self.layers))
        norms = [*(block.input_layernorm for block in blocks), self.norm]
        normed: Tensor = norms[0](x)
        for block, next_norm in zip(blocks, norms[1:], strict=True):
            x, normed = block.forward_chained(x, normed, kv, rotation, next_norm)
        return normed


class Talker(nn.Module):
    """User's turns and generated text ids to frames of codes (sections 10 and 11).

    shard: the blocks of the talker are divided among the ranks of a group. Embeddings, projections, head and code
    predictor are small, and whole on each rank.
    """

    known_ports = ("frame",)

    opening_codes: Tensor
    opening_ids: Tensor
    voice_codes: Tensor
    tail_ids: Tensor

    def __init__(self, config: OmniConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        sizes, thinker = config.talker, config.thinker
        self.groups = config.groups
        self.text_embedding = TokenEmbedding(thinker.vocab, thinker.width)
        self.text_projection = Projection(thinker.width, config.projection, sizes.width)
        self.hidden_projection = Projection(thinker.width, config.projection, sizes.width)
        self.model = TalkerDecoder(sizes, shard)
        self.codec_head = Head(sizes.width, sizes.vocab)
        self.code_predictor = CodePredictor(predictor_spec(config.predictor, config.groups))
        ids, codec = config.ids, config.codec
        # Columns of the positions 3 to 8 of section 10. The first text id and the voice's code come with the request.
        self._fixed("opening_ids", [ids.tts_pad] * 4 + [ids.tts_bos])
        self._fixed("opening_codes", [codec.nothink, codec.think_bos, codec.think_eos, codec.pad, codec.bos])
        self._fixed("tail_ids", [ids.tts_eos, ids.tts_pad])
        self._fixed("voice_codes", _voice_codes(config))

    def _fixed(self, name: str, values: list[int]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def forward(
        self,
        *,
        kv: KVView,
        positions: Tensor,
        tokens: Tensor | None = None,
        states: Tensor | list[Tensor] | None = None,
        text: Tensor | None = None,
        voice: Tensor | None = None,
        code0: Tensor | None = None,
        last_hidden: Tensor | None = None,
        text_ended: Tensor | None = None,
        random: Tensor | None = None,
        code_predictor_temperature: Tensor | None = None,
        code_predictor_top_k: Tensor | None = None,
        code_predictor_top_p: Tensor | None = None,
        known: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run a prompt pass, the opening of the answer, or one decode step. Returns {"hidden": [T, width], ...}.

        Prompt pass: tokens int64 [T], or states [..., thinker's width], the hidden states of media tokens.
        Opening, six tokens per sequence: text int64 [B], the first id of text; voice int64 [B] or [6 * B], an index
        into `params.VOICES`. Also returns last_hidden [B, width] and text_ended bool [B, 1].
        Decode, one token per sequence: code0 int64 [B], text int64 [B] with -1 after the last id, last_hidden and
        text_ended as returned before, random float32 [B, groups - 1] in [0, 1), and the predictor's sampling, [B] each.
        Also returns frame int64 [B, groups], last_hidden and text_ended.
        Known iterations of one sequence: known int64 [T, groups], their frames; text int64 [T]; text_ended bool [1, 1]
        before them. Returns the same as so many decode steps.
        positions: [T], or [3, T] for time, height and width.
        """
        if known is not None:
            assert text is not None and text_ended is not None
            return self.take_known(known, text, text_ended, positions, kv)
        if code0 is not None:
            assert text is not None and last_hidden is not None and text_ended is not None and random is not None
            assert code_predictor_temperature is not None and code_predictor_top_k is not None
            assert code_predictor_top_p is not None
            sequences = len(last_hidden)
            rule = (code_predictor_temperature, code_predictor_top_k, code_predictor_top_p)
            frame = self.predict(
                last_hidden, code0.view(sequences), random, *(values.view(sequences) for values in rule)
            )
            said, text_ended = self.text_vectors(text.view(sequences), text_ended.view(sequences, 1))
            x = self.frame_vectors(frame) + said
            hidden = self.model(x, positions, kv)
            return {"hidden": hidden, "frame": frame.clamp(min=0), "last_hidden": hidden, "text_ended": text_ended}
        if text is not None:
            assert voice is not None
            x = self.opening_vectors(text.flatten(), voice)
            hidden = self.model(x.flatten(0, 1), positions, kv)
            ended = torch.zeros((len(x), 1), dtype=torch.bool, device=x.device)
            return {"hidden": hidden, "last_hidden": hidden.view_as(x)[:, -1].contiguous(), "text_ended": ended}
        return {"hidden": self.model(self._prompt(tokens, states), positions, kv)}

    def take_known(
        self, frames: Tensor, text: Tensor, text_ended: Tensor, positions: Tensor, kv: KVView
    ) -> dict[str, Tensor]:
        """Run decode steps of one sequence whose frames are known, as one pass. See `forward`."""
        none_left = text < 0
        ended = text_ended.view(1) | (none_left.cumsum(dim=0) > 0)
        before = torch.cat([text_ended.view(1), ended[:-1]])
        said, _ = self.text_vectors(text, before[:, None])
        hidden = self.model(self.frame_vectors(frames) + said, positions, kv)
        return {"hidden": hidden, "frame": frames, "last_hidden": hidden, "text_ended": ended[:, None]}

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits of code group 0 [n, vocab] in the weights' dtype. hidden: [n, width]."""
        logits: Tensor = self.codec_head(hidden)
        return logits

    def predict(
        self, last_hidden: Tensor, code0: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
    ) -> Tensor:
        """Return the frame of each code 0: int64 [B, groups]. A code is BAD_ROW where its logits are not finite."""
        first = self.model.codec_embedding(code0.clamp(min=0))
        rest = self.code_predictor.predict(last_hidden, first, uniform, temperature, top_k, top_p)
        return torch.cat([code0[:, None], rest], dim=1)

    def frame_vectors(self, frame: Tensor) -> Tensor:
        """Return the sum of the embeddings of all codes of each frame: [B, width]. NaN for a frame with a BAD_ROW.

        NaN reaches the logits of the next code 0, where the engine fails the request.
        """
        codes = frame.clamp(min=0)
        first = self.model.codec_embedding(codes[:, 0])
        total = first + self.code_predictor.model.sum_embeddings(codes[:, 1:])
        return torch.where(frame.amin(dim=1, keepdim=True) < 0, torch.nan, total)

    def project_text(self, ids: Tensor) -> Tensor:
        """Return T(ids) of section 10: [..., width]. ids: int64 [...]."""
        projected: Tensor = self.text_projection(self.text_embedding(ids.flatten()))
        return projected.view(*ids.shape, -1)

    def text_vectors(self, text: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        """Return the text column of one step per sequence [B, width], and whether its text has ended, bool [B, 1].

        The first -1 is T(tts_eos), every later one T(tts_pad). text: int64 [B]; ended: bool [B, 1].
        """
        none_left = text < 0
        tail = torch.where(ended[:, 0], self.tail_ids[1], self.tail_ids[0])
        return self.project_text(torch.where(none_left, tail, text)), ended | none_left[:, None]

    def opening_vectors(self, text: Tensor, voice: Tensor) -> Tensor:
        """Return the vectors of positions 3 to 8 of section 10: [B, 6, width]. text: int64 [B], the first id."""
        sequences = len(text)
        ids = torch.cat([self.opening_ids.expand(sequences, -1), text[:, None]], dim=1)
        spoken = self.voice_codes[voice.view(sequences, -1)[:, 0]]
        codes = self.opening_codes.expand(sequences, -1)
        codes = torch.cat([codes[:, :3], spoken[:, None], codes[:, 3:]], dim=1)
        vectors: Tensor = self.project_text(ids) + self.model.codec_embedding(codes)
        return vectors

    def _prompt(self, tokens: Tensor | None, states: Tensor | list[Tensor] | None) -> Tensor:
        """Return the vectors of a prompt pass: T of text ids, M of hidden states."""
        if states is None:
            assert tokens is not None
            return self.project_text(tokens)
        width = self.text_embedding.embedding_dim
        parts = states if isinstance(states, list) else [states]
        hidden = torch.cat([part.reshape(-1, width) for part in parts])
        projected: Tensor = self.hidden_projection(hidden.to(self.hidden_projection.linear_fc1.weight.dtype))
        return projected


def _voice_codes(config: OmniConfig) -> list[int]:
    """Return the codec id of each voice of `params.VOICES`. Raises WeightsError if the checkpoint has none of them.

    The processor refuses a voice that the checkpoint lacks, so its place here is never read.
    """
    known = [name for name in VOICES if name in config.voices]
    if not known:
        raise WeightsError(
            "the checkpoint has no known voice",
            f"talker_config.speaker_id has {', '.join(config.voices) or 'none'}",
            f"use a checkpoint with one of {', '.join(VOICES)}",
            key="talker_config.speaker_id",
        )
    return [config.voices.get(name, config.voices[known[0]]) for name in VOICES]
