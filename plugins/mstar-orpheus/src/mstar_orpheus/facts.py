"""Sizes and special ids of one checkpoint, read from its own config files. Standard library only.

Read by `plugin.py` in every process, by the processor and by the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError
from mstar_orpheus.checkpoint import CONFIG, Checkpoint, read_json

IDS_PER_FRAME: Final = 7
WINDOW_FRAMES: Final = 4
EARLY_FRAMES: Final = (2, 3)
"""Frames that a stream's first window may have in place of all four."""
VOICES: Final = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
VQ_STRIDES: Final = (4, 2, 1)
NOISE_MODES: Final = ("off", "seeded", "global")
IDS_KEY: Final = "orpheus"
"""Object in the language model's config.json that gives the special ids of a vocabulary unlike the official one."""


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
    def read(cls, given: Mapping[str, Any], path: Path) -> SpecialIds:
        """Read the `orpheus` object of a config. All ids must be given. Raises WeightsError naming file and key."""
        try:
            return cls(
                start=int(given["start_token_id"]),
                end=tuple(int(item) for item in given["end_token_ids"]),
                stop=int(given["stop_token_id"]),
                audio_offset=int(given["audio_token_offset"]),
            )
        except KeyError as error:
            raise WeightsError(
                f"{path} lacks {IDS_KEY}.{error.args[0]}", hint="give every id, or no such object", file=str(path)
            ) from error
        except (TypeError, ValueError) as error:
            raise WeightsError(
                f"{path} has an id that is no number in {IDS_KEY!r}", str(error), file=str(path)
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the light half needs of a checkpoint. frame_samples: samples of one frame of 7 ids."""

    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    max_positions: int
    ids: SpecialIds
    codebook_size: int
    frame_samples: int
    sample_rate: int

    @property
    def audio_ids(self) -> range:
        """Ids that stand for audio codes."""
        return range(self.ids.audio_offset, self.ids.audio_offset + IDS_PER_FRAME * self.codebook_size)


def read_facts(folder: Path) -> Facts:
    """Read a checkpoint's sizes and ids. Raises WeightsError naming file and key."""
    found = Checkpoint.find(folder)
    lm_path, snac_path = found.lm / CONFIG, found.snac / CONFIG
    lm, snac = read_json(lm_path), read_json(snac_path)
    given = lm.get(IDS_KEY)
    heads = number(lm, "num_attention_heads", lm_path)
    rates = [int(rate) for rate in snac.get("decoder_rates", ())]
    strides = tuple(int(stride) for stride in snac.get("vq_strides", ()))
    if strides != VQ_STRIDES or not rates:
        raise WeightsError(
            f"{snac_path} is no vocoder of this model",
            f"vq_strides is {list(strides)}, decoder_rates is {rates}",
            f"the 7 ids of a frame need vq_strides {list(VQ_STRIDES)}",
            file=str(snac_path),
        )
    facts = Facts(
        vocab_size=number(lm, "vocab_size", lm_path),
        layers=number(lm, "num_hidden_layers", lm_path),
        kv_heads=number(lm, "num_key_value_heads", lm_path, default=heads),
        head_dim=number(lm, "head_dim", lm_path, default=number(lm, "hidden_size", lm_path) // heads),
        max_positions=number(lm, "max_position_embeddings", lm_path),
        ids=SpecialIds.read(given, lm_path) if isinstance(given, Mapping) else SpecialIds(),
        codebook_size=number(snac, "codebook_size", snac_path),
        frame_samples=math.prod(rates) * max(VQ_STRIDES),
        sample_rate=number(snac, "sampling_rate", snac_path),
    )
    _check(facts, lm_path)
    return facts


def number(config: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    """A positive whole number of a config; `default` when absent. Raises WeightsError naming file and key."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WeightsError(
            f"{path}: {key} is {value!r}, not a positive whole number",
            hint="fetch this file again",
            file=str(path),
            key=key,
        )
    return value


def _check(facts: Facts, path: Path) -> None:
    ids = facts.ids
    top = max(facts.audio_ids[-1], ids.start, ids.stop, *ids.end)
    if top >= facts.vocab_size:
        raise WeightsError(
            f"{path}: a vocabulary of {facts.vocab_size} ids cannot hold the id {top}",
            f"audio ids are {facts.audio_ids[0]} to {facts.audio_ids[-1]}",
            f"use the Orpheus fine-tune, or give the ids in an {IDS_KEY!r} object",
            file=str(path),
        )
    if ids.stop in facts.audio_ids:
        raise WeightsError(
            f"{path}: the stop id {ids.stop} lies among the audio ids", hint="mend the ids", file=str(path)
        )
