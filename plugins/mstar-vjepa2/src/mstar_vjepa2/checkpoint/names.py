"""Mapping from published tensor names to places in the modules. Used by weight loading and the conformance check.

Hub files have separate query, key and value matrices, under `encoder.*` and `predictor.*`. Official files join them and
use other names. The modules use the official names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mstar_vjepa2.checkpoint.files import CLASSIFIER

if TYPE_CHECKING:
    from torch import Tensor

WRAPPERS: Final = ("module.", "backbone.")
"""Prefixes of training wrappers. They may occur anywhere in a name, in any order."""

Rules = Sequence[tuple[re.Pattern[str], str]]

_TAIL: Final = r"(?P<tail>.+)"
_LAYER: Final = r"(?P<layer>\d+)\."
_THIRDS: Final = {"query": 0, "key": 1, "value": 2, "q_proj": 0, "k_proj": 1, "v_proj": 2}


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a module: a tensor, or one of `of` equal parts of its first axis."""

    target: str
    part: int = 0
    of: int = 1

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return this part of the target tensor. Mask vectors are stacked; the thirds of a QKV matrix are chunks."""
        if self.of == 1:
            return tensor
        return tensor[self.part] if tensor.shape[0] == self.of else tensor.chunk(self.of)[self.part]


def _rules(*pairs: tuple[str, str]) -> Rules:
    return tuple((re.compile(f"^{pattern}$"), target) for pattern, target in pairs)


def _blocks(prefix: str) -> tuple[tuple[str, str], ...]:
    """Return the rules for the blocks of a hub file."""
    return (
        (rf"{prefix}layer\.{_LAYER}attention\.(?P<third>query|key|value)\.{_TAIL}", "blocks.{layer}.attn.qkv.{tail}"),
        (rf"{prefix}layer\.{_LAYER}attention\.proj\.{_TAIL}", "blocks.{layer}.attn.proj.{tail}"),
        (rf"{prefix}layer\.{_LAYER}(?P<tail>(norm1|norm2|mlp)\..+)", "blocks.{layer}.{tail}"),
    )


ENCODER: Final = _rules(
    (rf"encoder\.embeddings\.patch_embeddings\.{_TAIL}", "patch_embed.{tail}"),
    *_blocks(r"encoder\."),
    (rf"encoder\.layernorm\.{_TAIL}", "norm.{tail}"),
    (r"encoder\.(?P<tail>(patch_embed|blocks|norm)\..+)", "{tail}"),
)
PREDICTOR: Final = _rules(
    (r"predictor\.embeddings\.mask_tokens", "mask_tokens"),
    (rf"predictor\.embeddings\.predictor_embeddings\.{_TAIL}", "embed.{tail}"),
    *_blocks(r"predictor\."),
    (rf"predictor\.layernorm\.{_TAIL}", "norm.{tail}"),
    (rf"predictor\.proj\.{_TAIL}", "proj.{tail}"),
    (r"predictor\.mask_tokens\.(?P<index>\d+)", "mask_tokens"),
    (rf"predictor\.predictor_embed\.{_TAIL}", "embed.{tail}"),
    (rf"predictor\.predictor_blocks\.{_TAIL}", "blocks.{tail}"),
    (rf"predictor\.predictor_(?P<what>norm|proj)\.{_TAIL}", "{what}.{tail}"),
)
ACTION: Final = _rules(
    (r"(ac_)?predictor\.(?P<tail>(predictor_embed|(action|state|extrinsics)_encoder)\..+)", "{tail}"),
    (rf"(ac_)?predictor\.predictor_blocks\.{_TAIL}", "blocks.{tail}"),
    (rf"(ac_)?predictor\.predictor_(?P<what>norm|proj)\.{_TAIL}", "{what}.{tail}"),
)
_SELF: Final = rf"pooler\.self_attention_layers\.{_LAYER}"
_CROSS: Final = r"pooler\.cross_attention_layer\."
POOLER: Final = _rules(
    (r"pooler\.query_tokens", "query_tokens"),
    (rf"{_SELF}layer_norm(?P<what>[12])\.{_TAIL}", "blocks.{layer}.norm{what}.{tail}"),
    (rf"{_SELF}self_attn\.(?P<third>[qkv]_proj)\.{_TAIL}", "blocks.{layer}.attn.qkv.{tail}"),
    (rf"{_SELF}self_attn\.out_proj\.{_TAIL}", "blocks.{layer}.attn.proj.{tail}"),
    (rf"{_SELF}(?P<tail>mlp\..+)", "blocks.{layer}.{tail}"),
    (rf"{_CROSS}cross_attn\.{_TAIL}", "cross.{tail}"),
    (rf"{_CROSS}(?P<tail>(layer_norm1|layer_norm2|mlp)\..+)", "cross.{tail}"),
    (r"(?P<tail>classifier\..+)", "{tail}"),
)
DROPPED: Final = re.compile(r"(^|\.)(predictor_)?pos_embed$")
"""Tables of absolute positions in some official files. The model uses rotary positions instead."""


def plain(name: str) -> str:
    """Return a name without the prefixes of wrappers and classifier files."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(CLASSIFIER)


