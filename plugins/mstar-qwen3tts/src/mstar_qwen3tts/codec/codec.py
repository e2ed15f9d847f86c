"""Node `Codec`: frames of codes to 16-bit samples, gapless over the pieces of a stream. Run by the stateless engine.

Its state is a value of the request, carried from piece to piece, so that pieces of streams of any age share a batch and
equal a decode of the whole. Parameters are named as in the checkpoint after `decoder.`.
Source: specification sections 11 to 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from mstar_core.engine.cuda_graphs.functions import CapturedFunction
from mstar_core.engine.module import CapturesFunction, WarmupRequest, WarmupStep
from mstar_core.errors import EngineError
from mstar_core.layers.snake_conv import SnakeBeta
from mstar_qwen3tts.codec.layers import (
    KERNEL,
    CausalConv,
    ConvNeXt,
    DecoderBlock,
    PreTransformer,
    States,
    TransposedConv,
    WindowAttention,
)
from mstar_qwen3tts.params import CHUNK_FRAMES

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_qwen3tts.checkpoint.config import CodecSizes, TTSConfig
    from mstar_qwen3tts.codec.fused_decoder import FusedDecoder
    from mstar_qwen3tts.codec.fused_frames import FusedFrames

CAPTURED: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Batch sizes with a CUDA graph, for each number of frames of a piece."""

LEAST_USAGE: Final = 1e-5


class Codebook(nn.Module):
    """Vectors of one group, stored as sums and how many they are sums of."""

    def __init__(self, sizes: CodecSizes) -> None:
        super().__init__()
        self.embedding_sum = nn.Parameter(torch.zeros(sizes.codebook, sizes.vector))
        self.cluster_usage = nn.Parameter(torch.ones(sizes.codebook))

    def vectors(self) -> Tensor:
        """Return [codebook, vector]."""
        return self.embedding_sum / self.cluster_usage.clamp(min=LEAST_USAGE)[:, None]


class Quantizer(nn.Module):
    """Codebooks of some groups and their projection. The input projection of the file has no use here."""

    def __init__(self, sizes: CodecSizes, groups: int) -> None:
        super().__init__()
        layers = nn.ModuleList(nn.ModuleDict({"_codebook": Codebook(sizes)}) for _ in range(groups))
        self.vq = nn.ModuleDict({"layers": layers})
        self.output_proj = nn.Conv1d(sizes.vector, sizes.inner, 1, bias=False)

    def table(self) -> Tensor:
        """Return the projected vectors of all groups: [groups * codebook, inner]."""
        layers = cast("list[nn.ModuleDict]", list(cast("nn.ModuleList", self.vq["layers"])))
        books = [cast("Codebook", layer["_codebook"]).vectors() for layer in layers]
        return linear(torch.cat(books), self.output_proj.weight[:, :, 0])


class SplitQuantizer(nn.Module):
    """The first group and the rest of them."""

    def __init__(self, sizes: CodecSizes) -> None:
        super().__init__()
        self.rvq_first = Quantizer(sizes, 1)
        self.rvq_rest = Quantizer(sizes, sizes.groups - 1)


