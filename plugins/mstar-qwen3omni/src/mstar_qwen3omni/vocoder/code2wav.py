"""Node `Code2Wav`: windows of codec frames to 16-bit samples at 24 kHz. Run by the stateless engine.

Windows of several requests share a batch, also with different contexts. Parameters are named as in the checkpoint
after `code2wav.`. Source: specification section 13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import pad

from mstar_core.engine.cuda_graphs.functions import MOST_SHAPES, CapturedFunction
from mstar_core.engine.module import CapturesFunction, WarmupRequest, WarmupStep
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import STEP, from_param
from mstar_qwen3omni.vocoder.decoder import decoded, decoding, upsampled, upsampling
from mstar_qwen3omni.vocoder.transformer import PreTransformer
from mstar_qwen3omni.vocoder.windows import USUAL, Chunking, fresh_samples

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_qwen3omni.checkpoint.config import OmniConfig
    from mstar_qwen3omni.vocoder.fused_decoder import FusedDecoder

CAPTURED: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Batch sizes in windows with a CUDA graph."""

MOST_FRAMES: Final = 512
"""Frames of the largest captured batch. The kernels of larger ones are long, so the host runs ahead without a graph.
Graphs hold their intermediate values: 3.3 GB for twice as many frames."""

MOST_DECODED: Final = 2048
"""Frames that the decoder takes at once, which bounds its memory: one activation of it takes 0.75 GB of float16."""

STARTS: Final = tuple(USUAL.length(step) for step in range(3))
"""Frames of the first windows of a stream with default parameters; the last length repeats."""


