"""Export into the official layout: `python -m train.export OUT FOLDER`.

Writes config, tokenizer, bfloat16 weights and train.json, the figures of its stages.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from scripts.training.figures import last_figures, write_figures
from scripts.training.options import export_options

from .layout import write_layout
from .train import STAGES, weights_file


def export(folder: Path, out: Path) -> None:
    """Write the checkpoint. out: folder of the training."""
    write_layout(folder)
    weights = load_file(out / weights_file(STAGES[-1]))
    small = {name: value.bfloat16() for name, value in sorted(weights.items())}
    save_file(small, folder / "model.safetensors", metadata={"format": "pt"})
    write_figures(folder, sum(value.numel() for value in weights.values()), last_figures(out, STAGES))


def main() -> None:
    options = export_options(__doc__).parse_args()
    export(options.folder, options.out)


if __name__ == "__main__":
    main()
