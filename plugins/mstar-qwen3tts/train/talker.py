"""Training of the talker and its code predictor: `python -m train.talker OUT --seconds 120`.

Reads OUT/mini and OUT/codes.npz; writes OUT/talker.safetensors and OUT/talker.jsonl. Texts are rows of one to four
words. Half of the prompts hold the whole text, in the others it is read along with the speech.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mstar_qwen3tts.request.prompt import Speech, layout
from mstar_qwen3tts.request.tokenizer import TextTokenizer
from mstar_qwen3tts.talker.talker import Talker
from scripts.training.codes import load_codes
from scripts.training.options import stage_options
from scripts.training.pace import Pace

from .codec import CODES, MINI
from .layout import write_layout
from .sounds import WORDS

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_qwen3tts.checkpoint.config import TTSConfig

WEIGHTS: Final = "talker.safetensors"
MOST_WORDS: Final = 4
EMBEDDING_STD: Final = 0.3


class DenseView:
    """A KVView of B sequences of equal length that start empty, with causal attention and gradients."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        query, key, value = (each.unflatten(0, (self._rows, -1)).transpose(1, 2) for each in (query, key, value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(0, 1)


class Lessons:
    """Draws texts with their prompts and frames."""

    def __init__(self, folder: Path, config: TTSConfig, codes: Path) -> None:
        self._tokenizer, self._config, self._codes = TextTokenizer(folder), config, load_codes(codes)
        self._header = self._tokenizer.encode_template("<|im_start|>assistant\n")

    def draw(self, chance: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of a prompt [n, 1 + groups], frames [f, groups] and the text id of each frame [f]."""
        voices = list(self._config.voices)
        voice = voices[chance.integers(len(voices))]
        words = [WORDS[index] for index in chance.integers(len(WORDS), size=chance.integers(1, MOST_WORDS + 1))]
        speech = Speech(
            header=self._header,
            text=self._tokenizer.encode(" ".join(words)),
            voice=voice,
            language="english" if chance.integers(2) else "auto",
            is_whole=bool(chance.integers(2)),
        )
        rows, trailing = layout(speech, self._config)
        frames = np.concatenate([self._codes[voice, word] for word in words])
        text = (trailing + [self._config.ids.tts_pad] * len(frames))[: len(frames)]
        return torch.from_numpy(rows), torch.from_numpy(frames), torch.tensor(text)


def loss_of(talker: Talker, lessons: list[tuple[Tensor, Tensor, Tensor]], eos: int) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of code group 0 with the end, and that of the other groups."""
    vectors, places, starts = [], [], []
    for rows, frames, text in lessons:
        x = torch.cat([talker.prompt_vectors(rows), talker.frame_vectors(frames) + talker.project_text(text)])
        starts.append(len(rows))
        vectors.append(x)
    longest = max(map(len, vectors))
    padded = torch.stack([nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x in vectors])
    positions = torch.arange(longest).repeat(len(lessons))
    hidden = talker.model(padded.flatten(0, 1), positions, DenseView(len(lessons))).view_as(padded)
    states = []
    for index, (_, frames, _) in enumerate(lessons):
        first = starts[index] - 1
        places.append(torch.cat([frames[:, 0], torch.tensor([eos])]))
        states.append(hidden[index, first : first + len(frames) + 1])
    logits = nn.functional.linear(torch.cat(states), talker.codec_head.weight)
    first_loss = cross_entropy(logits, torch.cat(places))
    frames = torch.cat([frames for _, frames, _ in lessons])
    given, found = torch.cat([state[:-1] for state in states]), []

    def choose(step: int, logits: Tensor) -> Tensor:
        found.append(cross_entropy(logits, frames[:, step + 1]))
        return frames[:, step + 1]

    talker.code_predictor.unroll(given, talker.model.codec_embedding(frames[:, 0]), choose)
    return first_loss, torch.stack(found).mean()


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train and write the talker. Returns first and last loss."""
    torch.manual_seed(options.seed)
    out, chance = options.out, np.random.default_rng(options.seed)
    config = write_layout(out / MINI)
    talker = Talker(config).requires_grad_(True)  # heads come without gradients
    for name, value in talker.named_parameters():
        if "embedding" in name:
            nn.init.normal_(value, std=EMBEDDING_STD)
    lessons = Lessons(out / MINI, config, out / CODES)
    optimizer = torch.optim.AdamW(talker.parameters(), options.rate, betas=(0.9, 0.98), weight_decay=1e-2)
    pace, losses = Pace(options.seconds, options.steps, out / "talker.jsonl"), []
    while (share := pace.advance()) < 1.0:
        pace.set_rate(optimizer, options.rate, share)
        first, rest = loss_of(talker, [lessons.draw(chance) for _ in range(options.batch)], config.codes.eos)
        optimizer.zero_grad(set_to_none=True)
        (first + rest).backward()
        nn.utils.clip_grad_norm_(talker.parameters(), 1.0)
        optimizer.step()
        losses.append((float(first.detach()), float(rest.detach())))
        if pace.step % options.report == 0:
            pace.note(first_group=round(losses[-1][0], 4), other_groups=round(losses[-1][1], 4))
        if pace.step % (5 * options.report) == 0:
            save(talker, out)
    save(talker, out)
    found = {"first": round(sum(losses[0]), 4), "last": round(float(np.mean(losses[-20:], axis=0).sum()), 4)}
    pace.note(done="talker", seed=options.seed, **found)
    return found


def save(talker: Talker, out: Path) -> None:
    """Write the talker's weights under their names in a checkpoint."""
    state = {f"talker.{name}": value.detach().contiguous() for name, value in talker.state_dict().items()}
    part = out / f".{WEIGHTS}"
    save_file(state, part)
    part.rename(out / WEIGHTS)


def main() -> None:
    train(stage_options(__doc__, seconds=120, batch=12, rate=3e-3).parse_args())


if __name__ == "__main__":
    main()
