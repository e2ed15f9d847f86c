"""Training of the encoders and the thinker on text answers: `python -m train.thinker OUT --seconds 200`.

Reads OUT/sounds.npz; writes OUT/mini with config and tokenizer, OUT/thinker.safetensors and OUT/thinker.jsonl. The loss
is the cross-entropy of the answer and its end. Helper heads, which are not shipped, name the shape, colour and place of
each picture cell and the digit of each sound, so that the encoders learn from the first step on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

from mstar_qwen3omni.world import ACROSS, COLOURS, DIGITS, SHAPES
from scripts.training.options import stage_options
from scripts.training.pace import Pace

from . import sounds
from .layout import write_files
from .nodes import Nodes, Understood, device_of
from .prompts import Batch, Prompts

if TYPE_CHECKING:
    from torch import Tensor

PARTS: Final = ("audio_encoder", "vision_encoder", "Thinker")
MINI: Final = "mini"
WEIGHTS: Final = "thinker.safetensors"
HELPED_UNTIL: Final = 0.7
"""Share of the time in which the helper heads take part."""


class Helpers(nn.Module):
    """Linear heads over the encoders' vectors: shape, colour and place of a cell, digit of a sound."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape = nn.Linear(width, 1 + len(SHAPES))
        self.colour = nn.Linear(width, 1 + len(COLOURS))
        self.place = nn.Linear(width, ACROSS**2)
        self.digit = nn.Linear(width, len(DIGITS))

    def forward(self, batch: Batch, found: Understood) -> Tensor:
        """Return the sum of the losses."""
        loss = found.hidden.new_zeros(())
        pictures = [row.question for row in batch.rows if row.question.kind != "audio"]
        if found.seen is not None and any(each.kind == "image" for each in pictures):
            is_picture = torch.tensor([each.kind == "image" for each in pictures for _ in range(_frames(each.kind))])
            seen = found.seen[is_picture.to(found.seen.device)]
            shapes = np.zeros((len(seen), ACROSS**2), np.int64)
            colours = np.zeros_like(shapes)
            for index, each in enumerate(each for each in pictures if each.kind == "image"):
                for item in each.items:
                    shapes[index, item.cell] = 1 + SHAPES.index(item.shape)
                    colours[index, item.cell] = 1 + list(COLOURS).index(item.colour)
            places = np.broadcast_to(np.arange(ACROSS**2), shapes.shape).copy()
            for head, labels in ((self.shape, shapes), (self.colour, colours), (self.place, places)):
                loss = loss + cross_entropy(
                    head(seen).flatten(0, 1), torch.from_numpy(labels).flatten().to(seen.device)
                )
        if found.heard is not None:
            digits = torch.tensor([row.question.digit for row in batch.rows if row.question.kind == "audio"])
            loss = loss + cross_entropy(self.digit(found.heard), digits.to(found.heard.device))
        return loss


def _frames(kind: str) -> int:
    return 2 if kind == "video" else 1


def answer_loss(nodes: Nodes, batch: Batch, found: Understood) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of answers with their ends, and which rows are right. Answers have one token each."""
    rows = torch.arange(len(batch.rows), device=batch.ids.device)
    places = torch.stack([batch.ends, batch.ends + 1], dim=1)
    logits = nodes.thinker.lm_head(found.hidden[rows[:, None], places])
    wanted = batch.ids[rows[:, None], places + 1]
    is_right = (logits.argmax(-1) == wanted).all(1)
    return cross_entropy(logits.flatten(0, 1), wanted.flatten()), is_right


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train and write the parts. Returns the shares of right answers to held-out questions, by kind."""
    torch.manual_seed(options.seed)
    device, out = device_of(options.device), options.out
    config = write_files(out / MINI)
    made = sounds.load(out / sounds.FILE)
    held_out = len(made.digits) // 10
    prompts = Prompts(config, out / MINI, sounds.Sounds(made.digits[held_out:], made.answers))
    unseen = Prompts(config, out / MINI, sounds.Sounds(made.digits[:held_out], made.answers))
    nodes, helpers = Nodes(config).to(device), Helpers(config.thinker.width).to(device)
    if options.resume:
        load(nodes, out)
    trained = [each for name in PARTS for each in nodes[name].parameters()] + list(helpers.parameters())
    optimizer = torch.optim.AdamW(trained, options.rate, betas=(0.9, 0.98), weight_decay=0.02)
    chance = np.random.default_rng(options.seed)
    pace, right, losses = Pace(options.seconds, options.steps, out / "thinker.jsonl"), 0.0, [0.0]
    first = 0.0
    while (share := pace.advance()) < 1.0:
        pace.set_rate(optimizer, options.rate, share)
        batch = prompts.batch(prompts.draw(chance, options.batch), device)
        found = nodes.understood(batch)
        loss, is_right = answer_loss(nodes, batch, found)
        whole = loss + (helpers(batch, found) if share < HELPED_UNTIL else 0.0)
        optimizer.zero_grad(set_to_none=True)
        whole.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if pace.step == 1:
            first = float(loss.detach())
        if pace.step % options.report == 0:
            losses.append(float(loss.detach()))
            right = float(is_right.float().mean())
            pace.note(loss=round(losses[-1], 4), all=round(float(whole.detach()), 4), right=round(right, 3))
        if pace.step % (10 * options.report) == 0:
            save(nodes, out)
    save(nodes, out)
    shares = judged(nodes, unseen, device, options.judged)
    last = float(loss.detach()) if pace.step > 1 else first
    figures = {"first": round(first, 4), "last": round(last, 4), **shares}
    pace.note(done="thinker", seed=options.seed, device=device.type, **figures)
    return {"first": first, "last": last, **shares}


@torch.no_grad()
def judged(nodes: Nodes, prompts: Prompts, device: torch.device, count: int, seed: int = 900_001) -> dict[str, float]:
    """Return the share of right answers to new questions, by kind."""
    chance = np.random.default_rng(seed)
    found: dict[str, list[bool]] = {}
    for _ in range(-(-count // 64)):
        batch = prompts.batch(prompts.draw(chance, min(64, count)), device)
        _, is_right = answer_loss(nodes, batch, nodes.understood(batch))
        for row, right in zip(batch.rows, is_right.tolist(), strict=True):
            found.setdefault(row.question.kind, []).append(right)
    return {kind: round(sum(each) / len(each), 4) for kind, each in sorted(found.items())}


def save(nodes: Nodes, out: Path) -> None:
    """Write the trained parts."""
    state = {
        name: value.detach().cpu().contiguous() for name, value in nodes.state_dict().items() if name.startswith(PARTS)
    }
    part = out / f".{WEIGHTS}"
    save_file(state, part)
    part.rename(out / WEIGHTS)


def load(nodes: Nodes, out: Path, name: str = WEIGHTS) -> None:
    """Read trained parts into the nodes."""
    _, unknown = nodes.load_state_dict(load_file(out / name), strict=False)
    if unknown:
        raise ValueError(f"{out / name} holds {unknown[0]}, which the nodes do not have")


def main() -> None:
    parser = stage_options(__doc__, seconds=200, batch=64, rate=3e-3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--judged", type=int, default=512, help="new questions at the end")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/thinker.safetensors")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
