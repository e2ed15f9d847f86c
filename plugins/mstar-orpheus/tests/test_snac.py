"""Code levels of audio ids and the SNAC decoder, against the reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mstar_core.errors import WeightsError
from mstar_orpheus.checkpoint.config import SpecialIds
from mstar_orpheus.vocoder.frames import codes_from_ids, levels_from_codes, misplaced
from mstar_orpheus.vocoder.snac import Snac, SnacConfig, decoding_weights

LATENT, WAVEFORM = 1e-5, 5e-5
OFFICIAL_BOOK = 4096


def levels(golden: Any, index: int) -> list[Tensor]:
    return [golden.snac[f"codes_{index}_level{level}"] for level in range(3)]


def test_ids_become_the_reference_codes(sequence: int, golden: Any) -> None:
    config = golden.json("config.json")
    ids = golden.snac[f"audio_ids_{sequence}"][None]
    actual = levels_from_codes(codes_from_ids(ids, config["audio_token_offset"], config["codebook_size"]))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, levels(golden, sequence), strict=True))


def test_full_size_ids_become_the_published_codes(golden: Any) -> None:
    for example in golden.json("full_size_id_examples.json"):
        ids = torch.tensor(example["ids"])[None]
        actual = levels_from_codes(codes_from_ids(ids, SpecialIds().audio_offset, OFFICIAL_BOOK))
        assert [level[0].tolist() for level in actual] == [example[f"level{number}"] for number in range(3)]
        assert not misplaced(ids.numpy(), SpecialIds().audio_offset, OFFICIAL_BOOK).any()


def test_an_id_out_of_its_slot_gives_a_valid_code_and_is_reported() -> None:
    offset, book = 110, 32
    ids = torch.tensor([[offset + slot * book for slot in range(7)]])
    ids[0, 0] = offset + 6 * book + 31
    ids[0, 6] = offset + 5
    assert codes_from_ids(ids, offset, book).tolist() == [[31, 0, 0, 0, 0, 0, 5]]
    assert misplaced(ids.numpy(), offset, book).tolist() == [[True, False, False, False, False, False, True]]


def test_latent_and_waveform_equal_the_reference_without_noise(sequence: int, golden: Any, reference: Any) -> None:
    snac, codes = reference.vocoder.snac, levels(golden, sequence)
    torch.testing.assert_close(snac.latent(codes), golden.snac[f"latent_{sequence}"], atol=LATENT, rtol=0)
    torch.testing.assert_close(snac.decode(codes), golden.snac[f"waveform_{sequence}"], atol=WAVEFORM, rtol=0)


def test_waveform_with_given_noise_equals_the_reference(golden: Any, reference: Any) -> None:
    expected = golden.snac
    noise = [expected[name] for name in sorted(name for name in expected if name.startswith("noise_0_block"))]
    lengths = reference.vocoder.snac.config.noise_lengths(expected["codes_0_level0"].shape[1])
    assert [part.shape[-1] for part in noise] == lengths
    actual = reference.vocoder.snac.decode(levels(golden, 0), noise)
    torch.testing.assert_close(actual, expected["waveform_with_noise_0"], atol=WAVEFORM, rtol=0)


def test_both_weight_norm_key_styles_fold_to_the_same_weights(golden: Any) -> None:
    state = load_file(golden.folder / "snac_weights.safetensors")
    suffixes = {".parametrizations.weight.original0": ".weight_g", ".parametrizations.weight.original1": ".weight_v"}
    older = {}
    for key, value in state.items():
        suffix = next((suffix for suffix in suffixes if key.endswith(suffix)), None)
        older[key.removesuffix(suffix) + suffixes[suffix] if suffix else key] = value
    newer_folded, older_folded = decoding_weights(state), decoding_weights(older)
    assert set(newer_folded) == set(older_folded)
    assert all(torch.equal(newer_folded[key], older_folded[key]) for key in newer_folded)


def test_a_gain_without_direction_is_named(golden: Any) -> None:
    state = load_file(golden.folder / "snac_weights.safetensors")
    lost = next(name for name in sorted(state) if name.startswith("decoder.") and name.endswith("weight.original1"))
    del state[lost]
    with pytest.raises(WeightsError, match=re.escape(lost)):
        decoding_weights(state)


def test_full_size_names_and_shapes_fit(golden: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {
        "sampling_rate": 24000,
        "encoder_dim": 48,
        "encoder_rates": [2, 4, 8, 8],
        "decoder_dim": 1024,
        "decoder_rates": [8, 8, 4, 2],
        "attn_window_size": None,
        "codebook_size": 4096,
        "codebook_dim": 8,
        "vq_strides": [4, 2, 1],
        "noise": True,
        "depthwise": True,
    }
    path.write_text(json.dumps(sizes))
    config = SnacConfig.read(path)
    listed = golden.json("full_size_keys.json")["snac"]
    published = {name: torch.zeros(shape) for name, shape in listed.items() if not name.startswith("encoder.")}
    own = {name: value.shape for name, value in Snac(config).state_dict().items()}
    assert {name: value.shape for name, value in decoding_weights(published).items()} == own
    assert (config.hop, config.frame_samples, config.latent) == (512, 2048, 768)


@pytest.mark.parametrize("change", [{"attn_window_size": 32}, {"noise": False}, {"vq_strides": [8, 4, 2, 1]}])
def test_another_snac_variant_is_refused_by_key(change: dict[str, Any], golden: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(golden.json("snac_config.json") | change))
    with pytest.raises(WeightsError, match=next(iter(change))):
        SnacConfig.read(path)


@pytest.mark.parametrize("frames_kept", [(0, 0.15), (1, 2), (2.93, 3.5)])
def test_a_part_of_the_samples_equals_that_part_of_all(
    frames_kept: tuple[float, float], golden: Any, reference: Any
) -> None:
    snac = reference.vocoder.snac
    keep = tuple(int(frames * golden.frame_samples) for frames in frames_kept)
    levels = [golden.snac[f"codes_0_level{level}"] for level in range(3)]
    frames = levels[0].shape[1]
    noise = [torch.randn(1, 1, length) for length in snac.config.noise_lengths(frames)]
    whole = snac.decode(levels, noise)
    torch.testing.assert_close(snac.decode(levels, noise, keep), whole[:, :, keep[0] : keep[1]], atol=1e-5, rtol=0)
