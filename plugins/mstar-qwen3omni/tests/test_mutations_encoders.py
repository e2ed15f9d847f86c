"""Typical mistakes in encoders and vocoder change their outputs by more than the tolerance of the golden set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv_transpose1d

from mstar_core.layers.snake_conv import TINY
from mstar_qwen3omni.encoders import audio, vision
from mstar_qwen3omni.vocoder import code2wav, decoder, transformer

from .encoder_cases import loaded, needs_weights, vectors

Patch = pytest.MonkeyPatch
ENCODED, WAVE = 2e-3, 1e-4

pytestmark = needs_weights


# -- pitfall 10: Code2Wav ----------------------------------------------------------------------------------------------


def sum_of_codes(patch: Patch, module: Any) -> None:
    true = code2wav.Code2Wav.embed
    patch.setattr(code2wav.Code2Wav, "embed", lambda self, codes: true(self, codes) * self.sizes.groups)


def one_table_for_all_groups(patch: Patch, module: Any) -> None:
    module.offsets.zero_()


def samples_cut_on_one_side(patch: Patch, module: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        conv = self.conv
        whole = conv_transpose1d(x, conv.weight, conv.bias, self.rate)
        cut = int(conv.kernel_size[0]) - self.rate
        return whole[..., : whole.shape[-1] - 2 * cut]

    patch.setattr(decoder.TransposedConv, "forward", forward)


def attention_over_all_frames(patch: Patch, module: Any) -> None:
    patch.setattr(transformer.PreTransformer, "_mask", lambda self, place: place[:, None] >= place[None])


def window_one_frame_longer(patch: Patch, module: Any) -> None:
    module.pre_transformer.window += 1


def snake_without_exponents(patch: Patch, module: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + (x * self.alpha[:, None]).sin().square() / (self.beta[:, None] + TINY)

    patch.setattr(decoder.SnakeBeta, "forward", forward)


def wave_error(module: Any) -> float:
    golden = vectors("code2wav")
    made = module.decode(golden["in.codes"].T[None])[0]
    return _apart(made, golden["waveform_whole"]) / WAVE


# -- pitfall 11: short clips -------------------------------------------------------------------------------------------


def short_clips_filled_up(patch: Patch, module: Any) -> None:
    true = audio.AudioEncoder._batch
    patch.setattr(audio.AudioEncoder, "_batch", lambda self, clips, is_short: true(self, clips, is_short=False))


def tails_cut_like_short_clips(patch: Patch, module: Any) -> None:
    true = audio.AudioEncoder._convolved

    def convolved(self: Any, chunks: Tensor, ends: Tensor | None) -> Tensor:
        filled = chunks.abs().sum(2) > 0
        return true(self, chunks, filled.sum(1) if ends is None else ends)

    patch.setattr(audio.AudioEncoder, "_convolved", convolved)


def positions_that_go_on(patch: Patch, module: Any) -> None:
    def shift(layer: Any, given: Any, made: Tensor) -> Tensor:
        whole = audio.sinusoids(made.shape[0] * made.shape[1], made.shape[2])
        return made + whole.view_as(made) - module.positions

    module.conv_out.register_forward_hook(shift)


def attention_across_windows(patch: Patch, module: Any) -> None:
    patch.setattr(audio.AudioEncoder, "_chunks_per_window", lambda self, frames: -(-frames // self.sizes.chunk))


def audio_error(module: Any) -> float:
    golden = vectors("audio_encoder_packing")
    made = module(audio=[golden["in.mel_short"], golden["in.mel_long"]])["embeds"]
    return (
        max(_apart(own, golden[f"{name}_alone"]) for own, name in zip(made, ("short", "long"), strict=True)) / ENCODED
    )


# -- pitfall 12: videos ------------------------------------------------------------------------------------------------


def attention_over_the_video(patch: Patch, module: Any) -> None:
    true = vision.VisionAttention.forward
    patch.setattr(
        vision.VisionAttention,
        "forward",
        lambda self, x, rotation: true(self, x.flatten(0, 1)[None], rotation).view_as(x),
    )


def positions_without_aligned_corners(patch: Patch, module: Any) -> None:
    true = vision.places_of

    def places(height: int, width: int, merge: int, side: int) -> Tensor:
        found = true(height, width, merge, side)
        scaled = [
            ((found[:, at] + 0.5) * side / count - 0.5).clamp(0, side - 1) for at, count in ((0, height), (1, width))
        ]
        return torch.cat([found[:, :2], torch.stack(scaled, dim=1)], dim=1)

    patch.setattr(vision, "places_of", places)


def rows_and_columns_swapped(patch: Patch, module: Any) -> None:
    true = vision.rotation_of
    patch.setattr(vision, "rotation_of", lambda row, column, head_dim: true(column, row, head_dim))


def maps_of_the_block_before(patch: Patch, module: Any) -> None:
    module.sizes = replace(module.sizes, deepstack=tuple(block - 1 for block in module.sizes.deepstack))


def bytes_that_are_not_centred(patch: Patch, module: Any) -> None:
    patch.setattr(vision.VisionEncoder, "normalised", lambda self, patches: (patches + 1) / 2)


def vision_error(module: Any) -> float:
    golden = vectors("case_video")
    tokens = torch.full((len(golden["video_embeds"]),), module.ids.video_pad)
    made = module(
        pixels=[golden["in.pixel_values_videos"]], grid=golden["in.video_grid_thw"].numpy(), tokens=[tokens.numpy()]
    )
    levels = [_apart(own, golden[f"video_deepstack.{level}"]) for level, own in enumerate(made["deepstack"][0])]
    return max(_apart(made["embeds"][0], golden["video_embeds"]), *levels) / ENCODED


def _apart(made: Tensor, wanted: Tensor) -> float:
    """Return the largest difference; infinite where the lengths differ."""
    return float((made - wanted).abs().max()) if made.shape == wanted.shape else float("inf")


ERRORS: dict[str, Callable[[Any], float]] = {
    "Code2Wav": wave_error,
    "audio_encoder": audio_error,
    "vision_encoder": vision_error,
}
MISTAKES: dict[str, tuple[Callable[[Patch, Any], None], ...]] = {
    "Code2Wav": (
        sum_of_codes,
        one_table_for_all_groups,
        samples_cut_on_one_side,
        attention_over_all_frames,
        window_one_frame_longer,
        snake_without_exponents,
    ),
    "audio_encoder": (
        short_clips_filled_up,
        tails_cut_like_short_clips,
        positions_that_go_on,
        attention_across_windows,
    ),
    "vision_encoder": (
        attention_over_the_video,
        positions_without_aligned_corners,
        rows_and_columns_swapped,
        maps_of_the_block_before,
        bytes_that_are_not_centred,
    ),
}


@pytest.fixture
def patch() -> Iterator[Patch]:
    with pytest.MonkeyPatch.context() as found:
        yield found


@pytest.mark.parametrize(
    ("node", "mistake"),
    [(node, each) for node, found in MISTAKES.items() for each in found],
    ids=[each.__name__ for found in MISTAKES.values() for each in found],
)
def test_a_mistake_is_seen(node: str, mistake: Callable[[Patch, Any], None], patch: Patch) -> None:
    module = loaded(node)
    mistake(patch, module)
    assert ERRORS[node](module) > 1


@pytest.mark.parametrize("node", ERRORS)
def test_without_a_mistake_the_same_path_passes(node: str) -> None:
    assert ERRORS[node](loaded(node)) <= 1
