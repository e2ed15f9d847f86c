"""The generated checkpoint `whisper:tiny`: random weights in the official layout, equal on every machine.

Its windows are of one second and its text is noise. Everything else behaves as with a real model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.weights.sources import generated_checkpoint
from mstar_whisper.checkpoint.config import read_config
from mstar_whisper.sources.layout import Sizes, vocabulary, write_texts

if TYPE_CHECKING:
    from torch import Tensor

VERSION: Final = 2
"""Version of the generated files. A folder of another version is replaced."""

SEED: Final = 39
"""One text of the samples ends by itself, and none has many windows: the checks cancel requests at every step."""
SIZES: Final = Sizes(width=64, heads=4, mlp=128, encoder_layers=2, decoder_layers=2, states=50, positions=96)
END: Final = 4.0
"""Bias of the end, so that a text ends by itself after some dozens of ids."""


def write_tiny(folder: Path) -> Path:
    """Write `whisper:tiny` into `folder` and return it. Raises StartError when the folder cannot be written."""
    return generated_checkpoint(folder, "whisper:tiny", VERSION, _write)


def _write(folder: Path) -> None:
    from safetensors.torch import save_file

    write_texts(folder, vocabulary(SIZES.states), SIZES)
    save_file(random_weights(folder, SEED), folder / "model.safetensors", metadata={"format": "pt"})


def random_weights(folder: Path, seed: int) -> dict[str, Tensor]:
    """Return random weights by published name for the sizes of a folder's configs. Equal seeds give equal weights."""
    import torch

    from mstar_whisper.model import DECODER, ENCODER
    from mstar_whisper.nodes.decoder import SpeechDecoder
    from mstar_whisper.nodes.encoder import Encoder

    config, generator = read_config(folder), torch.Generator().manual_seed(seed)
    halves = {ENCODER: Encoder(config).state_dict(), DECODER: SpeechDecoder(config).decoder.state_dict()}
    weights: dict[str, Tensor] = {}
    for prefix, half in halves.items():
        for name, empty in sorted(half.items()):  # so that the order of modules changes no weight
            drawn = torch.randn(empty.shape, generator=generator) * empty[0].numel() ** -0.5
            is_norm = "norm" in name
            small = 0.02 * torch.randn(empty.shape, generator=generator)
            weights[prefix + name] = (
                (1 + small) if is_norm and name.endswith("weight") else small if empty.dim() < 2 else drawn
            )
    embedding = weights[DECODER + "embed_tokens.weight"]
    embedding *= 3.0
    # The last norm writes this constant into every hidden state, which gives the head a bias.
    bias = torch.zeros(config.vocab)
    bias[config.ids.end] = END
    weights[DECODER + "layer_norm.weight"][0] = 0
    weights[DECODER + "layer_norm.bias"][0] = 1
    embedding[:, 0] = bias
    return weights