class Code2Wav(nn.Module, CapturesFunction):
    """The vocoder. The numbers of a stream stay on the host, which selects the samples to send.

    Codes do not: they may come from the talker on this device, and reading them would make the host wait.

    Precision: as its weights on a CPU. On CUDA, half-precision weights run the transformer in float32 with TF32
    products and the decoder in float16, which is as fast as bfloat16 and has an eighth of its error (error budgets in
    bench/NOTES.md); float32 weights run in float32.
    """

    host_ports = ("step", "codec_first_frames", "codec_chunk_frames", "codec_left_context_frames")
    host_outputs = ("pcm",)

    offsets: Tensor

    def __init__(self, config: OmniConfig) -> None:
        super().__init__()
        sizes = config.vocoder
        self.sizes = sizes
        self.code_embedding = nn.Embedding(sizes.codebook * sizes.groups, sizes.width)
        self.pre_transformer = PreTransformer(sizes)
        self.upsample = upsampling(sizes)
        self.decoder = decoding(sizes)
        self.register_buffer("offsets", torch.arange(sizes.groups) * sizes.codebook, persistent=False)
        self._replayed = CapturedFunction(self.pcm, CAPTURED)
        self._captures: GraphCache | None = None
        self._fused: FusedDecoder | None = None
        self._lengths: set[int] = set()
        self._rounds = False

    # -- the node ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        *,
        codes: Tensor | Sequence[Tensor],
        step: np.ndarray,
        codec_first_frames: np.ndarray,
        codec_chunk_frames: np.ndarray,
        codec_left_context_frames: np.ndarray,
    ) -> dict[str, Tensor | list[Tensor | None]]:
        """Decode windows and return their new samples.

        codes: int64 [B, n, groups], or a list of B [n, groups]. Per window, all [B]: step, index of the window in its
        stream; the others as in `Chunking`, on the host. Returns {"pcm": int16 [B, s]}, or a list of B tensors if
        lengths differ, with None for a window without new samples. On CUDA they are valid until the next call.
        Raises EngineError on the CPU for an id that is not a code.
        """
        chunkings = zip(codec_first_frames, codec_chunk_frames, codec_left_context_frames, strict=True)
        streams = [Chunking(first=int(first), chunk=int(chunk), left=int(left)) for first, chunk, left in chunkings]
        sizes, steps = self.sizes, [int(number) for number in step]
        spans = [
            fresh_samples(stream, at, len(window), frame=sizes.frame_samples, lost=sizes.lost_samples)
            for stream, at, window in zip(streams, steps, codes, strict=True)
        ]
        self._learn(
            len(window)
            for stream, at, window in zip(streams, steps, codes, strict=True)
            if len(window) == stream.length(at)
        )
        is_even = spans.count(spans[0]) == len(spans) and spans[0].start < spans[0].stop
        if isinstance(codes, torch.Tensor) and is_even:
            return {"pcm": self._decoded(codes)[:, spans[0]]}
        return {"pcm": self._by_length(list(codes), spans)}

    def _learn(self, lengths: Iterable[int]) -> None:
        """Remember lengths of whole windows, which are worth a graph."""
        for length in lengths:
            if len(self._lengths) < MOST_SHAPES:
                self._lengths.add(length)

    def _by_length(self, windows: list[Tensor], spans: list[slice]) -> list[Tensor | None]:
        """Decode windows of one length together, so that their samples do not depend on the batch."""
        sounds: list[Tensor | None] = [None] * len(windows)
        for length in dict.fromkeys(map(len, windows)):
            chosen = [index for index, window in enumerate(windows) if len(window) == length]
            samples = self._decoded(torch.stack([windows[index] for index in chosen]))
            for sound, index in zip(samples, chosen, strict=True):
                if spans[index].start < spans[index].stop:
                    sounds[index] = sound[spans[index]].clone()
        return sounds

    def _decoded(self, codes: Tensor) -> Tensor:
        """Decode windows of one length: int16 [B, samples] in memory that the next call may overwrite."""
        frames = codes.shape[1]
        length = min((captured for captured in self._lengths if captured >= frames), default=0)
        if self._captures is None or not length:
            return self.pcm(codes)
        # The last window of a stream is short. Codes behind its end change no sample that it returns.
        samples = self._replayed.borrow(pad(codes, (0, 0, 0, length - frames)))
        return samples[:, : max(0, self.sizes.frame_samples * frames - self.sizes.lost_samples)]

    # -- decoding ----------------------------------------------------------------------------------------------------

    def pcm(self, codes: Tensor) -> Tensor:
        """Decode windows: int16 [B, samples]. codes: int64 [B, n, groups]."""
        if codes.is_cuda:
            return self._on_cuda(codes, is_pcm=True)
        return to_pcm16(self.decode(codes))

    def decode(self, codes: Tensor) -> Tensor:
        """Decode windows: samples [B, n * frame_samples - lost_samples] in [-1, 1]. codes: int64 [B, n, groups]."""
        if codes.is_cuda:
            return self._on_cuda(codes, is_pcm=False)
        # On a CPU one window at a time is as fast, and its bits do not depend on the batch.
        return torch.cat([decoded(self.decoder, self.frames(window[None])) for window in codes])

    def frames(self, codes: Tensor) -> Tensor:
        """Return the decoder's input [B, n * product of ratios, width]. codes: int64 [B, n, groups]."""
        return upsampled(self.upsample, self.pre_transformer(self.embed(codes)))

    def embed(self, codes: Tensor) -> Tensor:
        """Return the mean of the embeddings of a frame's codes: [B, n, width]. Each group has its own table."""
        most = self.sizes.codebook - 1
        if codes.is_cuda:
            codes = codes.clamp(max=most)  # beyond the last table, an index would end the process
        elif codes.numel() and int(codes.max()) > most:
            raise EngineError(
                f"Code2Wav got {int(codes.max())}, which is not a code",
                f"codes are 0 to {most}",
                "the talker must not emit the frame of a special id",
                node="Code2Wav",
            )
        embedded: Tensor = self.code_embedding(codes + self.offsets)
        return embedded.mean(-2)

    def _on_cuda(self, codes: Tensor, *, is_pcm: bool) -> Tensor:
        fused = self._settled()
        with rounding(self._rounds):
            frames = self.frames(codes)
        parts = frames.split(max(1, MOST_DECODED // codes.shape[1]))
        sounds = [fused.decode(part, is_pcm=is_pcm) for part in parts]
        return sounds[0] if len(sounds) == 1 else torch.cat(sounds)

    def _settled(self) -> FusedDecoder:
        """Give the weights the dtypes that they have on CUDA, once."""
        if self._fused is None:
            from mstar_qwen3omni.vocoder.fused_decoder import FusedDecoder  # needs triton, which comes with CUDA

            self._rounds = self.code_embedding.weight.dtype != torch.float32
            self._fused = FusedDecoder(self.decoder, torch.float16 if self._rounds else torch.float32)
            for part in (self.code_embedding, self.pre_transformer, self.upsample):
                part.float()
            self.pre_transformer.join()
        return self._fused

    # -- CUDA graphs -------------------------------------------------------------------------------------------------

    def capture(self, captures: GraphCache) -> None:
        """Use CUDA graphs, by length of windows and batch size. Called once the weights are loaded."""
        if self.offsets.is_cuda:
            self._settled()
        self._captures = captures
        self._replayed = CapturedFunction(
            self.pcm, CAPTURED, captures, lambda shape: shape[0] * shape[1] <= MOST_FRAMES
        )

    def warmup_requests(self) -> Sequence[WarmupRequest]:
        """See NodeModule: the windows of a stream with default parameters."""
        numbers = {
            "codec_first_frames": USUAL.first,
            "codec_chunk_frames": USUAL.chunk,
            "codec_left_context_frames": USUAL.left,
        }
        fixed = {from_param(name): torch.tensor(value) for name, value in numbers.items()}
        steps = tuple(
            WarmupStep(
                inputs={
                    "codes": torch.zeros(frames, self.sizes.groups, dtype=torch.int64),
                    STEP: torch.tensor(at),
                    **fixed,
                },
                outputs=("pcm",),
            )
            for at, frames in enumerate(STARTS)
        )
        return [WarmupRequest(title="windows of codes", tokens=sum(STARTS), steps=steps, is_value_free=True)]


@contextmanager
def rounding(is_on: bool) -> Iterator[None]:
    """Allow or forbid TF32 in float32 GEMMs launched inside."""
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    products.allow_tf32 = is_on
    try:
        yield
    finally:
        products.allow_tf32 = before


def to_pcm16(samples: Tensor) -> Tensor:
    """Convert samples in [-1, 1] to int16: multiply by 32767 and round."""
    return (samples.float() * 32767.0).round().to(torch.int16)
