"""The node `snac_decoder`: windows of audio ids to 16-bit samples. Run by the stateless engine.

Windows of different requests share a batch; each row carries its own seed, noise mode and place in its stream.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from mstar_orpheus.captured import CapturedWindows
from mstar_orpheus.facts import IDS_PER_FRAME, WINDOW_FRAMES
from mstar_orpheus.frames import codes_from_ids, levels_from_codes, misplaced
from mstar_orpheus.noise import GLOBAL, SEEDED, window_noise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mstar_orpheus.snac import Snac

log = logging.getLogger(__name__)

EMITTED: Final = slice(1, 2)
"""Frames of a window that are sent: the second has one frame of context before it and two behind."""
REPORT_EVERY: Final = 1024


class Vocoder(nn.Module):
    """SNAC behind the streaming edge. audio_offset: the id that stands for code 0 of slot 0.

    The facts of each window stay on the host, where what to cut is decided; samples go there in one copy per step.
    """

    misplaced_ids: Tensor

    host_ports: Final = ("step", "first", "last", "flush", "noise", "seed")
    host_outputs: Final = ("pcm",)

    def __init__(self, snac: Snac, audio_offset: int) -> None:
        super().__init__()
        self.snac = snac
        self.audio_offset = audio_offset
        self.register_buffer("misplaced_ids", torch.zeros((), dtype=torch.int64), persistent=False)
        self._windows = 0
        self._reported = 0
        self._captured: CapturedWindows | None = None

    def forward(
        self,
        *,
        window: Tensor,
        step: Tensor,
        first: Tensor,
        last: Tensor,
        flush: Tensor,
        noise: Tensor,
        seed: Tensor,
    ) -> dict[str, Tensor | list[Tensor]]:
        """Decode a batch of windows.

        window: int64 [B, 7 * frames] audio ids. Per row, all [B]: step int64, index of the window in its stream;
        first, last bool, its place in the stream; flush bool, whether the frames at both ends are wanted; noise
        int64, index into NOISE_MODES; seed int64. Returns {"pcm": int16 [B, samples]}, or a list of B tensors where
        the rows differ in length.
        """
        frames = window.shape[1] // IDS_PER_FRAME
        spans = _spans(frames, first, last, flush)
        # The final flush decodes the last window again: it takes that window's noise, so the frames join.
        windows = step - (last & ~first).to(step.dtype)
        has_global = bool((noise == GLOBAL).any())
        usual = all(span == EMITTED for span in spans) and not has_global and frames == WINDOW_FRAMES
        if self._captured is not None and usual:
            facts = torch.stack([key.cpu().to(torch.int64) for key in (noise, seed, windows)])
            made = self._captured.run(window, facts)
            if made is not None:
                self._count(window, first, last)
                return {"pcm": made}
        modes, seeds, places = (key.to(window.device, torch.int64) for key in (noise, seed, windows))
        drawn = window_noise(modes, seeds, places, self.snac.config.noise_lengths(frames), has_global=has_global)
        size = self.snac.config.frame_samples
        if window.is_cuda and all(span == EMITTED for span in spans):
            middle = self.decode(window, drawn, (EMITTED.start * size, EMITTED.stop * size))
            self._count(window, first, last)
            return {"pcm": to_pcm16(middle)}
        samples = self.decode(window, drawn)
        self._count(window, first, last)
        return {"pcm": _cut(to_pcm16(samples), spans, size)}

    def warm_up(self) -> None:
        """On a GPU: capture the usual step, and run the other one once, so that no listener waits for kernels."""
        device = self.misplaced_ids.device
        for rows in (1, 8, 32):
            window = torch.full((rows, WINDOW_FRAMES * IDS_PER_FRAME), self.audio_offset, device=device)
            number, flag = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool)
            modes = torch.full((rows,), SEEDED)
            for flush in (flag, ~flag):
                self(window=window, step=number, first=flag, last=flag, flush=flush, noise=modes, seed=number)
        self._captured = CapturedWindows(self._middle, WINDOW_FRAMES * IDS_PER_FRAME, self.audio_offset, device)
        self.misplaced_ids.zero_()
        self._windows = 0

    def _middle(self, window: Tensor, facts: Tensor) -> Tensor:
        """The usual step: int16 samples of the emitted frame. facts: int64 [3, B], noise mode, seed and place."""
        config = self.snac.config
        lengths = config.noise_lengths(WINDOW_FRAMES)
        drawn = window_noise(facts[0], facts[1], facts[2], lengths, has_global=False)
        keep = (EMITTED.start * config.frame_samples, EMITTED.stop * config.frame_samples)
        return to_pcm16(self.decode(window, drawn, keep))

    def decode(self, window: Tensor, noise: Sequence[Tensor] | None, keep: tuple[int, int] | None = None) -> Tensor:
        """Samples of whole windows, or `keep` of each. window: int64 [B, 7 * frames]. Returns float32 [B, samples]."""
        levels = levels_from_codes(codes_from_ids(window, self.audio_offset, self.snac.config.codebook_size))
        if window.device.type != "cpu":
            return self.snac.decode(levels, noise, keep).squeeze(1)
        # On a CPU one row at a time is faster than a batch (1.5 times at full size), and its bits do not depend on
        # what shares the batch, which batched convolutions do not promise.
        rows = range(window.shape[0])
        parts = [
            self.snac.decode([x[i : i + 1] for x in levels], noise and [x[i : i + 1] for x in noise], keep)
            for i in rows
        ]
        return torch.cat(parts).squeeze(1)

    def _count(self, window: Tensor, first: Tensor, last: Tensor) -> None:
        out = misplaced(window, self.audio_offset, self.snac.config.codebook_size)
        first, last = first.to(window.device), last.to(window.device)
        fresh = torch.where(last & ~first, 0, out[:, -IDS_PER_FRAME:].sum(1))
        self.misplaced_ids += torch.where(first, out.sum(1), fresh).sum()
        before, self._windows = self._windows, self._windows + window.shape[0]
        if before // REPORT_EVERY != self._windows // REPORT_EVERY:
            self._report()

    def _report(self) -> None:
        total = int(self.misplaced_ids)
        if total > self._reported:
            log.warning(
                "%d audio ids have left the slot order in %d windows; they were taken modulo the code book",
                total,
                self._windows,
            )
        self._reported = total


def to_pcm16(samples: Tensor) -> Tensor:
    """Samples in [-1, 1] as int16: clipped, times 32767, truncated toward zero."""
    return (samples.clamp(-1.0, 1.0) * 32767.0).to(torch.int16)


def _spans(frames: int, first: Tensor, last: Tensor, flush: Tensor) -> list[slice]:
    """Frames that each row sends."""
    flags: list[list[bool]] = torch.stack([first, last, flush], dim=1).tolist()
    return [_span(frames, is_first, is_last) if flushes else EMITTED for is_first, is_last, flushes in flags]


def _span(frames: int, is_first: bool, is_last: bool) -> slice:
    start = 0 if is_first else EMITTED.stop if is_last else EMITTED.start
    return slice(start, frames if is_last else EMITTED.stop)


def _cut(pcm: Tensor, spans: list[slice], frame_samples: int) -> Tensor | list[Tensor]:
    cuts = [row[span.start * frame_samples : span.stop * frame_samples] for row, span in zip(pcm, spans, strict=True)]
    if len({len(cut) for cut in cuts}) == 1:
        return torch.stack(cuts)
    return [cut.clone() for cut in cuts]  # a view would keep the whole batch alive
