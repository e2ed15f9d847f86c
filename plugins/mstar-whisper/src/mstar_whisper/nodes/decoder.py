"""The decoder: token ids to logits, with attention over its own ids and over the encoder's states.

One forward for prompts, decode, captured steps, and reviews of a finished text; run by the KV engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import nn
from torch.nn.functional import linear

from mstar_core.layers import BlockSpec, CrossBlock, Head, TokenEmbedding
from mstar_core.layers.linear import join_with_biases
from mstar_whisper.nodes.alignment import alignment
from mstar_whisper.nodes.rules import Rules

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import MemoryView
    from mstar_whisper.checkpoint.config import WhisperConfig

ROWS: Final = 256
"""Rows whose logits a review computes at once: their memory is that of a large decode step."""


@dataclass(slots=True)
class Listening:
    """A view that also keeps the queries of all layers over the memory. Owned by one review."""

    inner: MemoryView
    queries: list[Tensor] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        return self.inner.attend(layer, query, key, value, scale)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See KeepingView."""
        self.inner.keep(layer, key, value)

    def attend_cross(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """See MemoryView."""
        self.queries.append(query)
        return self.inner.attend_cross(layer, query, scale)


class Decoder(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(config.vocab, config.width)
        self.embed_positions = nn.Embedding(config.positions, config.width)
        spec = BlockSpec(width=config.width, heads=config.decoder_heads, inner=config.decoder_mlp, key_bias=False)
        self.layers = nn.ModuleList(CrossBlock(spec, layer) for layer in range(config.decoder_layers))
        self.layer_norm = nn.LayerNorm(config.width)
        self._heads = config.decoder_heads
        self._memory: tuple[Tensor, Tensor] | None = None

    def join(self) -> None:
        """Join the projections of each layer, and those of a memory for all layers. Called once weights are loaded."""
        for layer in self.stack:
            layer.self_attn.join()
        attentions = [layer.encoder_attn for layer in self.stack]
        self._memory = join_with_biases([each for one in attentions for each in (one.k_proj, one.v_proj)])

    def remember(self, states: Tensor, kv: MemoryView) -> None:
        """Store the keys and values of encoder states in all layers. states: [T, width], of all windows of the pass."""
        if self._memory is None:
            for block in self.stack:
                block.remember(states, kv)
            return
        both = linear(states, *self._memory).unflatten(-1, (len(self.layers), 2, self._heads, -1))
        for layer in range(len(self.layers)):
            kv.keep(layer, both[:, layer, 0], both[:, layer, 1])

    @property
    def stack(self) -> list[CrossBlock]:
        """The layers, in order."""
        return cast("list[CrossBlock]", list(self.layers))

    def forward(self, tokens: Tensor, positions: Tensor, kv: MemoryView) -> Tensor:
        """Return [T, width]. tokens, positions: int64 [T], all sequences of the step packed."""
        x = self.embed_tokens(tokens) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, kv)
        hidden: Tensor = self.layer_norm(x)
        return hidden


class SpeechDecoder(nn.Module):
    """The node of the decoder. Weights that only draws use are those of the embedding."""

    head_ports = ("rules",)
    host_outputs = ("summary",)

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self._config = config
        self.decoder = Decoder(config)
        self.head_layer = Head(config.width, config.vocab, self.decoder.embed_tokens)
        self.rules = Rules(config.ids, config.vocab)

    def forward(
        self,
        *,
        kv: MemoryView,
        positions: Tensor,
        tokens: Tensor | None = None,
        token: Tensor | None = None,
        marks: Tensor | None = None,
        states: Tensor | None = None,
        written: Tensor | None = None,
        review: Tensor | None = None,
        sound: Tensor | None = None,
    ) -> dict[str, Tensor | list[Tensor]]:
        """Run one kind of pass over T packed tokens.

        tokens: a prompt. token, marks: one id of each sequence, see `Rules`. states: [T, width] of the encoder, to
        remember. written, review, sound: a prompt with its text, then see `_review`.
        """
        if states is not None:
            self.decoder.remember(states, kv)
            return {}
        if written is not None:
            assert review is not None
            return self._review(kv, positions, written, review, sound)
        if token is not None and marks is not None:
            marks = self.rules.after(marks, token)
            return {"hidden": self.decoder(token, positions, kv), "rules": marks, "marks": marks}
        ids = tokens if tokens is not None else token
        assert ids is not None
        return {"hidden": self.decoder(ids, positions, kv), "rules": self.rules.of_prompt(ids)}

    def join(self) -> None:
        """See Decoder."""
        self.decoder.join()

    def head(self, hidden: Tensor, *, rules: Tensor) -> Tensor:
        """Return logits [n, vocab], float32, without the ids that the rules forbid. rules: marks [n, MARKS]."""
        return self.rules.constrained(self.head_layer(hidden), rules)

    def _review(
        self, kv: MemoryView, positions: Tensor, written: Tensor, review: Tensor, sound: Tensor | None
    ) -> dict[str, Tensor | list[Tensor]]:
        """Return {"summary": float32 [items, 2], "weights": [ids, frames] each}.

        review: int64 [items, 4]: first id of the text, form (see `Rules`), frames of sound, place of the start id.
        sound: [items, states, width] of the encoder. summary: log-probability of the text, probability of silence.
        """
        view = kv if sound is None else Listening(kv)
        hidden = self.decoder(written, positions, view)
        item = (positions == 0).cumsum(0) - 1
        place = positions - review[item, 0]
        scores = self._scores(hidden, written, self.rules.of_written(written, item, place, review[item, 1]))
        total = hidden.new_zeros(len(review), dtype=torch.float32)
        total = total.index_add(0, item, torch.where(place >= 0, scores, 0.0))
        numbers = torch.arange(len(review), device=item.device)
        firsts = torch.searchsorted(item, numbers)
        silence = self.head_layer(hidden[firsts + review[:, 3]]).float().softmax(-1)[:, self._config.ids.no_speech]
        outputs: dict[str, Tensor | list[Tensor]] = {"summary": torch.stack([total, silence], dim=-1)}
        if isinstance(view, Listening) and sound is not None:
            ends = [*firsts[1:].tolist(), len(written)]
            parts = zip(firsts.tolist(), ends, review.tolist(), sound, strict=True)
            # The last id is the end, which no step has read.
            outputs["weights"] = [
                self._alignment([query[first + begin : last - 1] for query in view.queries], states, frames)
                for first, last, (begin, _, frames, _), states in parts
            ]
        return outputs

    def _scores(self, hidden: Tensor, ids: Tensor, marks: Tensor) -> Tensor:
        """Return the log-probability of each id after the row before it, [T]. marks: before each id, [T, 5]."""
        scores = [hidden.new_zeros(1, dtype=torch.float32)]
        for at in range(1, len(ids), ROWS):
            part = slice(at, min(at + ROWS, len(ids)))
            logits = self.head(hidden[part.start - 1 : part.stop - 1], rules=marks[part])
            scores.append(logits.log_softmax(-1).gather(-1, ids[part, None])[:, 0])
        return torch.cat(scores)

    def _alignment(self, queries: list[Tensor], states: Tensor, frames: int) -> Tensor:
        """Return what each id listens to, [ids, states that hold sound]."""
        heads = []
        for layer, head in self._config.alignment:
            keys, _ = self.decoder.stack[layer].encoder_attn.keys_and_values(states)
            scores = queries[layer][:, head].float() @ keys[:, head].float().T
            heads.append((scores * self._config.head_dim**-0.5).softmax(-1))
        return alignment(torch.stack(heads)[..., : frames // 2], self._config.median_width)
