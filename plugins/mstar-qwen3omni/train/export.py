"""Export of the trained parts into the official layout: `python -m train.export OUT FOLDER`.

Writes config, tokenizer, bfloat16 weights with their index, and train.json, the figures of the stages.
`--untrained` exports random weights of the same shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import save_file

from mstar_core.layers.moe import expert_parts
from mstar_qwen3omni.checkpoint.weights import TENSORS
from mstar_qwen3omni.published import shapes
from scripts.training.figures import last_figures, write_figures
from scripts.training.options import export_options

from . import codec, talker, thinker
from .layout import write_files
from .nodes import Nodes

if TYPE_CHECKING:
    from torch import Tensor

FILE: Final = "model.safetensors"
STAGES: Final = {"thinker": thinker.WEIGHTS, "codec": codec.WEIGHTS, "talker": talker.WEIGHTS}


def export(folder: Path, out: Path | None) -> None:
    """Write the checkpoint. out: folder of the training; None for random weights."""
    config = write_files(folder)
    nodes = Nodes(config)
    if out is not None:
        for name in STAGES.values():
            thinker.load(nodes, out, name)
    held = published(nodes)
    weights = {name: held[name].detach().bfloat16().contiguous() for name in sorted(shapes(config))}
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    total = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(weights, FILE)}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index) + "\n", encoding="utf-8")
    count = sum(value.numel() for value in held.values())
    write_figures(folder, count, {} if out is None else last_figures(out, STAGES))


def published(nodes: Nodes) -> dict[str, Tensor]:
    """Return the weights by published name: one matrix per expert, and one copy of the thinker's embeddings."""
    found: dict[str, Tensor] = {}
    for node, module in nodes.items():
        fused = expert_parts(module)
        own = {name: value for name, value in module.state_dict().items() if name not in fused}
        own |= {name: value for parts in fused.values() for name, value in parts.items()}
        for name, value in own.items():
            if name.startswith(talker.FROZEN):
                continue
            prefix, inner = next(
                (prefix, inner) for prefix, inner in TENSORS[node].prefixes.items() if name.startswith(inner)
            )
            found[prefix + name.removeprefix(inner)] = value
    return found


def main() -> None:
    parser = export_options(__doc__)
    parser.add_argument("--untrained", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    export(options.folder, None if options.untrained else options.out)
    for path in sorted(options.folder.iterdir()):
        print(f"{path.stat().st_size:9} {path.name}")


if __name__ == "__main__":
    main()
