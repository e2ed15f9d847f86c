"""Node `snac_decoder`: windows of audio ids to 16-bit samples. Run by the stateless engine.

Windows of different requests share a batch. Each window has its own seed, noise mode and position in its stream.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import nn

from mstar_core.engine.module import NodeModule
from mstar_orpheus.checkpoint.config import EARLY_FRAMES, IDS_PER_FRAME, WINDOW_FRAMES
from mstar_orpheus.vocoder.cuda_graphs import NOISE_PARAMS, CapturedWindows, first_buckets, later_buckets
from mstar_orpheus.vocoder.frames import codes_from_ids, levels_from_codes, misplaced
from mstar_orpheus.vocoder.noise import GLOBAL, window_noise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_orpheus.vocoder.fused_decoder import FusedDecoder
    from mstar_orpheus.vocoder.snac import Snac

log = logging.getLogger(__name__)

EMITTED: Final = slice(1, 2)
"""Frames of a window that are sent: the second one, which has one frame of context before it and two after it."""
LENGTHS: Final = tuple(frames * IDS_PER_FRAME for frames in (WINDOW_FRAMES, *EARLY_FRAMES))
"""Ids of the windows that are captured, the usual one first."""

REPORT_EVERY: Final = 1024

Given = np.ndarray | torch.Tensor


class Vocoder(nn.Module, NodeModule):
    """SNAC behind the streaming edge. audio_offset: the id that stands for code 0 of slot 0.

    Inputs stay on the host, which selects the frames to send. They go to the device in one copy.
    """

    host_ports = ("window", "step", "first", "last", "flush", "noise", "seed")
    host_outputs = ("pcm",)

    def __init__(self, snac: Snac, audio_offset: int) -> None:
        super().__init__()
        self.snac = snac
        self.audio_offset = audio_offset
        self.misplaced_ids = 0
        self._windows = 0
        self._reported = 0
        self._fused: FusedDecoder | None = None
        self._captured: CapturedWindows | None = None

    def forward(
        self,
        *,
        window: Given,
        step: Given,
        first: Given,
        last: Given,
        flush: Given,
        noise: Given,
        seed: Given,
    ) -> dict[str, Tensor | list[Tensor | None]]:
        """Decode a batch of windows.

        window: int64 [B, 7 * frames] audio ids. Per window, all [B]: step int64, index of the window in its stream;
        first, last bool, its position in the stream; flush bool, whether to send the frames at both ends; noise int64,
        index into NOISE_MODES; seed int64. All on the host. Returns {"pcm": int16 [B, samples]}, or a list of B tensors
        if the lengths differ, with None for a window without frames to send. On CUDA the samples are valid until
        the next call.
        """
        ids, modes, seeds = (np.asarray(values, dtype=np.int64) for values in (window, noise, seed))
        is_first, is_last, flushes = (np.asarray(values, dtype=np.bool_) for values in (first, last, flush))
        # The final flush decodes the last window again with the same noise, so that the frames are continuous.
        places = np.asarray(step, dtype=np.int64) - (is_last & ~is_first)
        noise_params = np.array((modes, seeds, places))
        self._count(ids, is_first, is_last)
        frames = ids.shape[1] // IDS_PER_FRAME
        if not flushes.any() and frames > EMITTED.start:
            return {"pcm": self._decoded(ids, noise_params, EMITTED)}
        spans = [
            _span(frames, starts, ends) if flushed else EMITTED
            for starts, ends, flushed in zip(is_first.tolist(), is_last.tolist(), flushes.tolist(), strict=True)
        ]
        return {"pcm": self._by_span(ids, noise_params, spans)}

    def trace(self, compiling: Compiling) -> None:
        """See NodeModule: decodes windows of the sizes that are captured, the first and the last of them first."""
        device = self._device()
        if device.type != "cuda":
            return
        self._on_cuda()
        sizes = [*first_buckets(LENGTHS), *later_buckets(LENGTHS)]
        for count, (batch, ids) in enumerate([sizes[0], sizes[-1], *sizes[1:-1]]):
            noise_params = torch.ones((NOISE_PARAMS, batch), dtype=torch.int64, device=device)
            self._middle(torch.zeros((batch, ids), dtype=torch.int64, device=device), noise_params)
            if count == 1 and not compiling.has_missed:
                return

    def warm_up(self) -> None:
        """Capture the first CUDA graphs on a GPU and load the kernels of the others, so that no request waits."""
        device = self._device()
        if device.type == "cuda":
            self._on_cuda()
            self._captured = CapturedWindows(self._middle, LENGTHS, self.audio_offset, device)

    def idle(self) -> bool:
        """Capture one more batch size. Returns whether more are left."""
        return self._captured is not None and self._captured.idle()

    def _by_span(self, ids: np.ndarray, noise_params: np.ndarray, spans: list[slice]) -> Tensor | list[Tensor | None]:
        """Decode windows that send different frames separately, so that each computes only what it sends."""
        sounds: list[Tensor | None] = [None] * len(spans)
        for span in dict.fromkeys((part.start, part.stop) for part in spans):
            chosen = [index for index, part in enumerate(spans) if (part.start, part.stop) == span]
            if span[0] >= span[1]:
                continue
            samples = self._decoded(ids[chosen], noise_params[:, chosen], slice(*span))
            for index, sound in zip(chosen, samples.clone(), strict=True):
                sounds[index] = sound
        whole = [sound for sound in sounds if sound is not None]
        if len(whole) == len(sounds) and len({len(sound) for sound in whole}) == 1:
            return torch.stack(whole)
        return sounds

    def _decoded(self, ids: np.ndarray, noise_params: np.ndarray, span: slice) -> Tensor:
        """Decode frames `span` of each window to int16 samples on the module's device. noise_params: int64 [3, B]."""
        frames, size = ids.shape[1] // IDS_PER_FRAME, self.snac.config.frame_samples
        keep = (span.start * size, span.stop * size)
        has_global = bool((noise_params[0] == GLOBAL).any())
        if self._captured is not None and span == EMITTED and not has_global:
            replayed = self._captured.run(ids, noise_params)
            if replayed is not None:
                return replayed
        device = self._device()
        window, params = (torch.from_numpy(np.ascontiguousarray(values)).to(device) for values in (ids, noise_params))
        if device.type == "cuda" and not has_global:
            fused = self._on_cuda()
            return fused.decode(window, fused.seeded_noise(params, frames, keep), keep, is_pcm=True)
        lengths = self.snac.config.noise_lengths(frames)
        drawn = window_noise(params[0], params[1], params[2], lengths, has_global=has_global)
        if device.type == "cuda":
            return to_pcm16(self.decode(window, drawn, keep))
        return to_pcm16(self.decode(window, drawn)[:, keep[0] : keep[1]])

    def _device(self) -> torch.device:
        entry = self.snac.decoder.model[0]
        assert isinstance(entry, nn.Conv1d)
        return entry.weight.device

    def _middle(self, window: Tensor, noise_params: Tensor) -> Tensor:
        """Decode the emitted frame on CUDA: int16 samples. noise_params: int64 [3, B], mode, seed, window index."""
        fused, size = self._on_cuda(), self.snac.config.frame_samples
        frames, keep = window.shape[1] // IDS_PER_FRAME, (EMITTED.start * size, EMITTED.stop * size)
        return fused.decode(window, fused.seeded_noise(noise_params, frames, keep), keep, is_pcm=True)

    def _on_cuda(self) -> FusedDecoder:
        if self._fused is None:
            from mstar_orpheus.vocoder.fused_decoder import FusedDecoder  # needs triton, which comes with CUDA

            self._fused = FusedDecoder(self.snac, self.audio_offset)
        return self._fused

    def decode(self, window: Tensor, noise: Sequence[Tensor] | None, keep: tuple[int, int] | None = None) -> Tensor:
        """Decode whole windows, or samples `keep` of each: float32 [B, samples]. window: int64 [B, 7 * frames].

        noise: one float32 [B, 1, T] per block, see `Snac.decode`; None for no noise.
        """
        if window.is_cuda:
            frames = window.shape[1] // IDS_PER_FRAME
            keep = keep or (0, frames * self.snac.config.frame_samples)
            fused = self._on_cuda()
            return fused.decode(window, None if noise is None else fused.cut_noise(noise, frames, keep), keep)
        levels = levels_from_codes(codes_from_ids(window, self.audio_offset, self.snac.config.codebook_size))
        # On a CPU one window at a time is 1.5 times as fast as a batch, and its bits do not depend on the batch, which
        # batched convolutions do not guarantee.
        windows = range(window.shape[0])
        parts = [
            self.snac.decode([x[i : i + 1] for x in levels], noise and [x[i : i + 1] for x in noise], keep)
            for i in windows
        ]
        return torch.cat(parts).squeeze(1)

    def _count(self, ids: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
        """Count ids outside their slots once, although windows overlap: only a window's last frame is new."""
        out = misplaced(ids, self.audio_offset, self.snac.config.codebook_size)
        if out.any():
            fresh = out[:, -IDS_PER_FRAME:].sum(1) * ~(last & ~first)
            self.misplaced_ids += int(np.where(first, out.sum(1), fresh).sum())
        before, self._windows = self._windows, self._windows + len(ids)
        if before // REPORT_EVERY != self._windows // REPORT_EVERY and self.misplaced_ids > self._reported:
            log.warning(
                "%d audio ids in %d windows were outside their slots; their codes were taken modulo the codebook size",
                self.misplaced_ids,
                self._windows,
            )
            self._reported = self.misplaced_ids


def to_pcm16(samples: Tensor) -> Tensor:
    """Convert samples in [-1, 1] to int16: clip, multiply by 32767, truncate toward zero."""
    return (samples.clamp(-1.0, 1.0) * 32767.0).to(torch.int16)


def _span(frames: int, is_first: bool, is_last: bool) -> slice:
    """Return the frames that a window of a flushing request sends; empty if an early window has sent all of them."""
    start = 0 if is_first else EMITTED.stop if is_last else EMITTED.start
    return slice(start, frames if is_last else EMITTED.stop)
