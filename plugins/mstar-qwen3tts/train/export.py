"""Export of the trained parts into the official layout: `python -m train.export OUT FOLDER`.

Writes config, tokenizer, bfloat16 weights and train.json, the figures of the stages. The codec encoder is left out: a
CustomVoice checkpoint does not use it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file

from mstar_qwen3tts.sources.tiny_files import save_weights

from . import codec, talker
from .layout import write_layout


def export(folder: Path, out: Path) -> None:
    """Write the checkpoint. out: folder of the training."""
    write_layout(folder)
    weights = load_file(out / codec.WEIGHTS) | load_file(out / talker.WEIGHTS)
    save_weights(folder, {name: value.bfloat16() for name, value in sorted(weights.items())})
    figures = {
        name: json.loads((out / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        for name in ("codec", "talker")
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
