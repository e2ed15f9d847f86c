"""Parts of the codec that are trained with the shipped decoder and not shipped: encoder, quantizer, discriminator."""

from __future__ import annotations

from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar_orpheus.checkpoint.config import VQ_STRIDES
from mstar_orpheus.vocoder.snac import Codebook, Snac, SnacConfig

from .spectra import log_mel, spectrum

MINI_SNAC: Final = SnacConfig(
    latent=192, width=192, rates=(8, 8, 4, 2), codebook_size=512, codebook_dim=8, sample_rate=24000
)
WIDTH: Final = 256
BLOCKS: Final = 6
DECAY: Final = 0.99
DEAD: Final = 0.1
"""Moving count of uses per step below which a code is replaced."""
MEL: Final = (1024, 128, 80)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of [B, C, T]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class EncoderBlock(nn.Module):
    """Residual block of a depthwise convolution and an MLP over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(width, width, 7, padding=3, groups=width),
            ChannelNorm(width),
            nn.Conv1d(width, 3 * width, 1),
            nn.GELU(),
            nn.Conv1d(3 * width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y


class Encoder(nn.Module):
    """Samples [B, N] to the latent [B, latent, N / 512], from waveform and mel spectrum."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.mel = nn.Sequential(
            nn.Conv1d(MEL[2], WIDTH, 5, padding=2), nn.GELU(), nn.Conv1d(WIDTH, WIDTH, 8, 4, padding=2)
        )
        self.wave = nn.Sequential(
            nn.Conv1d(1, 32, 16, 8, padding=4),
            nn.GELU(),
            nn.Conv1d(32, 96, 16, 8, padding=4),
            nn.GELU(),
            nn.Conv1d(96, WIDTH, 16, 8, padding=4),
        )
        self.body = nn.Sequential(*(EncoderBlock(WIDTH) for _ in range(BLOCKS)), ChannelNorm(WIDTH))
        self.out = nn.Conv1d(WIDTH, latent, 1)

    def forward(self, samples: Tensor) -> Tensor:
        mel = log_mel(samples, *MEL)[:, :, : samples.shape[1] // MEL[1]]
        latent: Tensor = self.out(self.body(self.mel(mel * 0.3 + 1) + self.wave(samples[:, None] * 4)))
        return latent


class Coder(nn.Module):
    """Encoder and residual quantizer over the codebooks of a `Snac`, which moving averages train.

    The codebook tables and their averages are the state; revival replaces unused codes by inputs of the batch.
    """

    counts: Tensor
    sums: Tensor

    def __init__(self, snac: Snac) -> None:
        super().__init__()
        config = snac.config
        self.snac = [snac]  # a list, so that the decoder is not a part of this module
        self.encoder = Encoder(config.latent)
        self.projections = nn.ModuleList(nn.Conv1d(config.latent, config.codebook_dim, 1) for _ in VQ_STRIDES)
        levels = len(VQ_STRIDES)
        self.register_buffer(
            "counts", torch.zeros(levels, config.codebook_size)
        )  # all dead: the first batch fills them
        self.register_buffer("sums", torch.zeros(levels, config.codebook_size, config.codebook_dim))
        for level, book in enumerate(self._books()):
            book.codebook.weight.requires_grad_(False)
            self.sums[level] = book.codebook.weight

    def forward(self, samples: Tensor, *, learns: bool = False) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return latent [B, latent, T], codes by level and the commitment loss. samples: [B, N], whole frames."""
        residual = self.encoder(samples)
        latent, codes, losses = torch.zeros_like(residual), list[Tensor](), list[Tensor]()
        for level, (book, stride) in enumerate(zip(self._books(), VQ_STRIDES, strict=True)):
            point = self.projections[level](F.avg_pool1d(residual, stride))
            chosen, nearest = self._nearest(point, book.codebook.weight)
            if learns:
                self._learn(level, point, chosen, book.codebook.weight)
            losses.append(F.mse_loss(point, nearest))
            made: Tensor = book.out_proj(point + (nearest - point).detach()).repeat_interleave(stride, dim=2)
            latent, residual = latent + made, residual - made
            codes.append(chosen)
        return latent, codes, torch.stack(losses).mean()

    def _books(self) -> list[Codebook]:
        return cast("list[Codebook]", list(self.snac[0].quantizer.quantizers))

    @staticmethod
    def _nearest(point: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        flat = point.detach().transpose(1, 2).flatten(0, 1)
        chosen = torch.cdist(flat, table).argmin(1)
        shape = (point.shape[0], point.shape[2])
        return chosen.view(shape), table[chosen].view(*shape, -1).transpose(1, 2).detach()

    @torch.no_grad()
    def _learn(self, level: int, point: Tensor, chosen: Tensor, table: Tensor) -> None:
        flat, index = point.transpose(1, 2).flatten(0, 1), chosen.flatten()
        seen = torch.zeros_like(self.counts[level]).index_add_(0, index, torch.ones_like(flat[:, 0]))
        total = torch.zeros_like(self.sums[level]).index_add_(0, index, flat)
        self.counts[level].lerp_(seen, 1 - DECAY)
        self.sums[level].lerp_(total, 1 - DECAY)
        dead = self.counts[level] < DEAD
        fresh = flat[torch.randint(len(flat), (len(table),), device=flat.device)]
        self.counts[level].masked_fill_(dead, 1.0)
        self.sums[level].copy_(torch.where(dead[:, None], fresh, self.sums[level]))
        table.copy_(self.sums[level] / self.counts[level][:, None])


class SpectrumCritic(nn.Module):
    """Discriminator of one FFT size, over real and imaginary parts."""

    def __init__(self, size: int, width: int = 24) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(2, width, (7, 5), padding=(3, 2)),
                nn.Conv2d(width, width, (5, 5), (2, 1), padding=(2, 2)),
                nn.Conv2d(width, width, (5, 5), (2, 2), padding=(2, 2)),
                nn.Conv2d(width, width, (5, 3), (2, 2), padding=(2, 1)),
                nn.Conv2d(width, 1, 3, padding=1),
            ]
        )

    def forward(self, samples: Tensor) -> list[Tensor]:
        """Return the features of each layer, the last one the score. samples: [B, N]."""
        parts = torch.view_as_real(spectrum(samples, self.size, self.size // 4)).permute(0, 3, 1, 2)
        x, features = parts / self.size**0.5, list[Tensor]()
        for layer in self.layers:
            x = layer(x)
            features.append(x)
            x = F.leaky_relu(x, 0.1)
        return features


class Critics(nn.ModuleList):
    """Discriminators of three FFT sizes."""

    def __init__(self) -> None:
        super().__init__(SpectrumCritic(size) for size in (512, 1024, 2048))

    def score(self, samples: Tensor) -> list[list[Tensor]]:
        """Return the features of each discriminator."""
        return [critic(samples) for critic in self]


def critic_loss(real: list[list[Tensor]], made: list[list[Tensor]]) -> Tensor:
    """Return the least-squares loss of the discriminators."""
    pairs = zip(real, made, strict=True)
    return torch.stack([(1 - a[-1]).square().mean() + b[-1].square().mean() for a, b in pairs]).mean()


def fooling_loss(real: list[list[Tensor]], made: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the decoder's adversarial loss and its distance of features."""
    score = torch.stack([(1 - each[-1]).square().mean() for each in made]).mean()
    pairs = [
        (a.detach(), b) for one, two in zip(real, made, strict=True) for a, b in zip(one[:-1], two[:-1], strict=True)
    ]
    return score, torch.stack([(a - b).abs().mean() / (a.abs().mean() + 1e-6) for a, b in pairs]).mean()
