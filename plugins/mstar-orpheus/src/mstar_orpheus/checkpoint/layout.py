"""Layout of a checkpoint on disk: a folder for the language model and one for the vocoder. Standard library only.

Used by the config reader, the processor, the model and the download.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError

CONFIG: Final = "config.json"
SNAC_FOLDERS: Final = ("snac", "snac_24khz")
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
