"""Why a plugin cannot be used: its phase, the place in its files, the cause and what to try. Made by the loader."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mstar_core.errors import MstarError, PluginError
from mstar_core.plugin.entries import PluginEntry

State = Literal["broken", "incompatible", "invalid"]
Phase = Literal["requirement", "import", "api", "hooks", "models", "spec"]
_STATES: dict[str, State] = {
    "requirement": "incompatible",
    "api": "incompatible",
    "import": "broken",
    "models": "broken",
    "hooks": "invalid",
    "spec": "invalid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One plugin's failure. place: `plugin.py:3`; file: the same with its whole path; trace: the traceback."""

    plugin: str
    distribution: str
    phase: Phase
    cause: str
    place: str = ""
    file: str = ""
    detail: str = ""
    hint: str = ""
    trace: str = ""

    @property
    def state(self) -> State:
        return _STATES[self.phase]

    @property
    def text(self) -> str:
        """One line for tables: `broken: ModuleNotFoundError: No module named 'librosa' (plugin.py:3)`."""
        hint = f"; {self.hint}" if self.hint else ""
        place = f" ({self.place})" if self.place else ""
        return f"{self.state}: {self.cause}{hint}{place}"

    @classmethod
    def of(cls, error: BaseException, entry: PluginEntry, phase: Phase) -> Problem:
        """Describe what stopped the plugin in `phase`."""
        file, line = _where(error, entry)
        place = f"{Path(file).name}:{line}" if file else ""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, MstarError):
            cause, detail, hint = error.title, error.detail, error.hint
        else:
            cause, detail, hint = _cause(error), "", _hint(error, entry)
        return cls(
            plugin=entry.name,
            distribution=entry.distribution,
            phase=phase,
            cause=cause,
            place=place,
            file=f"{file}:{line}" if file else "",
            detail=detail,
            hint=hint,
            trace=trace,
        )

    def error(self) -> PluginError:
        """The error of whoever asks for this plugin."""
        facts = {"plugin": self.plugin, "distribution": self.distribution, "phase": self.phase}
        detail = "\n".join(
            part
            for part in (f"{self.state}: {self.cause}", f"in {self.file}" if self.file else "", self.detail)
            if part
        )
        return PluginError(f"plugin {self.plugin!r} cannot be used", detail, self.hint, **facts)


def _cause(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"SystemExit: {error.code} while it was imported"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _hint(error: BaseException, entry: PluginEntry) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"is everything of {entry.distribution} installed? pip install {entry.distribution}"
    return ""


def _where(error: BaseException, entry: PluginEntry) -> tuple[str, int]:
    # The plugin's own deepest line tells its author more than the import machinery below it.
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    package = entry.target.split(":")[0].split(".")[0]
    own = [frame for frame in frames if package in Path(frame.filename).parts]
    if not own:
        return "", 0
    return own[-1].filename, own[-1].lineno or 1
