"""Training of the talker and its code predictor on spoken answers: `python -m train.talker OUT --seconds 100`.

Reads OUT/mini, OUT/sounds.npz, OUT/thinker.safetensors and OUT/codes.npz; writes OUT/talker.safetensors and
OUT/talker.jsonl. The thinker is frozen. Its hidden states of a pool of questions are computed once, because an answer's
speech depends on its word alone: each step gives every question a random answer and voice.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from mstar_qwen3omni.params import VOICES
from scripts.training.codes import load_codes
from scripts.training.options import stage_options
from scripts.training.pace import Pace

from . import sounds
from .codec import CODES
from .layout import write_files
from .nodes import DenseView, Nodes, device_of
from .prompts import Prompts, Row
from .thinker import MINI, load

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_qwen3omni.talker.talker import Talker

    from .codec import Codes

WEIGHTS: Final = "talker.safetensors"
FROZEN: Final = "text_embedding"
AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The talker's share of a prompt. ids: int64 [n]; states: [n, width], read where `is_media`; positions: [3, n]."""

    ids: Tensor
    states: Tensor
    is_media: Tensor
    positions: Tensor


@torch.no_grad()
def heard(nodes: Nodes, prompts: Prompts, rows: list[Row], device: torch.device) -> list[Heard]:
    """Return what the talker reads of each prompt."""
    batch = prompts.batch(rows, device)
    accepted, special = nodes.understood(batch).accepted, nodes.config.ids
    made = []
    for row, states in zip(rows, accepted, strict=True):
        chosen = torch.from_numpy(row.heard)
        ids = torch.from_numpy(row.ids)[chosen]
        is_media = torch.isin(ids, torch.tensor([special.image_pad, special.video_pad, special.audio_pad]))
        made.append(
            Heard(
                ids=ids.to(device),
                states=states[: len(row.ids)][chosen.to(device)],
                is_media=is_media.to(device),
                positions=torch.from_numpy(row.heard_positions).to(device),
            )
        )
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One spoken answer. text: its ids; voice: index into VOICES; codes: [frames, groups]."""

    text: tuple[int, ...]
    voice: int
    codes: Tensor


def speech_loss(nodes: Nodes, prompts: list[Heard], answers: list[Spoken]) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of code group 0 with the end, and that of the other groups."""
    talker, ids = nodes.talker, nodes.config.ids
    device = prompts[0].ids.device
    lines, places, starts = [], [], []
    media = _projected(talker, prompts)
    opening = talker.opening_vectors(
        torch.tensor([each.text[0] for each in answers], device=device),
        torch.tensor([each.voice for each in answers], device=device),
    )
    for prompt, answer, said, start in zip(prompts, answers, media, opening, strict=True):
        frames = len(answer.codes)
        tail = [*answer.text[1:], ids.tts_eos, *[ids.tts_pad] * frames][:frames]
        spoken = talker.frame_vectors(answer.codes) + talker.project_text(torch.tensor(tail, device=device))
        lines.append(torch.cat([said, start, spoken]))
        starts.append(len(said) + len(start) - 1)
        rest = prompt.positions.max() + 1 + torch.arange(len(start) + frames, device=device)
        places.append(torch.cat([prompt.positions, rest.expand(3, -1)], dim=1))
    longest = max(map(len, lines))
    x = torch.stack([nn.functional.pad(each, (0, 0, 0, longest - len(each))) for each in lines])
    positions = torch.stack([nn.functional.pad(each, (0, longest - each.shape[1])) for each in places], dim=1)
    hidden = talker.model(x.flatten(0, 1), positions.flatten(1), DenseView(len(lines))).view(x.shape)
    own = [
        hidden[row, start : start + len(each.codes) + 1]
        for row, (start, each) in enumerate(zip(starts, answers, strict=True))
    ]
    eos = torch.tensor([nodes.config.codec.eos], device=device)
    first = torch.cat([torch.cat([each.codes[:, 0], eos]) for each in answers])
    loss = cross_entropy(talker.codec_head(torch.cat(own)), first)
    before = torch.cat([each[:-1] for each in own])
    return loss, residual_loss(talker, before, torch.cat([each.codes for each in answers]))


