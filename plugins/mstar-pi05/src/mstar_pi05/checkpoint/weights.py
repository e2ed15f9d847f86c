"""Mapping from the tensor names of both published layouts to the modules, and weight loading. Used by `model`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import WeightsError
from mstar_core.layers import Checkpoint, NameMap, load_weights

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.plugin.model import WeightProgress

log = logging.getLogger(__name__)

LEADING: Final = "model."
"""Prefix of every key in checkpoints that lerobot saved again."""

BOTH: Final = "paligemma_with_expert."
PALIGEMMA: Final = f"{BOTH}paligemma.model."
TIED: Final = f"{BOTH}paligemma.lm_head."
"""Prefix of the token table under the name of the tied head. A file contains one of the two names."""

CAMERAS: Final[Mapping[str, str]] = {
    f"{PALIGEMMA}vision_tower.vision_model.": "tower.",
    f"{PALIGEMMA}vision_tower.": "tower.",  # newer libraries omit one level
    f"{PALIGEMMA}multi_modal_projector.linear.": "projector.",
}
POLICY: Final[Mapping[str, str]] = {
    f"{PALIGEMMA}language_model.": "language.",
    TIED: "language.embed_tokens.",
    f"{BOTH}gemma_expert.model.": "expert.",
    "action_time_mlp_": "time.time_mlp_",
    "time_mlp_": "time.time_mlp_",
    "action_in_proj.": "action_in_proj.",
    "action_out_proj.": "action_out_proj.",
}
UNUSED: Final = (f"{BOTH}gemma_expert.lm_head.", "state_proj.")
"""Prefixes of unused tensors: the expert has no text output (its head is 1 GB), and only pi0 has a state vector."""

_PI0 = re.compile(r"gemma_expert\.model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)\.weight$")


def bare(name: str) -> str:
    """Return a key without the optional prefix."""
    return name.removeprefix(LEADING)


def target(name: str, prefixes: Mapping[str, str]) -> str | None:
    """Return the place of a key in the node with these prefixes, or None if it belongs elsewhere."""
    name = bare(name)
    for prefix, replacement in prefixes.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return None


def refuse_pi0(names: Iterable[str], source: str) -> None:
    """Raise WeightsError for the keys of pi0, whose expert has plain norms."""
    foreign = next((name for name in names if _PI0.search(name)), None)
    if foreign is not None:
        raise WeightsError(
            f"{source} contains pi0, not pi0.5",
            f"its expert has {foreign}, where pi0.5 has a dense layer",
            "use a Pi0.5 checkpoint",
            file=source,
            key=foreign,
        )


def load(module: nn.Module, files: Checkpoint, prefixes: Mapping[str, str], progress: WeightProgress | None) -> None:
    """Fill a node. Keys of other nodes and unknown keys are ignored; a place without a key is an error.

    Raises WeightsError naming file and key.
    """
    refuse_pi0(files.file_of, str(files.folder))
    places = module.state_dict()
    chosen = {name: target(name, prefixes) for name in files.file_of}
    kept = {name: path for name, path in files.file_of.items() if chosen[name] in places}
    # NameMap replaces prefixes, and a whole name is its own prefix.
    names = NameMap(prefixes={name: str(chosen[name]) for name in _longest_first(kept)})
    _tell_unknown(files, places, chosen)
    load_weights(module, Checkpoint(files.folder, kept), names, progress)


def _longest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=len, reverse=True)


def _tell_unknown(files: Checkpoint, places: Mapping[str, Any], chosen: Mapping[str, str | None]) -> None:
    known = (*CAMERAS, *POLICY, *UNUSED)
    odd = [name for name in files.file_of if not bare(name).startswith(known)]
    odd += [name for name, place in chosen.items() if place is not None and place not in places]
    if odd:
        log.warning("%s: %d tensors are not of this model and were ignored, %s first", files.folder, len(odd), odd[0])
