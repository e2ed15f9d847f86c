"""Training of the miniature codec, and encoding of the data with it.

`python -m train.codec DATA OUT --seconds 190` writes OUT/codec.pt; `python -m train.codec DATA OUT --encode` writes
OUT/codes.npz, the training data of the language model. Phases: reconstruction, then discriminators from 30 % of the
time, then from 55 % encoder and codebooks frozen and every other step decoded in streaming windows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_orpheus.checkpoint.config import WINDOW_FRAMES
from mstar_orpheus.vocoder.frames import LEVEL_SLOTS
from mstar_orpheus.vocoder.snac import Snac
from scripts.training.pace import Pace

from .codec_parts import MINI_SNAC, Coder, Critics, critic_loss, fooling_loss
from .data import FRAME, lines
from .spectra import mel_loss

if TYPE_CHECKING:
    from torch import Tensor

CROP: Final = 12
"""Frames of a training crop: 1.02 s."""
CRITICS_FROM: Final = 0.30
FROZEN_FROM: Final = 0.55
RATE: Final = 6e-4
MEL_WEIGHT, FEATURE_WEIGHT, COMMIT_WEIGHT = 15.0, 2.0, 1.0
PER_FRAME: Final = 4


class Sounds:
    """Shards of speech on the device. Reads one more file when it is asked, while the data is still being made."""

    def __init__(self, folder: Path, device: torch.device, most: int) -> None:
        self._folder, self._device, self._most = folder, device, most
        self._read: dict[str, Tensor] = {}

    def wait(self, count: int) -> None:
        """Read `count` shards, or all once none appears for 5 s. Raises FileNotFoundError after 60 s without any."""
        last = time.monotonic()
        while len(self._read) < count and time.monotonic() - last < (5 if self._read else 60):
            if self.refresh():
                last = time.monotonic()
            else:
                time.sleep(0.2)
        if not self._read:
            raise FileNotFoundError(f"{self._folder} has no shards: run train.data first")

    def refresh(self) -> bool:
        """Read one new shard. Returns whether there was one."""
        new = [path for path in sorted(self._folder.glob("shard-*.npz")) if path.name not in self._read]
        if not new or len(self._read) >= self._most:
            return False
        with np.load(new[0]) as values:
            self._read[new[0].name] = torch.from_numpy(values["pcm"]).to(self._device)
        return True

    def crops(self, count: int, frames: int) -> Tensor:
        """Return random crops, float32 [count, samples] at random volume, from one shard."""
        shards = list(self._read.values())
        pcm = shards[int(torch.randint(len(shards), ()))]
        starts = torch.randint(len(pcm) - frames * FRAME, (count, 1)).to(self._device)
        crops = pcm[starts + torch.arange(frames * FRAME, device=self._device)].float() / 32768
        louder: Tensor = crops * (0.7 + 0.4 * torch.rand(count, 1, device=self._device))
        return louder


def noise(rows: int, frames: int, device: torch.device) -> list[Tensor]:
    """Return the noise of all blocks of the decoder."""
    return [torch.randn(rows, 1, length, device=device) for length in MINI_SNAC.noise_lengths(frames)]


def whole(snac: Snac, latent: Tensor) -> Tensor:
    """Decode a latent at once, [B, frames * FRAME]."""
    rows, frames = latent.shape[0], latent.shape[2] // PER_FRAME
    samples: Tensor = snac.decoder(latent, noise(rows, frames, latent.device))
    return samples[:, 0]


def streamed(snac: Snac, latent: Tensor) -> Tensor:
    """Decode as serving does: windows of 4 frames, of which the second is sent. Returns [B, (frames - 3) * FRAME]."""
    windows = latent.unfold(2, WINDOW_FRAMES * PER_FRAME, PER_FRAME).permute(0, 2, 1, 3)
    rows, count = windows.shape[:2]
    samples: Tensor = snac.decoder(
        windows.flatten(0, 1), noise(rows * count, WINDOW_FRAMES, latent.device), (FRAME, 2 * FRAME)
    )
    sent: Tensor = samples.reshape(rows, count * FRAME)
    return sent


class CodecTraining:
    """The codec, its discriminators and their optimizers. Owned by `train`."""

    def __init__(self, device: torch.device) -> None:
        self.snac = Snac(MINI_SNAC).to(device)
        self.coder = Coder(self.snac).to(device)
        self.critics = Critics().to(device)
        made = [*self.snac.parameters(), *self.coder.parameters()]
        self.made = [each for each in made if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.made, RATE, betas=(0.8, 0.99), weight_decay=1e-3)
        self.critic_optimizer = torch.optim.AdamW(self.critics.parameters(), 3e-4, betas=(0.8, 0.99))

    def step(self, real: Tensor, share: float, factor: float, *, streams: bool) -> dict[str, Tensor]:
        """Run one step on crops [B, N]. Returns the losses."""
        for optimizer, rate in ((self.optimizer, RATE), (self.critic_optimizer, 3e-4)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        is_frozen = share >= FROZEN_FROM
        with torch.set_grad_enabled(not is_frozen):
            latent, _, commit = self.coder(real, learns=not is_frozen)
        made = streamed(self.snac, latent) if streams else whole(self.snac, latent)
        if streams:
            real = real[:, FRAME : -2 * FRAME]
        found = {"mel": mel_loss(made, real), "commit": commit}
        loss = MEL_WEIGHT * found["mel"] + (0 if is_frozen else COMMIT_WEIGHT * commit)
        if share >= CRITICS_FROM:
            found["critic"] = self._judge(real, made)
            score, features = fooling_loss(self.critics.score(real), self.critics.score(made))
            loss = loss + score + FEATURE_WEIGHT * features
            found["fooling"] = score
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        found["norm"] = torch.nn.utils.clip_grad_norm_(self.made, 10.0)
        self.optimizer.step()
        return found

    def _judge(self, real: Tensor, made: Tensor) -> Tensor:
        loss = critic_loss(self.critics.score(real), self.critics.score(made.detach()))
        self.critic_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.critic_optimizer.step()
        return loss


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train the codec and write OUT/codec.pt, every 60 s too."""
    sounds = Sounds(options.data, device, options.shards)
    sounds.wait(min(options.shards, 16))
    torch.backends.cudnn.benchmark = True  # all steps have one of two shapes
    training = CodecTraining(device)
    pace = Pace(options.seconds, options.steps, options.out / "codec.jsonl")
    saved = 0.0
    while (share := pace.advance()) < 1.0:
        streams = share >= FROZEN_FROM and pace.step % 2 == 0
        crops = sounds.crops(options.batch, CROP)
        found = training.step(crops, share, pace.factor(share, 100, 0.0), streams=streams)
        if pace.step % 20 == 0:
            sounds.refresh()
        if pace.step % options.report == 0:
            pace.note(streams=streams, **{name: round(float(value.detach()), 4) for name, value in found.items()})
        if pace.elapsed_s - saved > 60:
            saved = pace.elapsed_s
            save(training, options.out)
    save(training, options.out)
    pace.note(done="codec", codes=used(training, sounds.crops(options.batch, CROP)))


