"""Node `audio_encoder`: clips of sound to 13 vectors per second. Run by the stateless engine.

Clips of several requests share a batch of attention windows. A clip's result never depends on other clips. Parameters
are named as in the checkpoint after `thinker.audio_tower.`. Source: specification section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import nn
from torch.nn.functional import gelu, linear, pad, scaled_dot_product_attention

from mstar_core.engine.cuda_graphs.functions import CapturedFunction
from mstar_core.engine.module import CapturesFunction, WarmupRequest, WarmupStep
from mstar_core.engine.transfers import upload
from mstar_core.families.mel import LogMel
from mstar_core.families.mel_tables import frames_of
from mstar_core.layers.linear import join_with_biases
from mstar_qwen3omni.encoders.blocks import add_norm

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_qwen3omni.checkpoint.config import AudioSizes, OmniConfig

CAPTURED: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Batch sizes in attention windows with a CUDA graph."""

MOST_TOKENS: Final = 1024
"""Tokens of the largest captured batch. The kernels of larger ones are long, so the host runs ahead without a graph.
These take 1.3 TFLOP, which is 3 ms beside 2 ms of launches; graphs of four times as many tokens held 3.9 GB."""

MOST_WINDOWS: Final = 64
"""Attention windows of one pass, which bounds its memory: the first convolution's output takes 1.6 GB of bfloat16."""

WARM_SECONDS: Final = (0.5, 1, 2, 4, 30)
"""Clips of the warm-up: one for each number of chunks per window."""


