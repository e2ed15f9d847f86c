"""Layout of a checkpoint on disk: a folder for the language model and one for the vocoder. Standard library only.

Used by the config reader, the processor, the model and the download.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError

CONFIG: Final = "config.json"
SNAC_FOLDERS: Final = ("snac", "snac_24khz")
_SAFETENSORS: Final = ("model.safetensors.index.json", "model.safetensors")
_PICKLED: Final = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_HINT: Final = "a checkpoint is DIR/lm and DIR/snac, or the language model in DIR and the vocoder in DIR/snac"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLayout:
    """Folders of the two parts: `lm` (config, tokenizer, weights) and `snac` (config, weights)."""

    lm: Path
    snac: Path

    @classmethod
    def find(cls, folder: Path) -> CheckpointLayout:
        """Find both parts under `folder`. Raises WeightsError with what is missing and the paths tried."""
        lm = next((place for place in (folder / "lm", folder) if (place / CONFIG).is_file()), None)
        if lm is None:
            raise _missing("the language model's config.json", folder, [folder / "lm" / CONFIG, folder / CONFIG])
        places = [base / name for base in dict.fromkeys((folder, lm)) for name in SNAC_FOLDERS]
        snac = next((place for place in places if (place / CONFIG).is_file()), None)
        if snac is None:
            raise _missing("the vocoder's config.json", folder, [place / CONFIG for place in places])
        return cls(lm=lm, snac=snac)


def weight_files(part: Path) -> list[Path]:
    """Return the weight files of one part: safetensors before `.bin`, an index before a single file.

    Raises WeightsError with the first file that an index lists and the folder lacks.
    """
    for name in (*_SAFETENSORS, *_PICKLED):
        path = part / name
        if path.is_file():
            return _indexed(path) if name.endswith(".index.json") else [path]
    raise _missing("weights", part, [part / name for name in (*_SAFETENSORS, *_PICKLED)])


def _indexed(index: Path) -> list[Path]:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise WeightsError(f"{index} has no weight_map", hint="download this file again", file=str(index))
    files = [index.parent / name for name in sorted(set(named.values()))]
    for path in files:
        if not path.is_file():
            raise WeightsError(
                f"{path} is missing", f"{index.name} lists {len(files)} files", "download it again", file=str(path)
            )
    return files


def verify(path: Path) -> None:
    """Check that a weight file is complete without reading its tensors. Raises WeightsError with the file."""
    problem = _safetensors_problem(path) if path.suffix == ".safetensors" else _zip_problem(path)
    if problem:
        raise WeightsError(f"{path} is damaged", problem, "download this file again", file=str(path))


def _safetensors_problem(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
        if size < 8 or head > size - 8:
            return f"{size} bytes are too few for its header"
        try:
            named = json.loads(file.read(head))
            end = max(
                (int(entry["data_offsets"][1]) for name, entry in named.items() if name != "__metadata__"), default=0
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"its header cannot be read: {error}"
    whole = 8 + head + end
    return "" if whole == size else f"{size} bytes; expected from its header: {whole}"


def _zip_problem(path: Path) -> str:
    # torch.save writes a zip archive, whose directory is at the end: truncated files have none.
    if zipfile.is_zipfile(path):
        return ""
    return f"{path.stat().st_size} bytes; the file is truncated or not an archive of torch.save"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises WeightsError with the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path} is missing", hint=_HINT, file=str(path)) from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), "download this file again", file=str(path)) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} does not hold a JSON object", hint="download this file again", file=str(path))
    return value


def _missing(what: str, folder: Path, looked: list[Path]) -> WeightsError:
    places = [str(path) for path in looked]
    return WeightsError(f"{what} not found in {folder}", f"looked for {', '.join(places)}", _HINT, looked=places)
