"""Request of `mstarctl call`, checked against the inputs that the deployment accepts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mstar_core.client import Line
from mstar_core.codec import NPY_MAGIC, read_npy
from mstar_core.errors import ConfigError, UsageError, did_you_mean
from mstarctl.client.api import ApiClient

STATE_NAMES: Final = ("robot_state", "states")
"""Parameters that take the state of a robot, by preference."""

CHAT_ROUTE: Final = "/v1/chat/completions"
OTHERS: Final[Mapping[str, tuple[str, ...]]] = {
    "inputs": ("text", "image", "audio"),
    "outputs": ("text",),
    "routes": (CHAT_ROUTE,),
}
"""Facts of a model whose server does not list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A served model as its api describes it. parameters: their names.

    speech: `verbatim` if the model reads a text aloud, `answer` if it answers, empty if it does not speak.
    capabilities: None if the server lists none, as servers of other kinds. parent: the base of an adapter, else empty.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: frozenset[str]
    notice: str = ""
    routes: tuple[str, ...] = ()
    speech: str = ""
    aliases: tuple[str, ...] = ()
    capabilities: frozenset[str] | None = None
    parent: str = ""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Card:
        """Build from one entry of GET /v1/models. A server of another kind lists names only, and is taken to chat."""
        capabilities = facts.get("capabilities")
        return cls(
            name=str(facts["id"]),
            inputs=tuple(facts.get("input_modalities", OTHERS["inputs"])),
            outputs=tuple(facts.get("output_modalities", OTHERS["outputs"])),
            parameters=frozenset(facts.get("parameters", {}).get("properties", {})),
            notice=str(facts.get("notice", "")),
            routes=tuple(facts.get("endpoints", OTHERS["routes"])),
            speech=str(facts.get("speech", "")),
            aliases=tuple(facts.get("aliases", ())),
            capabilities=None if capabilities is None else frozenset(capabilities),
            parent=str(facts.get("parent") or ""),
        )


def named_model(models: tuple[Card, ...], name: str) -> Card:
    """Return a served model or adapter by its name or alias. Raises UsageError."""
    found = next((card for card in models if name == card.name or name in card.aliases), None)
    if found is None:
        raise UsageError(f"the server has no model {name!r}", hint=did_you_mean(name, [card.name for card in models]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, which may be sent many times. files: name and content. outputs: modalities."""

    outputs: tuple[str, ...]
    text: str | None = None
    files: tuple[tuple[str, bytes], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    request_id: str | None = None

    def send(self, client: ApiClient, **loop: float | None) -> Iterator[Line]:
        """Send the request and return the lines of its answer as they arrive. Raises the error that the api reports.

        loop: `period_ms` and `skipped_ticks` of a control loop.
        """
        return client.generate(
            outputs=self.outputs,
            text=self.text,
            files=self.files,
            params={**self.params, **loop},
            request_id=self.request_id,
        )


def requested_outputs(card: Card, kind: str) -> tuple[str, ...]:
    """Return the modalities to request for an answer of one kind. Speech comes with its text if the model writes it."""
    return ("text", kind) if kind == "audio" and "text" in card.outputs else (kind,)


def parse_params(texts: Sequence[str]) -> dict[str, Any]:
    """Parse `k=v` words. A value is parsed as JSON if possible, else taken as text. Raises UsageError."""
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--param must be KEY=VALUE, not {text!r}", hint="--param temperature=0.5")
        try:
            values[key.strip()] = json.loads(value)
        except ValueError:
            values[key.strip()] = value
    return values


def read_files(card: Card, kind: str, paths: Sequence[Path] | None) -> Iterator[tuple[str, bytes]]:
    """Read files of one modality. Raises UsageError if the model does not accept it, ConfigError if unreadable."""
    if paths and kind not in card.inputs:
        raise UsageError(f"{card.name} does not accept {kind} input", hint=f"it accepts {', '.join(card.inputs)}")
    for path in paths or ():
        yield path.name, read_bytes(path, kind)


def read_bytes(path: Path, key: str) -> bytes:
    """Read a file. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", error.strerror or str(error), file=str(path), key=key) from error


def state_param(card: Card, path: Path) -> dict[str, Any]:
    """Read a state file as the model's state parameter. Raises UsageError, ConfigError."""
    name = next((name for name in STATE_NAMES if name in card.parameters), None)
    if name is None:
        raise UsageError(f"{card.name} does not accept a state", hint="omit --state")
    state = read_state(path)
    # `states` has one row per frame; a file of one frame may be a plain row.
    is_row = isinstance(state, list) and not any(isinstance(item, list) for item in state)
    return {name: [state] if name == "states" and is_row else state}


def read_state(path: Path) -> Any:
    """Read numbers from JSON lists, a .npy file, or text separated by commas or spaces. Raises ConfigError."""
    data = read_bytes(path, "state")
    try:
        if data.startswith(NPY_MAGIC):
            return read_npy(data).to_lists()
        text = data.decode("utf-8")
        if path.suffix == ".json" or text.lstrip().startswith("["):
            return _numbers(json.loads(text))
        return [float(word) for word in re.split(r"[\s,;]+", text.strip())]
    except (ValueError, UnicodeDecodeError) as error:
        hint = "write JSON lists, a .npy file, or numbers separated by commas"
        raise ConfigError(f"{path} contains no state", str(error), hint, file=str(path), key="state") from error


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} must be a finite number")
    return value