def halved(frames: int) -> int:
    """Return the steps that the three convolutions leave of so many."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


def token_count(frames: int, chunk: int) -> int:
    """Return the tokens of a clip. frames: of mel; chunk: frames that are convolved together."""
    return frames // chunk * halved(chunk) + halved(frames % chunk)


def sinusoids(length: int, width: int) -> Tensor:
    """Return positions, sines first: float32 [length, width]. Base 10000."""
    frequency = torch.exp(-math.log(10_000.0) / (width // 2 - 1) * torch.arange(width // 2, dtype=torch.float32))
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class AudioAttention(nn.Module):
    """Attention among the tokens of a window."""

    def __init__(self, sizes: AudioSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.q_proj = nn.Linear(sizes.width, sizes.width)
        self.k_proj = nn.Linear(sizes.width, sizes.width)
        self.v_proj = nn.Linear(sizes.width, sizes.width)
        self.out_proj = nn.Linear(sizes.width, sizes.width)
        self._joined: tuple[Tensor, Tensor] | None = None

    def join(self) -> None:
        """Join the three input projections into one matrix. Their weights become views of it."""
        self._joined = join_with_biases([self.q_proj, self.k_proj, self.v_proj])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return x's shape. x: [W, tokens, width]; mask: bool [W, 1, 1, tokens], true for keys that are seen."""
        if self._joined is not None:
            parts = linear(x, *self._joined).chunk(3, dim=-1)
        else:
            parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class AudioBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, sizes: AudioSizes) -> None:
        super().__init__()
        self.self_attn = AudioAttention(sizes)
        self.self_attn_layer_norm = nn.LayerNorm(sizes.width)
        self.fc1 = nn.Linear(sizes.width, sizes.mlp)
        self.fc2 = nn.Linear(sizes.mlp, sizes.width)
        self.final_layer_norm = nn.LayerNorm(sizes.width)

    def forward(self, x: Tensor, normed: Tensor, mask: Tensor, after: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Run the block between norms: `normed` is x after the first norm; `after` norms the last sum.

        x: [W, tokens, width]. Returns the sum and its norm in x's shape.
        """
        x, inner = add_norm(x, self.self_attn(normed, mask), self.final_layer_norm)
        return add_norm(x, self.fc2(gelu(self.fc1(inner))), after)


class AudioEncoder(nn.Module, CapturesFunction):
    """The audio encoder with its features.

    Cost model: one pass per batch over [windows, chunks per window]; a window has as many chunks as the longest clip
    needs, rounded up to a power of two. Clips shorter than a chunk are a batch of their own, because their
    convolutions end with the clip, while the last chunk of a longer clip is filled up with zeros.
    """

    listed_ports = ("audio",)
    host_ports = ("continues",)
    device_outputs = ("embeds",)

    positions: Tensor

    def __init__(self, config: OmniConfig) -> None:
        super().__init__()
        sizes = config.audio
        self.sizes = sizes
        self.conv2d1 = nn.Conv2d(1, sizes.channels, 3, 2, 1)
        self.conv2d2 = nn.Conv2d(sizes.channels, sizes.channels, 3, 2, 1)
        self.conv2d3 = nn.Conv2d(sizes.channels, sizes.channels, 3, 2, 1)
        self.conv_out = nn.Linear(sizes.channels * halved(sizes.mel_bins), sizes.width, bias=False)
        self.layers = nn.ModuleList(AudioBlock(sizes) for _ in range(sizes.layers))
        self.ln_post = nn.LayerNorm(sizes.width)
        self.proj1 = nn.Linear(sizes.width, sizes.width)
        self.proj2 = nn.Linear(sizes.width, sizes.output)
        self.log_mel = LogMel(sizes.mel_bins)
        self.register_buffer("positions", sinusoids(halved(sizes.chunk), sizes.width), persistent=False)
        self._replayed = CapturedFunction(self.encode_windows, CAPTURED)

    # -- the node ----------------------------------------------------------------------------------------------------

    def forward(self, *, audio: Sequence[Tensor], continues: np.ndarray | None = None) -> dict[str, list[Tensor]]:
        """Encode clips. audio: per clip 16 kHz samples [1, s], or log-mel frames [bins, f]; float32.

        continues: bool [B, 1], clips that are a later attention window of a longer one, and so may be shorter than a
        chunk without being a short clip; None: none is.
        Returns {"embeds": B tensors [tokens, output]}; a clip shorter than a mel frame has no tokens.
        """
        features = self._features(audio)
        later = set[int]() if continues is None else set(continues[:, 0].nonzero()[0].tolist())
        if features[0].device.type == "cpu":
            # One by one, so that a clip's bits do not depend on the others.
            parts = [({0} if index in later else set[int](), each) for index, each in enumerate(features)]
            return {"embeds": [self._encoded([each], first)[0] for first, each in parts]}
        return {"embeds": self._encoded(features, later)}

    def _features(self, audio: Sequence[Tensor]) -> list[Tensor]:
        """Return the mel frames of each clip: float32 [f, bins]."""
        spectrum_of: dict[int, Tensor] = {}
        sounds = {index: value[0] for index, value in enumerate(audio) if value.shape[0] == 1}
        if sounds:
            spectra = self.log_mel([sound.float() for sound in sounds.values()])
            lengths = [frames_of(len(sound)) for sound in sounds.values()]
            spectrum_of = {
                index: spectrum[:length] for index, spectrum, length in zip(sounds, spectra, lengths, strict=True)
            }
        return [spectrum_of[index] if index in spectrum_of else value.float().t() for index, value in enumerate(audio)]

    def _encoded(self, features: list[Tensor], later: Set[int] = frozenset()) -> list[Tensor]:
        """Return the vectors of each clip: [tokens, output]. features: [f, bins]; later: clips that continue one."""
        chunk = self.sizes.chunk
        outputs = [feature.new_zeros(0, self.sizes.output, dtype=self.proj2.weight.dtype) for feature in features]
        is_short = [len(each) < chunk and index not in later for index, each in enumerate(features)]
        short = [index for index, feature in enumerate(features) if len(feature) and is_short[index]]
        whole = [index for index, feature in enumerate(features) if len(feature) and not is_short[index]]
        for chosen in (short, whole):
            if chosen:
                batch = self._batch([features[index] for index in chosen], is_short=chosen is short)
                for index, vectors in zip(chosen, batch, strict=True):
                    outputs[index] = vectors
        return outputs

    def _batch(self, features: list[Tensor], *, is_short: bool) -> list[Tensor]:
        """Encode clips that are all shorter than a chunk, or all at least as long."""
        sizes, frames = self.sizes, [len(feature) for feature in features]
        across = self._chunks_per_window(max(frames))
        windows = [math.ceil(count / (across * sizes.chunk)) for count in frames]
        tokens = [token_count(count, sizes.chunk) for count in frames]
        size = across * sizes.chunk
        padded = [
            pad(feature, (0, 0, 0, count * size - len(feature)))
            for feature, count in zip(features, windows, strict=True)
        ]
        mel = torch.cat(padded).unflatten(0, (-1, size)).to(self.proj2.weight.dtype)
        most = across * halved(sizes.chunk)
        seen = [
            min(most, total - index * most)
            for count, total in zip(windows, tokens, strict=True)
            for index in range(count)
        ]
        ends = frames if is_short else [0] * len(seen)
        numbers = upload(torch.tensor([seen, ends]).t().contiguous(), mel.device)
        # Short clips are of another shape, so that long ones need no masks in their convolutions.
        positions = numbers if is_short else numbers[:, :1]
        pairs = zip(mel.split(MOST_WINDOWS), positions.split(MOST_WINDOWS), strict=True)
        parts = [self._replayed(*pair) for pair in pairs]
        windows_of = (torch.cat(parts) if len(parts) > 1 else parts[0]).split(windows)
        return [encoded.flatten(0, 1)[:count] for encoded, count in zip(windows_of, tokens, strict=True)]

    def _chunks_per_window(self, frames: int) -> int:
        chunks, most = math.ceil(frames / self.sizes.chunk), self.sizes.window // self.sizes.chunk
        return min(most, 1 << (chunks - 1).bit_length())

    # -- encoding ----------------------------------------------------------------------------------------------------

    def encode_windows(self, mel: Tensor, numbers: Tensor) -> Tensor:
        """Encode attention windows: [W, tokens, output].

        mel: [W, chunks * chunk, bins], zeros behind a clip's end. numbers: int64 [W, 1 or 2], a window's tokens, and
        for clips shorter than a chunk their frames.
        """
        ends = numbers[:, 1] if numbers.shape[1] > 1 else None
        steps = self._convolved(mel.unflatten(1, (-1, self.sizes.chunk)).flatten(0, 1), ends)
        x = self.conv_out(steps) + self.positions.to(steps.dtype)
        x = x.unflatten(0, (len(mel), -1)).flatten(1, 2)
        seen = numbers[:, :1].clamp(min=1)  # padding of a bucket has no tokens, and a row without keys no softmax
        mask = (torch.arange(x.shape[1], device=x.device) < seen)[:, None, None]
        blocks = cast("list[AudioBlock]", list(self.layers))
        norms = [*(block.self_attn_layer_norm for block in blocks), self.ln_post]
        normed: Tensor = norms[0](x)
        for block, after in zip(blocks, norms[1:], strict=True):
            x, normed = block(x, normed, mask, after)
        out: Tensor = self.proj2(gelu(self.proj1(normed)))
        return out

    def _convolved(self, chunks: Tensor, ends: Tensor | None) -> Tensor:
        """Return the convolved steps of each chunk, [C, steps, channels * bins]. chunks: [C, frames, bins].

        ends: frames of each chunk after which every convolution sees zeros; None: none.
        """
        x = chunks.transpose(1, 2)[:, None]
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            x = gelu(conv(x))
            if ends is not None:
                ends = (ends + 1) // 2
                x = x * (torch.arange(x.shape[-1], device=x.device) < ends[:, None])[:, None, None]
        return x.permute(0, 3, 1, 2).flatten(2)

    # -- CUDA graphs -------------------------------------------------------------------------------------------------

    def capture(self, captures: GraphCache) -> None:
        """Use CUDA graphs for small batches, with joined projections. Called once the weights are loaded."""
        for block in self.layers:
            assert isinstance(block, AudioBlock)
            block.self_attn.join()
        for conv in (self.conv2d2, self.conv2d3):
            # The tensor cores' layout. torch stubs do not know the argument for modules.
            conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
        self._replayed = CapturedFunction(self.encode_windows, CAPTURED, captures, self._is_small)

    def _is_small(self, shape: tuple[int, ...]) -> bool:
        return shape[0] * token_count(shape[1], self.sizes.chunk) <= MOST_TOKENS

    def warmup_requests(self) -> Sequence[WarmupRequest]:
        """See NodeModule: one clip for each number of chunks per window."""
        clips = [torch.zeros(1, int(seconds * 16_000)) for seconds in WARM_SECONDS]
        steps = tuple(WarmupStep(inputs={"audio": clip}, outputs=("embeds",)) for clip in clips)
        return [WarmupRequest(title="clips of sound", tokens=1024, steps=steps, is_value_free=True)]
