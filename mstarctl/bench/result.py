"""Result of a run: its folder with `result.json`, `requests.jsonl`, `spans.jsonl`, `timeline.jsonl` and `env.json`.

Raw data is always kept, so that every figure can be computed again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.errors import ConfigError
from mstarctl.bench.measure.load_metrics import DEFINITIONS_VERSION, METRICS, Measures
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.terms import Term, parse_terms
from mstarctl.bench.measure.window import MeasuredWindow
from mstarctl.bench.recorder import LINES
from mstarctl.bench.server_side import SPANS

SCHEMA: Final = 1
RESULT, ENVIRONMENT, TIMELINE = "result.json", "env.json", "timeline.jsonl"
SWEEP: Final = "sweep.json"
PARTIAL: Final = ".partial"
_PATH: Final = re.compile(r"(?<![\w:/.])/(?P<root>[\w.-]+)/(?:[^/\s\"',;:]+/)*(?P<last>[^/\s\"',;:]*)")
"""An absolute path of at least two parts."""


def definitions() -> dict[str, Any]:
    """Return the definition of every metric, with the version of all."""
    return {"version": DEFINITIONS_VERSION, **{metric.name: metric.definition for metric in METRICS}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFolder:
    """A result on disk. Made by `opened`; requests and spans are read on demand."""

    path: Path
    facts: dict[str, Any]

    @classmethod
    def opened(cls, path: Path) -> ResultFolder:
        """Open a result. Raises ConfigError if it is missing, of a newer schema, or not a result of one run."""
        file = path / RESULT if path.is_dir() else path
        try:
            facts = json.loads(file.read_text())
        except OSError as error:
            hint = f"the run was interrupted before its end: {path}{PARTIAL}" if _partial(path).exists() else ""
            raise ConfigError(f"{path} contains no result", error.strerror or "", hint, file=str(file)) from error
        except ValueError as error:
            raise ConfigError(f"{file} is not a result", str(error), file=str(file)) from error
        if not isinstance(facts, dict) or not isinstance(facts.get("schema"), int):
            raise ConfigError(f"{file} is not a result", "it has no schema", file=str(file))
        if facts["schema"] > SCHEMA:
            raise ConfigError(
                f"{file} has schema {facts['schema']}",
                hint=f"this version reads up to {SCHEMA}: update mstarctl",
                file=str(file),
            )
        if facts.get("kind"):
            raise ConfigError(
                f"{file} is a result of {facts['kind']}",
                "it has no requests",
                f"mstarctl bench show {file.parent}",
                file=str(file),
            )
        return cls(path=file.parent, facts=facts)

    @property
    def window(self) -> MeasuredWindow:
        window = self.facts["window"]
        return MeasuredWindow(start_s=window["start_s"], end_s=window["end_s"])

    @property
    def measures(self) -> Measures:
        return msgspec.convert(self.facts["measures"], Measures)

    @property
    def goals(self) -> list[Term]:
        return parse_terms(self.facts.get("slo") or "", "--slo", is_goal=True)

    def outcomes(self) -> list[Outcome]:
        """Read all requests by their intended times. Raises ConfigError for a line that is not a request."""
        decoder = msgspec.json.Decoder(Outcome)
        outcomes = []
        with (self.path / LINES).open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    outcomes.append(decoder.decode(line))
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"{self.path / LINES}:{number} is not a request", str(error)) from error
        return sorted(outcomes, key=lambda outcome: (outcome.due_s, outcome.index))

    def spans(self) -> Iterator[dict[str, Any]]:
        """Yield the server's summaries; none for a server without an admin socket."""
        yield from _json_lines(self.path / SPANS)

    def timeline(self) -> list[dict[str, Any]]:
        """Return the buckets of one second."""
        return list(_json_lines(self.path / TIMELINE))

    def environment(self) -> dict[str, Any]:
        """Return the environment. Raises ConfigError."""
        try:
            facts: dict[str, Any] = json.loads((self.path / ENVIRONMENT).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path / ENVIRONMENT} cannot be read", str(error)) from error
        return facts


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with path.open("rb") as file:
            yield from (json.loads(line) for line in file if line.strip())


def begin(path: Path) -> Path:
    """Make and return the folder `PATH.partial` of a run. Raises ConfigError if the result or the folder exists."""
    partial = _partial(path)
    if path.exists():
        raise ConfigError(f"{path} exists", hint="choose another --out", file=str(path))
    try:
        partial.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError(
            f"{partial} exists",
            "another run writes it, or was cut off",
            "remove it, or choose another --out",
            file=str(partial),
        ) from error
    except OSError as error:
        raise ConfigError(f"{partial} cannot be made", error.strerror or "", file=str(partial)) from error
    return partial


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Write one document, without the folders of this machine."""
    path.write_text(json.dumps(without_folders(facts), indent=1) + "\n")


def without_folders(value: Any) -> Any:
    """Return facts with each path of this machine shortened to its last part, because results are given to others.

    Paths of URLs and of the api stay, because this machine has no folder of that name.
    """
    match value:
        case dict():
            return {key: without_folders(part) for key, part in value.items()}
        case list() | tuple():
            return [without_folders(part) for part in value]
        case str():
            return _PATH.sub(lambda match: match["last"] if Path(f"/{match['root']}").is_dir() else match[0], value)
        case _:
            return value


def finish(partial: Path, path: Path) -> Path:
    """Give the folder of a complete run its name."""
    for leftover in (*partial.glob("*.plan"), partial / "bodies.bin"):
        leftover.unlink(missing_ok=True)
    return partial.rename(path)
