"""Export into the official layout: `python -m train.export OUT FOLDER`.

Writes config, tokenizer, bfloat16 weights and train.json, the figures of its stages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from .layout import write_layout
from .train import STAGES, log_file, weights_file


def export(folder: Path, out: Path) -> None:
    """Write the checkpoint. out: folder of the training."""
    write_layout(folder)
    weights = load_file(out / weights_file(STAGES[-1]))
    small = {name: value.bfloat16() for name, value in sorted(weights.items())}
    save_file(small, folder / "model.safetensors", metadata={"format": "pt"})
    figures = {
        stage: json.loads((out / log_file(stage)).read_text(encoding="utf-8").splitlines()[-1]) for stage in STAGES
    }
    count = sum(value.numel() for value in weights.values())
    (folder / "train.json").write_text(json.dumps({"parameters": count, **figures}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    export(options.folder, options.out)


if __name__ == "__main__":
    main()
