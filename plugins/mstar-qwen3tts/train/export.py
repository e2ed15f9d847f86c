"""Export of the trained parts into the official layout: `python -m train.export OUT FOLDER`.

Writes config, tokenizer, bfloat16 weights and train.json, the figures of the stages. The codec encoder is left out: a
CustomVoice checkpoint does not use it.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from mstar_qwen3tts.sources.tiny_files import save_weights
from scripts.training.figures import last_figures, write_figures
from scripts.training.options import export_options

from . import codec, talker
from .layout import write_layout


def export(folder: Path, out: Path) -> None:
    """Write the checkpoint. out: folder of the training."""
    write_layout(folder)
    weights = load_file(out / codec.WEIGHTS) | load_file(out / talker.WEIGHTS)
    save_weights(folder, {name: value.bfloat16() for name, value in sorted(weights.items())})
    count = sum(value.numel() for value in weights.values())
    write_figures(folder, count, last_figures(out, ("codec", "talker")))


def main() -> None:
    options = export_options(__doc__).parse_args()
    export(options.folder, options.out)


if __name__ == "__main__":
    main()
