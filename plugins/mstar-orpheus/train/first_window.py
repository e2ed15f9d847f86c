"""Whether an early first window can be heard: log-spectra of the first sound with and without it.

`python -m train.first_window --weights FOLDER` lets a checkpoint speak held-out sentences in this process, decodes the
first window of each from 4, 3 and 2 frames, and prints one JSON object. Two more distances put these into scale: that
of another seed of the vocoder's noise, which listeners take for the same sound, and that of the next frame.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_orpheus.checkpoint.config import EARLY_FRAMES, IDS_PER_FRAME, WINDOW_FRAMES
from mstar_orpheus.vocoder.noise import NOISE_MODES

from .judge import SAMPLING, written
from .local import LocalSpeaker
from .sentences import held_out
from .spectra import SCALES, mel_filters, spectrum

if TYPE_CHECKING:
    from torch import Tensor

DECIBELS: Final = 20.0
QUIET_DB: Final = 50.0
"""Bands this far below the loudest of the sentence are masked by it, and count as equally quiet."""

SEEDS: Final = 4


@dataclass(frozen=True, slots=True)
class Distance:
    """Root mean square distance of log-mel spectra in decibels over bands and times: mean and largest of sentences.

    joint: the step of samples from the first to the second chunk, as a share of the largest sample.
    """

    mean_db: float
    worst_db: float
    joint: float = 0.0


class FirstWindow:
    """First sounds of a checkpoint, decoded by the node that serves them."""

    def __init__(self, folder: Path) -> None:
        self._speaker = LocalSpeaker(folder, streams=True)
        self._vocoder = self._speaker.vocoder

    def ids(self, text: str, voice: str, number: int) -> Tensor:
        """Return the audio ids of a sentence, int64 [7 * frames]."""
        return torch.tensor(self._speaker.ids(written(text), voice, number, SAMPLING))

    def chunk(self, ids: Tensor, frames: int, *, start: int = 0, seed: int = 0) -> Tensor:
        """Return the samples that a window of so many frames sends, float32 [N] in [-1, 1]."""
        window = ids[start * IDS_PER_FRAME : (start + frames) * IDS_PER_FRAME][None]
        row = {"step": start, "first": not start, "last": False, "flush": False, "seed": seed}
        given = {name: np.array([value]) for name, value in row.items()}
        pcm = self._vocoder(window=window, noise=np.array([NOISE_MODES.index("seeded")]), **given)["pcm"][0]
        assert isinstance(pcm, torch.Tensor)
        return pcm.float() / 32768


def levels(samples: Tensor, loudest: float) -> list[Tensor]:
    """Return the mel levels in decibels of each scale, cut off QUIET_DB below the loudest. samples: [N]."""
    found = []
    for size, bands in SCALES:
        if size <= len(samples):
            magnitude = spectrum(samples[None], size, size // 4).abs()
            level = DECIBELS * (mel_filters(size, bands, "cpu") @ magnitude).clamp(min=1e-9).log10()
            found.append(level.clamp(min=loudest - QUIET_DB))
    return found


def distance(first: Tensor, second: Tensor, loudest: float) -> float:
    """Return the distance of two sounds in decibels: the mean of all scales."""
    pairs = zip(levels(first, loudest), levels(second, loudest), strict=True)
    return float(np.mean([float((one - two).square().mean().sqrt()) for one, two in pairs]))


def loudest_of(sound: Tensor) -> float:
    """Return the greatest mel level of a sound in decibels."""
    return max(float(level.max()) for level in levels(sound, -200.0))


def compared(folder: Path, texts: Sequence[str], voices: Sequence[str]) -> dict[str, Distance]:
    """Return the distances of first sounds from those of the usual window, by their cause."""
    source = FirstWindow(folder)
    found: dict[str, list[tuple[float, float]]] = {}
    with torch.inference_mode():
        for voice in voices:
            for number, text in enumerate(texts):
                ids = source.ids(text, voice, number)
                if len(ids) < (WINDOW_FRAMES + 1) * IDS_PER_FRAME:
                    continue
                usual, second = source.chunk(ids, WINDOW_FRAMES), source.chunk(ids, WINDOW_FRAMES, start=1)
                windows = range(len(ids) // IDS_PER_FRAME - WINDOW_FRAMES + 1)
                whole = torch.cat([source.chunk(ids, WINDOW_FRAMES, start=start) for start in windows])
                loudest, peak = loudest_of(whole), float(whole.abs().max())
                others = {f"{frames} frames": [source.chunk(ids, frames)] for frames in sorted(EARLY_FRAMES)}
                others["another seed"] = [source.chunk(ids, WINDOW_FRAMES, seed=seed + 1) for seed in range(SEEDS)]
                others["the next frame"] = [second]
                others["no change"] = [usual]
                for name, chunks in others.items():
                    away = float(np.mean([distance(chunk, usual, loudest) for chunk in chunks]))
                    joint = float(np.mean([float((second[0] - chunk[-1]).abs()) for chunk in chunks])) / peak
                    found.setdefault(name, []).append((away, joint))
    return {
        name: Distance(
            round(float(np.mean([away for away, _ in pairs])), 3),
            round(max(away for away, _ in pairs), 3),
            round(float(np.mean([joint for _, joint in pairs])), 4),
        )
        for name, pairs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="exported checkpoint")
    parser.add_argument("--voice", nargs="+", default=["tara"], help="official voice names")
    parser.add_argument("--sentences", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="seed of the training data")
    options = parser.parse_args()
    texts = held_out(options.sentences, options.seed)
    found = compared(options.weights, texts, options.voice)
    facts = {"sentences": len(texts) * len(options.voice), "scales": [size for size, _ in SCALES]}
    rows = {
        name: {"mean_db": each.mean_db, "worst_db": each.worst_db, "joint": each.joint} for name, each in found.items()
    }
    print(json.dumps({**facts, "distances": rows}))


if __name__ == "__main__":
    main()
