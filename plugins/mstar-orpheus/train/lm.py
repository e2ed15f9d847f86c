"""Training of the miniature language model on the codes of the data.

`python -m train.lm OUT --seconds 260` reads OUT/codes.npz and writes OUT/lm.safetensors, every 60 s too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from safetensors.torch import save_file

from scripts.training.muon import Muon
from scripts.training.pace import Pace

from . import vocabulary
from .codec_parts import MINI_SNAC
from .data import lines
from .llama import Llama

if TYPE_CHECKING:
    from torch import Tensor

LENGTH: Final = 1280
"""Ids of a row, into which sentences are packed."""
MUON_RATE, ADAM_RATE = 5e-3, 4e-3
NOISE: Final = 0.03
"""Share of audio ids in the input that are replaced by another of their slot, because sampling errs."""
Z: Final = 1e-4
"""Weight of the squared log of the softmax's sum."""
HELD_OUT: Final = 512
"""Sentences at the end of the data on which the loss is reported."""


class Codes:
    """Sentences as ids: prompt, audio ids and the stop id, with the length of the prompt."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as values:
            codes, ends = values["codes"].astype(np.int64), values["ends"]
            texts, voices = lines(values["texts"]), lines(values["voices"])
        slots = np.arange(len(codes)) % 7 * MINI_SNAC.codebook_size
        ids = codes + slots + vocabulary.AUDIO
        made = vocabulary.tokenizer()
        starts = np.concatenate([[0], ends[:-1]])
        self.prompts: list[int] = []
        self.ids: list[np.ndarray] = []
        for text, voice, start, end in zip(texts, voices, starts, ends, strict=True):
            prompt = vocabulary.prompt(text, voice, made)
            whole = np.concatenate([prompt, ids[start:end], [vocabulary.STOP]])
            if len(whole) <= LENGTH:
                self.prompts.append(len(prompt))
                self.ids.append(whole.astype(np.int16))


class Rows:
    """Packed rows of one pass over some sentences, int64 [n, LENGTH] each."""

    def __init__(self, codes: Codes, order: np.ndarray) -> None:
        packs = list(packed([len(codes.ids[index]) for index in order]))
        shape = (len(packs), LENGTH)
        self.ids, self.positions = np.zeros(shape, np.int16), np.zeros(shape, np.int16)
        self.documents, self.targets = np.full(shape, -1, np.int16), np.full(shape, -100, np.int16)
        for row, pack in enumerate(packs):
            at = 0
            for number, place in enumerate(pack):
                index = order[place]
                own, prompt = codes.ids[index], codes.prompts[index]
                span = slice(at, at + len(own))
                self.ids[row, span], self.positions[row, span] = own, np.arange(len(own))
                self.documents[row, span] = number
                self.targets[row, at + prompt - 1 : at + len(own) - 1] = own[prompt:]
                at += len(own)

    def batches(self, rows: int, device: torch.device) -> Iterator[list[Tensor]]:
        """Yield ids, positions, documents and targets, each int64 [rows, LENGTH]; the last rows may be left out."""
        held = [torch.from_numpy(each).to(device) for each in (self.ids, self.positions, self.documents, self.targets)]
        for start in range(0, max(len(self.ids) - rows, 0) + 1, rows):
            yield [each[start : start + rows].long() for each in held]


def packed(lengths: list[int]) -> Iterator[list[int]]:
    """Yield groups of indices whose lengths fit into a row, best of a few open rows."""
    open_rows: list[tuple[int, list[int]]] = []
    for index, length in enumerate(lengths):
        fitting = [(room, pack) for room, pack in open_rows if room >= length]
        if fitting:
            room, pack = min(fitting, key=lambda each: each[0])
            open_rows = [each for each in open_rows if each[1] is not pack]
        else:
            room, pack = LENGTH, []
        pack.append(index)
        open_rows.append((room - length, pack))
        if len(open_rows) > 16:
            fullest = min(open_rows, key=lambda each: each[0])
            open_rows = [each for each in open_rows if each[1] is not fullest[1]]
            yield fullest[1]
    yield from (pack for _, pack in open_rows)


def noisy(ids: Tensor) -> Tensor:
    """Replace a share of the audio ids by random ones of the same slot."""
    size = MINI_SNAC.codebook_size
    code = ids - vocabulary.AUDIO
    other = code // size * size + torch.randint_like(ids, size) + vocabulary.AUDIO
    chosen = (code >= 0) & (torch.rand(ids.shape, device=ids.device) < NOISE)
    return torch.where(chosen, other, ids)


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train and write OUT/lm.safetensors."""
    codes = Codes(options.out / "codes.npz")
    rng = np.random.default_rng(options.seed)
    count = len(codes.ids)
    kept = min(HELD_OUT, count // 8)
    held_out = Rows(codes, np.arange(count - kept, count))
    model = Llama().to(device)
    matrices = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if all(weight is not each for each in matrices)]
    muon = Muon(matrices, MUON_RATE)
    adam = torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda")
    loss_of = torch.compile(model, dynamic=False) if options.compile else model
    pace = Pace(options.seconds, options.steps, options.out / "lm.jsonl")
    pace.note(sentences=count, parameters=sum(weight.numel() for weight in model.parameters()))
    average, saved, share = float("nan"), 0.0, 0.0
    while share < 1.0:
        for batch in Rows(codes, rng.permutation(count - kept)).batches(options.rows, device):
            if (share := pace.advance()) >= 1.0:
                break
            factor = pace.factor(share, 100, 0.0)
            muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = MUON_RATE * factor, ADAM_RATE * factor
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(noisy(batch[0]), *batch[1:], Z)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in (muon, adam):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if pace.step % options.report == 0:
                average = float(loss.detach())
                pace.note(loss=round(average, 4))
            if pace.elapsed_s - saved > 60:
                saved = pace.elapsed_s
                save(model, options.out)
                pace.note(held_out=round(measured(model, held_out, options.rows, device), 4))
    save(model, options.out)
    pace.note(done="lm", loss=average, held_out=round(measured(model, held_out, options.rows, device), 4))


@torch.no_grad()
def measured(model: Llama, rows: Rows, size: int, device: torch.device) -> float:
    """Return the loss per id, in nats, without noise and z-loss."""
    with torch.autocast(device.type, torch.bfloat16):
        losses = [float(model(*batch, 0.0)) for batch in rows.batches(min(size, len(rows.ids)), device)]
    return sum(losses) / len(losses)


def save(model: Llama, out: Path) -> None:
    """Write the weights in float32 under their official names."""
    state = {name: value.detach().float().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(state, out / ".lm.safetensors", metadata={"format": "pt"})
    (out / ".lm.safetensors").rename(out / "lm.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=260)
    parser.add_argument("--steps", type=int, help="end by steps instead")
    parser.add_argument("--rows", type=int, default=48, help=f"rows of {LENGTH} ids per step")
    parser.add_argument("--report", type=int, default=50, help="steps between lines of the log")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    train(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