def _projected(talker: Talker, prompts: list[Heard]) -> list[Tensor]:
    """Return the vectors of each prompt: T of text ids, M of hidden states."""
    ids, states = torch.cat([each.ids for each in prompts]), torch.cat([each.states for each in prompts])
    is_media = torch.cat([each.is_media for each in prompts])
    both = torch.where(is_media[:, None], talker.hidden_projection(states), talker.project_text(ids))
    return list(both.split([len(each.ids) for each in prompts]))


def residual_loss(talker: Talker, hidden: Tensor, codes: Tensor) -> Tensor:
    """Return the cross-entropy of the code predictor. hidden: [frames, width]; codes: [frames, groups]."""
    losses: list[Tensor] = []

    def choose(step: int, logits: Tensor) -> Tensor:
        losses.append(cross_entropy(logits, codes[:, step + 1]))
        return codes[:, step + 1]

    talker.code_predictor.unroll(hidden, talker.model.codec_embedding(codes[:, 0]), choose)
    return torch.stack(losses).mean()


class Answers:
    """Spoken answers by chance. Owned by `train`."""

    def __init__(self, codes: dict[tuple[str, str], Codes], prompts: Prompts, device: torch.device) -> None:
        self._made = [
            Spoken(text=prompts.encode(word), voice=VOICES.index(speaker), codes=torch.from_numpy(each).to(device))
            for (speaker, word), each in codes.items()
        ]

    def draw(self, chance: np.random.Generator, count: int) -> list[Spoken]:
        """Return `count` answers."""
        return [self._made[index] for index in chance.integers(len(self._made), size=count)]


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train and write the talker. Returns first and last losses."""
    torch.manual_seed(options.seed)
    device, out = device_of(options.device), options.out
    config = write_files(out / MINI)
    prompts = Prompts(config, out / MINI, sounds.load(out / sounds.FILE))
    nodes = Nodes(config)
    load(nodes, out)
    nodes.to(device)
    chance = np.random.default_rng(options.seed)
    pool = [
        each
        for _ in range(-(-options.pool // AT_ONCE))
        for each in heard(nodes, prompts, prompts.draw(chance, AT_ONCE, spoken=1.0), device)
    ]
    answers = Answers(load_codes(out / CODES), prompts, device)
    trained = [value for name, value in nodes.talker.named_parameters() if not name.startswith(FROZEN)]
    optimizer = torch.optim.AdamW(trained, options.rate, betas=(0.9, 0.98), weight_decay=0.01)
    pace, losses = Pace(options.seconds, options.steps, out / "talker.jsonl"), []
    while (share := pace.advance()) < 1.0:
        pace.set_rate(optimizer, options.rate, share)
        given = [pool[index] for index in chance.integers(len(pool), size=options.batch)]
        first, rest = speech_loss(nodes, given, answers.draw(chance, options.batch))
        optimizer.zero_grad(set_to_none=True)
        (first + rest).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append((float(first.detach()), float(rest.detach())))
        if pace.step % options.report == 0:
            pace.note(first_group=round(losses[-1][0], 4), other_groups=round(losses[-1][1], 4))
    state = {
        name: value.detach().cpu().contiguous()
        for name, value in nodes.state_dict().items()
        if name.startswith("Talker.") and FROZEN not in name
    }
    save_file(state, out / WEIGHTS)
    found = {"first": round(sum(losses[0]), 4), "last": round(float(np.mean(losses[-20:], axis=0).sum()), 4)}
    pace.note(done="talker", seed=options.seed, device=device.type, **found)
    return found


def main() -> None:
    parser = stage_options(__doc__, seconds=100, batch=32, rate=3e-3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pool", type=int, default=1024, help="questions whose hidden states are computed once")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
