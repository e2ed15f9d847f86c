"""Training of the codec decoder: `python -m train.codec OUT --seconds 300`.

Reads OUT/sounds.npz; writes OUT/mini with config and tokenizer, OUT/codec.safetensors, OUT/codes.npz and
OUT/codec.jsonl. The encoder, which is not shipped, is arithmetic: the mel spectrum of a frame is quantized by residual
k-means, one codebook per group. The decoder then learns its own vectors for the codes, and the sound of rows of words.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from mstar_qwen3tts.codec.codec import Codec
from scripts.training.codes import codes_of, save_codes
from scripts.training.options import stage_options
from scripts.training.pace import Pace
from scripts.training.spectra import mel_loss

from . import sounds
from .layout import CODEBOOK, GROUPS, write_layout

WEIGHTS: Final = "codec.safetensors"
CODES: Final = "codes.npz"
MINI: Final = "mini"
WORDS_AT_ONCE: Final = 2
RESIDUAL_SCALE: Final = 0.3
"""First values of layer scales and gammas."""


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train and write the decoder. Returns first and last loss."""
    torch.manual_seed(options.seed)
    out, chance = options.out, np.random.default_rng(options.seed)
    config = write_layout(out / MINI)
    spoken = sounds.load(out / sounds.FILE)
    codes = codes_of(spoken, sounds.FRAME, GROUPS, CODEBOOK, options.seed)
    save_codes(codes, out / CODES)
    codec = Codec(config)
    for book in (layer for name, layer in codec.named_parameters() if name.endswith("embedding_sum")):
        nn.init.normal_(book)
    for name, value in codec.named_parameters():
        if name.endswith((".gamma", ".scale")):
            nn.init.constant_(value, RESIDUAL_SCALE)
    trained = [value for name, value in codec.named_parameters() if not name.endswith("cluster_usage")]
    optimizer = torch.optim.AdamW(trained, options.rate, betas=(0.8, 0.99), weight_decay=1e-3)
    pace, losses, keys = Pace(options.seconds, options.steps, out / "codec.jsonl"), [], list(codes)
    while (share := pace.advance()) < 1.0:
        pace.set_rate(optimizer, options.rate, share)
        rows = [[keys[index] for index in chance.integers(len(keys), size=WORDS_AT_ONCE)] for _ in range(options.batch)]
        ids = [np.concatenate([codes[key] for key in row]) for row in rows]
        pcm = [np.concatenate([spoken[key] for key in row]) for row in rows]
        frames = min(map(len, ids))
        given = codec.run(torch.from_numpy(np.stack([each[:frames] for each in ids])), codec.new_state(options.batch))[
            0
        ]
        cut = np.stack([each[: frames * sounds.FRAME] for each in pcm]).astype(np.float32) / 32768
        wanted = torch.from_numpy(cut)
        mel = mel_loss(given, wanted)
        loss = mel + (given - wanted).abs().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(mel.detach()))
        if pace.step % options.report == 0:
            pace.note(mel=round(float(np.mean(losses[-options.report :])), 4))
        if pace.step % (10 * options.report) == 0:
            save(codec, out)
    save(codec, out)
    found = {"first": round(losses[0], 4), "last": round(float(np.mean(losses[-20:])), 4)}
    pace.note(done="codec", seed=options.seed, **found)
    return found


def save(codec: Codec, out: Path) -> None:
    """Write the decoder's weights under their names in a checkpoint."""
    state = {f"decoder.{name}": value.detach().contiguous() for name, value in codec.state_dict().items()}
    part = out / f".{WEIGHTS}"
    save_file(state, part)
    part.rename(out / WEIGHTS)


def main() -> None:
    train(stage_options(__doc__, seconds=300, batch=2, rate=2e-3).parse_args())


if __name__ == "__main__":
    main()