def used(training: CodecTraining, samples: Tensor) -> list[int]:
    """Return how many codes of each level occur in one batch."""
    with torch.no_grad():
        return [int(codes.unique().numel()) for codes in training.coder(samples)[1]]


def save(training: CodecTraining, out: Path) -> None:
    """Write decoder and coder, which `load` reads."""
    part = out / ".codec.pt"
    torch.save({"snac": training.snac.state_dict(), "coder": training.coder.state_dict()}, part)
    part.rename(out / "codec.pt")


def load(out: Path, device: torch.device) -> tuple[Snac, Coder]:
    """Return the trained decoder and coder."""
    snac = Snac(MINI_SNAC)
    coder = Coder(snac)
    state: Any = torch.load(out / "codec.pt", map_location="cpu", weights_only=True)
    snac.load_state_dict(state["snac"])
    coder.load_state_dict(state["coder"])
    return snac.to(device).eval(), coder.to(device).eval()


@torch.inference_mode()
def encode(options: argparse.Namespace, device: torch.device) -> None:
    """Encode all shards and write OUT/codes.npz: codes int16 [frames * 7], ends int64 [n], texts and voices."""
    start = time.monotonic()
    _, coder = load(options.out, device)
    paths = sorted(options.data.glob("shard-*.npz"))
    codes, lengths, texts, voices = list[np.ndarray](), list[int](), list[str](), list[str]()
    with ThreadPoolExecutor(4) as pool:
        for pcm, ends, own_texts, own_voices in pool.map(_read, paths):
            for each in encoded(coder, pcm, ends, device):
                codes.append(each)
                lengths.append(len(each))
            texts += own_texts
            voices += own_voices
    np.savez(
        options.out / "codes.npz",
        codes=np.concatenate(codes),
        ends=np.cumsum(lengths),
        texts=np.frombuffer("\n".join(texts).encode(), np.uint8),
        voices=np.frombuffer("\n".join(voices).encode(), np.uint8),
        seed=options.seed,
    )
    print(f"{len(texts)} sentences, {sum(lengths)} ids, in {time.monotonic() - start:.0f} s", flush=True)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, list[str], list[str]]:
    with np.load(path) as values:
        return values["pcm"], values["ends"], lines(values["texts"]), lines(values["voices"])


def encoded(coder: Coder, pcm: np.ndarray, ends: np.ndarray, device: torch.device, rows: int = 64) -> list[np.ndarray]:
    """Return the codes of each sound in slot order, int16 [frames * 7]."""
    starts = np.concatenate([[0], ends[:-1]])
    order = np.argsort(ends - starts)
    found: dict[int, np.ndarray] = {}
    for batch in _batches(order, rows):
        longest = int(max(ends[index] - starts[index] for index in batch))
        padded = np.zeros((len(batch), longest), np.int16)
        for row, index in enumerate(batch):
            padded[row, : ends[index] - starts[index]] = pcm[starts[index] : ends[index]]
        _, levels, _ = coder(torch.from_numpy(padded).to(device).float() / 32768)
        ids = in_slots(levels).short().cpu().numpy()
        for row, index in enumerate(batch):
            found[int(index)] = ids[row, : (ends[index] - starts[index]) // FRAME * 7]
    return [found[index] for index in range(len(ends))]


def _batches(order: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    for start in range(0, len(order), rows):
        yield order[start : start + rows]


def in_slots(levels: list[Tensor]) -> Tensor:
    """Return codes in the order of a frame's slots, [B, frames * 7]; the inverse of `levels_from_codes`."""
    rows, frames = levels[0].shape
    ids = levels[0].new_zeros(rows, frames, 7)
    for codes, slots in zip(levels, LEVEL_SLOTS, strict=True):
        ids[:, :, list(slots)] = codes.view(rows, frames, len(slots))
    return ids.flatten(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--encode", action="store_true", help="encode the data with OUT/codec.pt")
    parser.add_argument("--seconds", type=float, default=190)
    parser.add_argument("--steps", type=int, help="end by steps instead")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--shards", type=int, default=48, help="shards of data for training at most")
    parser.add_argument("--report", type=int, default=50, help="steps between lines of the log")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (encode if options.encode else train)(options, device)


if __name__ == "__main__":
    main()