def spot(name: str, rules: Rules, mask_tokens: int = 1) -> Spot | None:
    """Return the place of a plain name under these rules, or None if it belongs to another node."""
    for pattern, target in rules:
        match = pattern.match(name)
        if match is None:
            continue
        parts: Mapping[str, str] = match.groupdict(default="")
        place = target.format(**parts)
        if "third" in parts:
            return Spot(place, _THIRDS[parts["third"]], len("qkv"))
        if "index" in parts:
            return Spot(place, int(parts["index"]), mask_tokens)
        return Spot(place)
    return None


def belongs(name: str, all_rules: Sequence[Rules]) -> bool:
    """Whether a plain name matches the rules of any node."""
    return any(spot(name, rules) is not None for rules in all_rules)


def hub_names(layers: int, predictor_layers: int, pooler_layers: int = 0) -> Iterator[str]:
    """Yield the names in a hub file; with pooler layers, those of a classifier."""
    wrap = CLASSIFIER if pooler_layers else ""
    yield from (f"{wrap}{name}" for name in _hub_backbone(layers, predictor_layers))
    if not pooler_layers:
        return
    yield "pooler.query_tokens"
    for layer in range(pooler_layers):
        stem = f"pooler.self_attention_layers.{layer}"
        heads = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
        yield from _linear(stem, ("layer_norm1", *heads, "layer_norm2", "mlp.fc1", "mlp.fc2"))
    crossed = ("cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj")
    yield from _linear("pooler.cross_attention_layer", ("layer_norm1", *crossed, "layer_norm2", "mlp.fc1", "mlp.fc2"))
    yield from _linear("classifier", ("",))


def _hub_backbone(layers: int, predictor_layers: int) -> Iterator[str]:
    yield from _linear("encoder.embeddings.patch_embeddings.proj", ("",))
    block = (
        "norm1",
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.proj",
        "norm2",
        "mlp.fc1",
        "mlp.fc2",
    )
    for layer in range(layers):
        yield from _linear(f"encoder.layer.{layer}", block)
    yield from _linear("encoder.layernorm", ("",))
    yield "predictor.embeddings.mask_tokens"
    yield from _linear("predictor.embeddings.predictor_embeddings", ("",))
    for layer in range(predictor_layers):
        yield from _linear(f"predictor.layer.{layer}", block)
    yield from _linear("predictor", ("layernorm", "proj"))


def official_ac_names(layers: int, predictor_layers: int) -> Iterator[str]:
    """Yield the used names of the official AC file, as `part.name`."""
    block = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    yield from _linear("encoder.module.patch_embed.proj", ("",))
    for layer in range(layers):
        yield from _linear(f"encoder.module.blocks.{layer}", block)
    yield from _linear("encoder.module.norm", ("",))
    yield from _linear("predictor.module", ("predictor_embed", "action_encoder", "state_encoder", "extrinsics_encoder"))
    for layer in range(predictor_layers):
        yield from _linear(f"predictor.module.predictor_blocks.{layer}", block)
    yield from _linear("predictor.module", ("predictor_norm", "predictor_proj"))


def _linear(stem: str, parts: Sequence[str]) -> Iterator[str]:
    for part in parts:
        for kind in ("weight", "bias"):
            yield ".".join(word for word in (stem, part, kind) if word)
