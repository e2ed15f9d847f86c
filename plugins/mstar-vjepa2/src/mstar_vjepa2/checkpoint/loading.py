"""Loading of a node's weights from any published layout. Called while a worker starts.

safetensors files are read tensor by tensor. Official .pt files are memory-mapped, and only `encoder` and `predictor`
are read: not `target_encoder`, and no optimizer state.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.errors import WeightsError, did_you_mean
from mstar_core.layers import Checkpoint
from mstar_vjepa2.checkpoint.files import weight_file
from mstar_vjepa2.checkpoint.names import DROPPED, Rules, Spot, belongs, plain, spot

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_core.plugin.model import WeightProgress

PARTS: Final = ("encoder", "predictor")
"""Entries of an official .pt that contain the model."""


@dataclass(frozen=True, slots=True)
class Source:
    """Tensors of a checkpoint by plain name. stored: plain name -> name in the file. mapped: the tensors of a .pt."""

    path: Path
    stored: Mapping[str, str]
    mapped: Mapping[str, Tensor] | None = None

    @classmethod
    def find(cls, folder: Path) -> Source:
        """Open the checkpoint in `folder`. Raises WeightsError naming a missing, truncated or ambiguous file."""
        path = weight_file(folder)
        if path.suffix == ".pt":
            mapped = _official(path)
            return cls(path, _plainly(mapped, path), mapped)
        return cls(path, _plainly(Checkpoint.find(folder).file_of, path))

    def tensors(self, names: Sequence[str], progress: WeightProgress | None) -> Iterator[tuple[str, Tensor]]:
        """Yield these plain names with their tensors on the host."""
        back = {self.stored[name]: name for name in names}
        if self.mapped is None:
            for stored, value in Checkpoint.find(self.path.parent).tensors(back, progress):
                yield back[stored], value
            return
        total = sum(self.mapped[stored].nbytes for stored in back)
        done = 0
        for stored, name in back.items():
            yield name, self.mapped[stored]
            done += self.mapped[stored].nbytes
            if progress is not None:
                progress(done, total, self.path.name)


def fill(
    module: nn.Module,
    source: Source,
    rules: Rules,
    all_rules: Sequence[Rules],
    progress: WeightProgress | None = None,
    mask_tokens: int = 1,
) -> None:
    """Fill every parameter of a module and cast to its dtype.

    rules: those of this node; all_rules: those of all nodes, so that a name without any rule is an error. Raises
    WeightsError naming the first tensor that is missing, unknown or of the wrong shape.
    """
    places = dict(module.state_dict(keep_vars=True))
    spots = {name: target for name in source.stored if (target := spot(name, rules, mask_tokens)) is not None}
    _check_names(places, spots, source, all_rules)
    with torch.no_grad():
        for name, value in source.tensors(list(spots), progress):
            place = spots[name].part_of(places[spots[name].target])
            if value.shape != place.shape:
                raise WeightsError(
                    f"{source.path}: {name} has shape {list(value.shape)}",
                    f"its config requires {list(place.shape)}",
                    "config and weights must be of one checkpoint",
                    file=str(source.path),
                )
            place.copy_(value)


def _check_names(
    places: Mapping[str, Tensor], spots: Mapping[str, Spot], source: Source, all_rules: Sequence[Rules]
) -> None:
    unknown = sorted(name for name in source.stored if not belongs(name, all_rules))
    homeless = sorted(name for name, place in spots.items() if place.target not in places or place.part >= place.of)
    if unknown or homeless:
        name = (homeless or unknown)[0]
        raise WeightsError(
            f"{source.path} contains {source.stored[name]}, which has no place in the model",
            f"{len(unknown) + len(homeless)} such tensors",
            did_you_mean(spots[name].target, places) if homeless else "config and weights must be of one checkpoint",
            file=str(source.path),
        )
    parts: dict[str, set[int]] = {}
    counts: dict[str, int] = {}
    for place in spots.values():
        parts.setdefault(place.target, set()).add(place.part)
        counts[place.target] = place.of
    missing = sorted(name for name in places if len(parts.get(name, ())) < counts.get(name, 1))
    if missing:
        raise WeightsError(
            f"{source.path} lacks {missing[0]}",
            f"{len(missing)} of {len(places)} tensors are missing or incomplete",
            "the checkpoint is incomplete or of another model",
            file=str(source.path),
        )


def _plainly(names: Mapping[str, object], path: Path) -> dict[str, str]:
    stored: dict[str, str] = {}
    for name in names:
        short = plain(name)
        if DROPPED.search(short):
            continue
        if short in stored:
            raise WeightsError(f"{path} contains {short} twice", f"as {stored[short]} and {name}", file=str(path))
        stored[short] = name
    return stored


def _official(path: Path) -> dict[str, Tensor]:
    """Return the tensors of an official file as `part.name`, memory-mapped. Only plain data is unpickled."""
    if not zipfile.is_zipfile(path):
        raise WeightsError(f"{path} is truncated or not a torch file", hint="fetch it again", file=str(path))
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"{path} cannot be read", detail, "fetch it again, or convert it to safetensors", file=str(path)
        ) from error
    state: dict[str, Tensor] = {}
    for part in PARTS:
        tensors = whole.get(part) if isinstance(whole, dict) else None
        if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise WeightsError(f"{path} has no {part} of tensors", hint="use an official file", file=str(path))
        state |= {f"{part}.{name}": value for name, value in tensors.items()}
    return state
