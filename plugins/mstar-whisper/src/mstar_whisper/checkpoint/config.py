"""Sizes and token ids of a checkpoint, from config.json, generation_config.json and preprocessor_config.json.

Used by `plugin.py` in every process, so this module imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from mstar_core.plugin.json_fields import JsonFields

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
RATE: Final = 16_000
HOP: Final = 160
"""Samples between two frames of the spectrogram."""

STRIDE: Final = 2
"""Frames of one encoder state, whose duration is also that of one timestamp token."""

HEAD: Final = 3
"""Most ids of a prompt that may be drawn instead of read: language, task and form, which follow the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Ids with a meaning. previous: begins the text before a window; no_speech: its probability tells silence.

    first_time: `<|0.00|>`, followed by the others. most_first_time: largest index of a window's first timestamp.
    languages: code -> id, empty for an English model, as are the tasks. suppress: never drawn; suppress_first: not as
    the first id.
    """

    start: int
    end: int
    no_times: int
    previous: int
    no_speech: int
    most_first_time: int | None = 50
    transcribe: int | None = None
    translate: int | None = None
    languages: Mapping[str, int] = field(default_factory=dict)
    suppress: tuple[int, ...] = ()
    suppress_first: tuple[int, ...] = ()

    @property
    def first_time(self) -> int:
        return self.no_times + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperConfig:
    """Sizes of a checkpoint. states: encoder states of a window; positions: of the decoder.

    alignment: (layer, head) pairs whose cross-attention follows the sound, for the times of words.
    """

    vocab: int
    width: int
    bins: int
    encoder_layers: int
    encoder_heads: int
    encoder_mlp: int
    decoder_layers: int
    decoder_heads: int
    decoder_mlp: int
    states: int
    positions: int
    ids: TokenIds
    alignment: tuple[tuple[int, int], ...] = ()
    median_width: int = 7

    @property
    def head_dim(self) -> int:
        return self.width // self.decoder_heads

    @property
    def frames(self) -> int:
        """Frames of the spectrogram of one window."""
        return self.states * STRIDE

    def facts(self) -> dict[str, Any]:
        """Return what programs need of the checkpoint: token ids, vocabulary, positions and frames of a window."""
        ids = {**asdict(self.ids), "first_time": self.ids.first_time}
        return {"ids": ids, "vocab": self.vocab, "positions": self.positions, "window": self.frames}


OFFICIAL: Final = WhisperConfig(
    vocab=51866,
    width=1280,
    bins=128,
    encoder_layers=32,
    encoder_heads=20,
    encoder_mlp=5120,
    decoder_layers=4,
    decoder_heads=20,
    decoder_mlp=5120,
    states=1500,
    positions=448,
    ids=TokenIds(
        start=50258,
        end=50257,
        no_times=50364,
        previous=50362,
        no_speech=50363,
        transcribe=50360,
        translate=50359,
        languages={f"language {number}": number for number in range(50259, 50359)},
    ),
)
"""Sizes of `openai/whisper-large-v3-turbo`: shown before a checkpoint is read."""


def read_config(folder: Path) -> WhisperConfig:
    """Read the config of a checkpoint folder. Raises WeightsError naming the file and key."""
    config = JsonFields.read(folder / CONFIG)
    generation = JsonFields.read_if_any(folder / GENERATION).completed(config.values)
    kind = config.get("model_type")
    if kind != "whisper":
        raise config.error("model_type", f"it is {kind!r}, not 'whisper'", "serve it with the plugin of its family")
    layers, heads = config.number("decoder_layers"), config.number("decoder_attention_heads")
    half = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
    alignment = tuple((int(layer), int(head)) for layer, head in generation.get("alignment_heads", half))
    return WhisperConfig(
        vocab=config.number("vocab_size"),
        width=config.number("d_model"),
        bins=config.number("num_mel_bins", 80),
        encoder_layers=config.number("encoder_layers"),
        encoder_heads=config.number("encoder_attention_heads"),
        encoder_mlp=config.number("encoder_ffn_dim"),
        decoder_layers=layers,
        decoder_heads=heads,
        decoder_mlp=config.number("decoder_ffn_dim"),
        states=config.number("max_source_positions", 1500),
        positions=config.number("max_target_positions", 448),
        ids=_token_ids(config, generation),
        alignment=alignment,
        median_width=config.number("median_filter_width", 7),
    )


def _token_ids(config: JsonFields, generation: JsonFields) -> TokenIds:
    end = generation.get("eos_token_id")
    suppress = tuple(generation.get("suppress_tokens", ()))
    no_times = generation.number("no_timestamps_token_id", 50363 if config.number("vocab_size") > 51864 else 50362)
    languages = {name.strip("<|>"): number for name, number in generation.get("lang_to_id", {}).items()}
    tasks = generation.get("task_to_id", {})
    return TokenIds(
        start=generation.number("decoder_start_token_id"),
        end=end[0] if isinstance(end, list) else int(end),
        no_times=no_times,
        # The ids before `<|notimestamps|>` are always those of earlier text and of silence.
        previous=generation.number("prev_sot_token_id", no_times - 2),
        no_speech=no_times - 1,
        most_first_time=generation.get("max_initial_timestamp_index"),
        transcribe=tasks.get("transcribe"),
        translate=tasks.get("translate"),
        languages=languages,
        suppress=tuple(number for number in suppress if number >= 0),
        suppress_first=tuple(generation.get("begin_suppress_tokens", ())),
    )
