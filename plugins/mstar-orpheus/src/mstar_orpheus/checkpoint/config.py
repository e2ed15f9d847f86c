"""Sizes and special ids of one checkpoint, read from its config files. Standard library only.

Used by `plugin.py` in every process, by the processor and by the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError
from mstar_orpheus.checkpoint.layout import CONFIG, CheckpointLayout, read_json

IDS_PER_FRAME: Final = 7
WINDOW_FRAMES: Final = 4
EARLY_FRAMES: Final = (2, 3)
"""Smaller sizes, in frames, of a stream's first window."""
VOICES: Final = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
VQ_STRIDES: Final = (4, 2, 1)
NOISE_MODES: Final = ("off", "seeded", "global")
IDS_KEY: Final = "orpheus"
"""Object in the language model's config.json with the special ids of a vocabulary other than the official one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Ids around the text and the audio.

    Defaults: `canopylabs/orpheus-3b-0.1-ft`, where `<custom_token_N>` is 128256 + N.

    start, end: ids around the tokenized text. stop: end of speech. audio_offset: id of code 0 in slot 0.
    """

    start: int = 128259
    end: tuple[int, ...] = (128009, 128260, 128261, 128257)
    stop: int = 128258
    audio_offset: int = 128266

    @classmethod
    def read(cls, fields: Mapping[str, Any], path: Path) -> SpecialIds:
        """Read the `orpheus` object of a config, with all ids. Raises WeightsError with file and key."""
        try:
            return cls(
                start=int(fields["start_token_id"]),
                end=tuple(int(item) for item in fields["end_token_ids"]),
                stop=int(fields["stop_token_id"]),
                audio_offset=int(fields["audio_token_offset"]),
            )
        except KeyError as error:
            raise WeightsError(
                f"{path} lacks {IDS_KEY}.{error.args[0]}", hint="give all ids or remove the object", file=str(path)
            ) from error
        except (TypeError, ValueError) as error:
            raise WeightsError(f"{path}: an id in {IDS_KEY!r} is not a number", str(error), file=str(path)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Sizes and ids of one checkpoint.

    frame_samples: samples of one frame of 7 ids. is_miniature: the parameters have the miniature's defaults.
    """

    vocab_size: int
    layers: int
    heads: int
    mlp: int
    kv_heads: int
    head_dim: int
    max_positions: int
    ids: SpecialIds
    codebook_size: int
    frame_samples: int
    sample_rate: int
    is_miniature: bool = False

    @property
    def audio_ids(self) -> range:
        """Ids that stand for audio codes."""
        return range(self.ids.audio_offset, self.ids.audio_offset + IDS_PER_FRAME * self.codebook_size)


def read_config(folder: Path) -> CheckpointConfig:
    """Read a checkpoint's sizes and ids. Raises WeightsError with file and key."""
    layout = CheckpointLayout.find(folder)
    lm_path, snac_path = layout.lm / CONFIG, layout.snac / CONFIG
    lm, snac = read_json(lm_path), read_json(snac_path)
    fields = lm.get(IDS_KEY)
    heads = number(lm, "num_attention_heads", lm_path)
    rates = [int(rate) for rate in snac.get("decoder_rates", ())]
    strides = tuple(int(stride) for stride in snac.get("vq_strides", ()))
    if strides != VQ_STRIDES or not rates:
        raise WeightsError(
            f"{snac_path} is not a vocoder of this model",
            f"vq_strides is {list(strides)}, decoder_rates is {rates}",
            f"the 7 ids of a frame need vq_strides {list(VQ_STRIDES)}",
            file=str(snac_path),
        )
    config = CheckpointConfig(
        vocab_size=number(lm, "vocab_size", lm_path),
        layers=number(lm, "num_hidden_layers", lm_path),
        heads=heads,
        mlp=number(lm, "intermediate_size", lm_path),
        kv_heads=number(lm, "num_key_value_heads", lm_path, default=heads),
        head_dim=number(lm, "head_dim", lm_path, default=number(lm, "hidden_size", lm_path) // heads),
        max_positions=number(lm, "max_position_embeddings", lm_path),
        ids=SpecialIds.read(fields, lm_path) if isinstance(fields, Mapping) else SpecialIds(),
        codebook_size=number(snac, "codebook_size", snac_path),
        frame_samples=math.prod(rates) * max(VQ_STRIDES),
        sample_rate=number(snac, "sampling_rate", snac_path),
        is_miniature=isinstance(fields, Mapping) and fields.get("is_miniature") is True,
    )
    _check(config, lm_path)
    return config


def number(config: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    """Return a positive integer of a config; `default` if absent. Raises WeightsError with file and key."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WeightsError(
            f"{path}: {key} is {value!r}, not a positive integer",
            hint="download this file again",
            file=str(path),
            key=key,
        )
    return value


def _check(config: CheckpointConfig, path: Path) -> None:
    ids = config.ids
    top = max(config.audio_ids[-1], ids.start, ids.stop, *ids.end)
    if top >= config.vocab_size:
        raise WeightsError(
            f"{path}: id {top} is outside the vocabulary of {config.vocab_size} ids",
            f"audio ids are {config.audio_ids[0]} to {config.audio_ids[-1]}",
            f"use the Orpheus fine-tune, or give the ids in an {IDS_KEY!r} object",
            file=str(path),
        )
    if ids.stop in config.audio_ids:
        raise WeightsError(
            f"{path}: the stop id {ids.stop} is also an audio id", hint="correct the ids", file=str(path)
        )
