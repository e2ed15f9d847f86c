"""Weights of each node: its tensors in the two files of a checkpoint. Used by `model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mstar_core.errors import WeightsError
from mstar_core.layers import Checkpoint, NameMap
from mstar_qwen3tts.checkpoint.config import CODEC_FOLDER

NAMES: Final[Mapping[str, NameMap]] = {
    "Talker": NameMap(prefixes={"talker.": ""}),
    "Codec": NameMap(
        prefixes={"decoder.": ""},
        ignore=("decoder.quantizer.rvq_first.input_proj.", "decoder.quantizer.rvq_rest.input_proj."),
    ),
    "VoiceEncoder": NameMap(
        ignore=tuple(
            f"encoder.quantizer.{kind}_residual_vector_quantizer.output_proj." for kind in ("semantic", "acoustic")
        ),
    ),
}
"""Names of each node with weights. Projections that only the other direction of a quantizer uses are left out."""

PREFIXES: Final = {"Talker": ("talker.",), "Codec": ("decoder.",), "VoiceEncoder": ("speaker_encoder.", "encoder.")}


def own_tensors(folder: Path, node: str) -> Checkpoint:
    """Return the part of a checkpoint that a node reads. Raises WeightsError if it has no tensors of the node."""
    whole = Checkpoint.find(folder)
    if whole.seed is not None:
        return whole
    found = {**whole.file_of, **Checkpoint.find(folder / CODEC_FOLDER).file_of}
    paths = {name: path for name, path in found.items() if name.startswith(PREFIXES[node])}
    if not paths:
        raise WeightsError(
            f"{folder} contains no tensors of {node}",
            f"their names start with {' or '.join(PREFIXES[node])}",
            "use the folder of a Qwen3-TTS checkpoint",
            file=str(folder),
        )
    return Checkpoint(folder, paths)
