"""Training of Code2Wav as a codec decoder: `python -m train.codec OUT --seconds 100`.

Reads OUT/sounds.npz; writes OUT/mini with config and tokenizer, OUT/codec.safetensors, OUT/codes.npz and
OUT/codec.jsonl. The encoder, which is not shipped, is arithmetic: the mel spectrum of a frame is quantized by residual
k-means, one codebook per code group. Code2Wav then learns its own vectors for the codes, and the sound of answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from mstar_qwen3omni.vocoder.decoder import decoded
from scripts.training.codes import codes_of, save_codes
from scripts.training.options import stage_options
from scripts.training.pace import Pace
from scripts.training.spectra import mel_loss

from . import sounds
from .layout import CODEBOOK, GROUPS, write_files
from .nodes import Nodes, device_of
from .thinker import MINI

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_qwen3omni.vocoder.code2wav import Code2Wav
    from scripts.training.codes import Codes

WEIGHTS: Final = "codec.safetensors"
CODES: Final = "codes.npz"
WAVE_WEIGHT: Final = 1.0


def decode(vocoder: Code2Wav, codes: Tensor) -> Tensor:
    """Decode whole answers with gradients: [B, samples]. codes: [B, frames, GROUPS]."""
    return decoded(vocoder.decoder, vocoder.frames(codes))


def padded(codes: dict[tuple[str, str], Codes], answers: dict[tuple[str, str], sounds.Pcm]) -> tuple[Tensor, Tensor]:
    """Return codes [n, frames, GROUPS] and samples [n, frames * FRAME]; short answers go on with silence."""
    longest = max(map(len, codes.values()))
    silent = next(iter(codes.values()))[-1]
    ids = np.stack([np.concatenate([each, np.tile(silent, (longest - len(each), 1))]) for each in codes.values()])
    pcm = np.stack([np.pad(answers[key], (0, longest * sounds.FRAME - len(answers[key]))) for key in codes])
    return torch.from_numpy(ids), torch.from_numpy(pcm.astype(np.float32) / 32768)


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train and write the vocoder. Returns first and last loss."""
    torch.manual_seed(options.seed)
    device, out = device_of(options.device), options.out
    config = write_files(out / MINI)
    made = sounds.load(out / sounds.FILE)
    codes = codes_of(made.answers, sounds.FRAME, GROUPS, CODEBOOK, options.seed)
    save_codes(codes, out / CODES)
    ids, pcm = (each.to(device) for each in padded(codes, made.answers))
    lengths = torch.tensor([len(each) for each in codes.values()])
    vocoder = Nodes(config).vocoder.to(device)
    optimizer = torch.optim.AdamW(vocoder.parameters(), options.rate, betas=(0.8, 0.99), weight_decay=1e-3)
    pace, losses = Pace(options.seconds, options.steps, out / "codec.jsonl"), []
    while (share := pace.advance()) < 1.0:
        pace.set_rate(optimizer, options.rate, share)
        chosen = torch.randperm(len(ids))[: options.batch]
        frames = int(lengths[chosen].max())
        chosen = chosen.to(device)
        given = decode(vocoder, ids[chosen, :frames])
        wanted = pcm[chosen, : given.shape[1]]
        mel = mel_loss(given, wanted)
        loss = mel + WAVE_WEIGHT * (given - wanted).abs().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vocoder.parameters(), 1.0)
        optimizer.step()
        losses.append(float(mel.detach()))
        if pace.step % options.report == 0:
            pace.note(mel=round(float(np.mean(losses[-options.report :])), 4))
        if pace.step % (20 * options.report) == 0:
            save(vocoder, out)
    save(vocoder, out)
    found = {"first": round(losses[0], 4), "last": round(float(np.mean(losses[-20:])), 4)}
    pace.note(done="codec", seed=options.seed, device=device.type, **found)
    return found


def save(vocoder: Code2Wav, out: Path) -> None:
    """Write the vocoder's weights under the names of `Nodes`."""
    state = {f"Code2Wav.{name}": value.detach().cpu().contiguous() for name, value in vocoder.state_dict().items()}
    part = out / f".{WEIGHTS}"
    save_file(state, part)
    part.rename(out / WEIGHTS)


def main() -> None:
    parser = stage_options(__doc__, seconds=100, batch=8, rate=2e-3)
    parser.add_argument("--device", default="auto")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