class Codec(nn.Module, CapturesFunction):
    """The vocoder, with float32 weights and states. On CUDA the layers behind the codebooks run as fused kernels.

    has_half_decoder: those kernels keep what is between the convolutions of the decoder in float16.
    """

    host_outputs = ("pcm",)
    listed_ports = ("state",)
    device_outputs = ("state",)

    starts: Tensor

    def __init__(self, config: TTSConfig) -> None:
        super().__init__()
        sizes = config.codec
        self.has_half_decoder = False
        self.sizes = sizes
        self.quantizer = SplitQuantizer(sizes)
        self.pre_conv = CausalConv(sizes.inner, sizes.latent, 3)
        self.pre_transformer = PreTransformer(sizes)
        self.upsample = nn.ModuleList(
            nn.ModuleList([TransposedConv(sizes.latent, sizes.latent, ratio, ratio), ConvNeXt(sizes.latent)])
            for ratio in sizes.ratios
        )
        channels = [sizes.decoder >> index for index in range(len(sizes.rates) + 1)]
        blocks = [
            DecoderBlock(inner, outer, rate)
            for inner, outer, rate in zip(channels, channels[1:], sizes.rates, strict=False)
        ]
        entry, last = CausalConv(sizes.latent, channels[0], KERNEL), channels[-1]
        self.decoder = nn.ModuleList([entry, *blocks, SnakeBeta(last), CausalConv(last, 1, KERNEL)])
        self.register_buffer("starts", torch.arange(sizes.groups) * sizes.codebook, persistent=False)
        kinds = (CausalConv, TransposedConv, WindowAttention, PreTransformer)
        self.state_values = sum(part.values for part in self.modules() if isinstance(part, kinds))
        self._table: Tensor | None = None
        self._fused: tuple[FusedFrames, FusedDecoder] | None = None
        self._replayed = CapturedFunction(self.step, CAPTURED)

    # -- the node ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        *,
        codes: Tensor | None = None,
        reference: Tensor | list[Tensor] | None = None,
        fresh: Tensor | None = None,
        state: Tensor | list[Tensor] | None = None,
    ) -> dict[str, Tensor | list[Tensor]]:
        """Begin streams, or decode their next frames.

        fresh: [B, ...]: returns the state of new streams. reference: int64 [n, groups] of each stream, the frames of
        a recording that the speech goes on from: returns the state after them. codes: int64 [B, n, groups] with state
        float32 [B, values], or its rows: returns pcm int16 [B, samples] and the state after them.
        Raises EngineError on the CPU for an id that is not a code.
        """
        if reference is not None:
            return {"state": [self.run(frames[None], self.new_state(1))[1][0] for frames in reference]}
        if codes is None:
            assert fresh is not None
            return {"state": [self.new_state(1)[0] for _ in fresh]}
        assert state is not None
        made = self._replayed.borrow(codes, state)
        count = codes.shape[1] * self.sizes.frame_samples
        rows = list(made[:, count:])
        # Memory of their own: a view would keep the states of the whole batch.
        kept = [torch.empty_like(row) for row in rows]
        torch._foreach_copy_(kept, rows)
        return {"pcm": to_pcm16(made[:, :count]), "state": list(kept)}

    def new_state(self, count: int) -> Tensor:
        """Return the state of streams that begin: float32 [count, values]."""
        return torch.zeros(count, self.state_values, device=self.starts.device)

    def step(self, codes: Tensor, state: Tensor) -> Tensor:
        """Decode frames: samples in [-1, 1] and the state after them in one row per stream, float32 [B, ...]."""
        if codes.is_cuda:
            count = codes.shape[1] * self.sizes.frame_samples
            made = state.new_empty(len(state), count + self.state_values)
            made[:, :count] = self.run(codes, state, made[:, count:])[0]
            return made
        # On a CPU one stream at a time is as fast, and its bits do not depend on the batch.
        rows = zip(codes.split(1), state.split(1), strict=True)
        return torch.cat([torch.cat(self.run(*row), dim=1) for row in rows])

    def run(self, codes: Tensor, state: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Decode frames: samples float32 [B, n * frame_samples] in [-1, 1], and states [B, values].

        after: memory for those states.
        """
        states, x = States(state, after), self.embed(codes)
        if x.is_cuda and not next(self.decoder.parameters()).requires_grad:
            frames, decoder = self._settled()
            return decoder.decode(frames.run(x, states), states), states.after()
        x = self.pre_conv(x.transpose(1, 2), states)
        x = self.pre_transformer(x.transpose(1, 2), states).transpose(1, 2)
        for stage in self.upsample:
            up, mix = cast("nn.ModuleList", stage)
            x = mix(up(x, states), states)
        entry, *blocks, snake, last = self.decoder
        x = entry(x, states)
        for block in blocks:
            x = block(x, states)
        x = last(snake(x), states)
        return x[:, 0].clamp(-1.0, 1.0), states.after()

    def embed(self, codes: Tensor) -> Tensor:
        """Return the sum of the projected vectors of a frame's codes: [B, n, inner]. Each group has its own table."""
        most = self.sizes.codebook - 1
        if codes.is_cuda:
            codes = codes.clamp(0, most)  # beyond the table, an index would end the process
        elif codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) <= most:
            raise EngineError(
                f"Codec got {int(codes.min())} to {int(codes.max())}, which are not codes",
                f"codes are 0 to {most}",
                "the talker must not emit the frame of a special id",
                node="Codec",
            )
        return embedding(codes + self.starts, self.table()).sum(dim=2)

    def table(self) -> Tensor:
        """Return the projected vectors of all groups: [groups * codebook, inner]. Made once, unless weights train."""
        if self._table is None or self._table.requires_grad:
            self._table = torch.cat([self.quantizer.rvq_first.table(), self.quantizer.rvq_rest.table()])
        return self._table

    def _settled(self) -> tuple[FusedFrames, FusedDecoder]:
        """Return the layers of CUDA. Their weights are copied once."""
        if self._fused is None:
            from mstar_qwen3tts.codec.fused_decoder import FusedDecoder
            from mstar_qwen3tts.codec.fused_frames import FusedFrames

            frames = FusedFrames(self.pre_conv, self.pre_transformer, self.upsample)
            kind = torch.float16 if self.has_half_decoder else torch.float32
            self._fused = frames, FusedDecoder(self.decoder, kind)
        return self._fused

    # -- CUDA graphs -------------------------------------------------------------------------------------------------

    def capture(self, captures: GraphCache) -> None:
        """Use CUDA graphs, by frames of a piece and batch size. Called once the weights are loaded."""
        self.table()
        if self.starts.is_cuda:
            self._settled()
        self._replayed = CapturedFunction(self.step, CAPTURED, captures)

    def warmup_requests(self) -> Sequence[WarmupRequest]:
        """See NodeModule: pieces of all lengths of the ramp."""
        state = torch.zeros(self.state_values)
        frames, steps = 1, []
        while frames <= CHUNK_FRAMES:
            codes = torch.zeros(frames, self.sizes.groups, dtype=torch.int64)
            steps.append(WarmupStep(inputs={"codes": codes, "state": state}, outputs=("pcm", "state")))
            frames *= 2
        return [WarmupRequest(title="pieces of codes", tokens=1, steps=tuple(steps), is_value_free=True)]


def to_pcm16(samples: Tensor) -> Tensor:
    """Convert samples in [-1, 1] to int16: multiply by 32767 and round."""
    return (samples.float() * 32767.0).round().to(torch.int16)
