"""Training of the miniature, in two stages.

`python -m train.train OUT --stage sentences --seconds 140`: single sentences of espeak-ng without silence behind them.
`python -m train.train OUT --stage windows --seconds 420`: whole windows, three of four by `orpheus:mini`.

Reads OUT/source.npz, for the second stage OUT/speech.npz and the first one's weights. Writes OUT/mini (config,
tokenizer), OUT/STAGE.safetensors and OUT/STAGE.jsonl.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy, ctc_loss, pad, scaled_dot_product_attention

from mstar_whisper.model import DECODER, ENCODER
from mstar_whisper.nodes.decoder import Decoder
from mstar_whisper.nodes.encoder import Encoder
from scripts.training.muon import Muon
from scripts.training.options import stage_options
from scripts.training.pace import Pace

from . import source, speech
from .layout import write_layout
from .windows import WORDS, Lesson, Lessons, load_clips

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_whisper.checkpoint.config import WhisperConfig

MINI: Final = "mini"
SPELLING: Final = 0.3
"""Weight of the loss of words in order."""

STAGES: Final = ("sentences", "windows")
IGNORED: Final = -100
WHOLE, SPEECH = 0.8, 0.75
"""Shares of whole windows, and of batches by `orpheus:mini`, in the second stage."""


class DenseMemory:
    """A MemoryView of B windows of equal length, with gradients."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See MemoryView."""
        self._kept[layer] = (key, value)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView. Sequences start empty."""
        return self._mixed(query, key, value, is_causal=True)

    def attend_cross(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """See MemoryView."""
        return self._mixed(query, *self._kept[layer], is_causal=False)

    def _mixed(self, *packed: Tensor, is_causal: bool) -> Tensor:
        query, key, value = (each.unflatten(0, (self._rows, -1)).transpose(1, 2) for each in packed)
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2).flatten(0, 1)


class Student(nn.Module):
    """Both halves of the model, and a head on the encoder that training alone uses: words in order (CTC)."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.spell = nn.Linear(config.width, len(WORDS) + 1)
        self.requires_grad_(True)
        waves = sinusoids(config.states, config.width)
        self.encoder.embed_positions.weight.data.copy_(waves)
        self.encoder.embed_positions.requires_grad_(False)
        nn.init.normal_(self.decoder.embed_tokens.weight, std=0.1)
        nn.init.normal_(self.decoder.embed_positions.weight, std=0.05)
        for layer in self.encoder.layers:
            look_around(layer.self_attn.q_proj, layer.self_attn.k_proj, config.encoder_heads)

    def losses(self, lessons: Sequence[Lesson], config: WhisperConfig) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of the ids, and the loss of the words in order."""
        longest = max(len(one.mel) for one in lessons)
        mel = torch.stack(
            [pad(torch.from_numpy(one.mel), (0, 0, 0, longest - len(one.mel)), value=one.mel.min()) for one in lessons]
        )
        states = self.encoder.encoded(mel)
        width = max(len(one.ids) for one in lessons)
        ids = torch.tensor([[*one.ids, *[config.ids.end] * (width - len(one.ids))] for one in lessons])
        wanted = ids[:, 1:].clone()
        for row, one in enumerate(lessons):
            wanted[row, : one.first - 1] = IGNORED
            wanted[row, len(one.ids) - 1 :] = IGNORED
            wanted[row, one.start] = config.ids.no_speech if one.is_silent else config.ids.languages["en"]
        kv = DenseMemory(len(lessons))
        self.decoder.remember(states.flatten(0, 1), kv)
        read = ids[:, :-1]
        hidden = self.decoder(read.flatten(), torch.arange(read.shape[1]).repeat(len(lessons)), kv)
        chosen = (wanted != IGNORED).flatten()
        logits = nn.functional.linear(hidden[chosen], self.decoder.embed_tokens.weight)
        return cross_entropy(logits, wanted.flatten()[chosen]), self._spelled(states, lessons)

    def _spelled(self, states: Tensor, lessons: Sequence[Lesson]) -> Tensor:
        rows = [row for row, one in enumerate(lessons) if one.words]
        if not rows:
            return states.new_zeros(())
        chances = self.spell(states[rows]).log_softmax(-1).transpose(0, 1)
        words = [lessons[row].words for row in rows]
        targets = torch.tensor([word + 1 for each in words for word in each])
        lengths = torch.tensor([len(lessons[row].mel) // 2 for row in rows])
        return ctc_loss(chances, targets, lengths, torch.tensor([len(each) for each in words]), zero_infinity=True)


def sinusoids(length: int, width: int) -> Tensor:
    """Return the positions of the encoder, [length, width]. Source: the paper on Whisper."""
    rates = torch.exp(-math.log(10000) / (width // 2 - 1) * torch.arange(width // 2))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def look_around(query: nn.Linear, key: nn.Linear, heads: int) -> None:
    """Set projections so that each head looks at a fixed distance at first, which positions make a rotation."""
    width, size = query.weight.shape[0], query.weight.shape[0] // heads
    rates = torch.exp(-math.log(10000) / (width // 2 - 1) * torch.arange(width // 2))
    places = torch.arange(size // 2) * 2
    for head, offset in enumerate(torch.linspace(-12, 12, heads).tolist()):
        rows = slice(head * size, (head + 1) * size)
        for part in (query.weight.data, key.weight.data):
            part[rows] *= 0.3
        for row, place in enumerate(places.tolist()):
            sine, cosine = head * size + 2 * row, head * size + 2 * row + 1
            turn = float(rates[place]) * offset
            key.weight.data[sine, place] += 1.0
            key.weight.data[cosine, width // 2 + place] += 1.0
            query.weight.data[sine, place] += math.cos(turn)
            query.weight.data[sine, width // 2 + place] += math.sin(turn)
            query.weight.data[cosine, width // 2 + place] += math.cos(turn)
            query.weight.data[cosine, place] -= math.sin(turn)


def train(options: argparse.Namespace) -> None:
    """Train one stage and write the weights."""
    torch.manual_seed(options.seed)
    out, is_second = options.out, options.stage == STAGES[1]
    config = write_layout(out / MINI)
    lessons, chance = Lessons(out / MINI, config, options.seed), np.random.default_rng(options.seed)
    kinds = [load_clips(out / name, config.bins) for name in (source.FILE, speech.FILE)[: 1 + is_second]]
    student = Student(config)
    if is_second:
        load(student, out / weights_file(STAGES[0]))
    optimizers = optimizers_of(student, options.rate)
    pace = Pace(options.seconds, options.steps, out / f"{options.stage}.jsonl", clock=time.process_time)
    losses = list[tuple[float, float]]()
    while (share := pace.advance()) < 1.0:
        for optimizer in optimizers:
            pace.set_rate(optimizer, options.rate, share)
            optimizer.zero_grad(set_to_none=True)
        clips = kinds[is_second and chance.random() < SPEECH]
        batch = lessons.draw(clips, options.batch, is_whole=is_second and chance.random() < WHOLE)
        written, spelled = student.losses(batch, config)
        (written + SPELLING * spelled).backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append((float(written.detach()), float(spelled.detach())))
        if pace.step % options.report == 0:
            pace.note(**means(losses[-options.report :]))
            save(student, out / weights_file(options.stage))
    save(student, out / weights_file(options.stage))
    pace.note(done=options.stage, seed=options.seed, **means(losses[-50:]))


def optimizers_of(student: Student, rate: float) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the matrices of the layers, and AdamW for everything else."""
    named = [(name, each) for name, each in student.named_parameters() if each.requires_grad]
    is_matrix = {name: each.dim() == 2 and ".layers." in name for name, each in named}
    matrices = [each for name, each in named if is_matrix[name]]
    rest = [each for name, each in named if not is_matrix[name]]
    return Muon(matrices, rate), torch.optim.AdamW(rest, rate, betas=(0.9, 0.98), weight_decay=1e-2)


def means(losses: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the mean losses of ids and of words in order."""
    written, spelled = np.mean(losses, axis=0)
    return {"ids": round(float(written), 4), "words": round(float(spelled), 4)}


def weights_file(stage: str) -> str:
    """Return the name of a stage's weights."""
    return f"{stage}.safetensors"


def save(student: Student, path: Path) -> None:
    """Write the weights under their published names. The head of words in order is left out."""
    halves = {ENCODER: student.encoder, DECODER: student.decoder}
    state = {
        prefix + name: value.detach().contiguous()
        for prefix, half in halves.items()
        for name, value in half.state_dict().items()
    }
    part = path.with_name(f".{path.name}")
    save_file(state, part)
    part.rename(path)


def load(student: Student, path: Path) -> None:
    """Read the weights of an earlier stage."""
    state = load_file(path)
    for prefix, half in ((ENCODER, student.encoder), (DECODER, student.decoder)):
        half.load_state_dict({name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)})


def main() -> None:
    parser = stage_options(__doc__, seconds=420, batch=32, rate=3e-3)
    parser.add_argument("--stage", choices=STAGES, required=True)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
