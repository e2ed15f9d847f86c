"""Workloads by name: those of the model's plugin, generic ones for other servers, a mix, and files of requests."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ConfigError, NotFound, UsageError, did_you_mean
from mstar_core.plugin.offers import WorkloadSpec
from mstar_core.targets import load_target
from mstar_core.workloads import ServedModel, WorkloadRequest, numbered

_SHARED: Final = "mstar_core.workloads.generic"
GENERIC: Final = (
    WorkloadSpec(name="chat", title="text to text", target=f"{_SHARED}:chat"),
    WorkloadSpec(name="tts-short", title="8 to 25 words to speech", target=f"{_SHARED}:speech"),
    WorkloadSpec(
        name="tts-long",
        title="80 to 200 words to speech",
        target=f"{_SHARED}:speech",
        options={"least": 80, "most": 200},
    ),
    WorkloadSpec(name="see", title="questions about one image", target=f"{_SHARED}:see"),
)
"""Workloads of servers whose model has no plugin here."""

MIXED: Final = "mixed"
FILE_KEYS: Final = ("t", "id", "text", "files", "params", "outputs", "weight")

Source = Callable[[ServedModel, int], Iterator[WorkloadRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload. source: draws its requests from a card and a seed. size: requests of a file, 0 without end.

    family: decides which figures the display shows first.
    """

    name: str
    title: str
    source: Source
    size: int = 0
    is_timed: bool = False

    def requests(self, card: ServedModel, seed: int, count: int) -> list[WorkloadRequest]:
        """Return the first `count` requests. A shorter file is repeated."""
        drawn = self.source(card, seed)
        return [request for _, request in zip(range(count), drawn, strict=False)]


def workload_of(name: str, offered: Sequence[WorkloadSpec]) -> Workload:
    """Return a workload by its name, or that of a `.jsonl` file. Raises NotFound with the nearest name, ConfigError."""
    if name.endswith((".jsonl", ".ndjson")):
        return file_workload(Path(name))
    known = {spec.name: spec for spec in offered}
    if name == MIXED and known:
        return Workload(name=MIXED, title=f"all of {', '.join(known)}", source=_mixed(list(known.values())))
    if name not in known:
        hint = did_you_mean(name, [*known, MIXED])
        raise NotFound(f"no workload {name!r} for this model", hint=hint, kind="workload", name=name)
    return Workload(name=name, title=known[name].title, source=source_of(known[name]))


def with_params(workload: Workload, params: Mapping[str, Any]) -> Workload:
    """Return a workload whose requests have these parameters, which replace their own."""

    def draw(card: ServedModel, seed: int) -> Iterator[WorkloadRequest]:
        for request in workload.source(card, seed):
            yield replace(request, params={**request.params, **params})

    return replace(workload, source=draw) if params else workload


def source_of(spec: WorkloadSpec) -> Source:
    """Return the function of a workload with its options. Raises PluginError if its target cannot be imported."""
    function = load_target(spec.target)
    return lambda card, seed: function(card, seed, **spec.options)


def _mixed(specs: list[WorkloadSpec]) -> Source:
    """Draw from several workloads with equal weights."""

    def draw(card: ServedModel, seed: int) -> Iterator[WorkloadRequest]:
        parts = [source_of(spec)(card, seed) for spec in specs]
        for chance in numbered(seed):
            yield next(chance.choice(parts))

    return draw


def file_workload(path: Path) -> Workload:
    """Read a file of requests, one JSON object a line. Raises ConfigError that names the line."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", error.strerror or "", file=str(path)) from error
    weighted = [_request(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not weighted:
        raise ConfigError(f"{path} contains no requests", hint="write one JSON object a line", file=str(path))
    weights = [weight for _, weight in weighted]
    requests = [request for request, _ in weighted]
    is_timed = all(request.at_s is not None for request in requests)

    def draw(card: ServedModel, seed: int) -> Iterator[WorkloadRequest]:
        if is_timed or len(set(weights)) == 1:
            while True:
                yield from requests
        for chance in numbered(seed):
            yield chance.choices(requests, weights)[0]

    return Workload(
        name=path.name, title=f"{len(requests)} requests of a file", source=draw, size=len(requests), is_timed=is_timed
    )


def _request(line: str, path: Path, number: int) -> tuple[WorkloadRequest, float]:
    def invalid(why: str, hint: str = "") -> ConfigError:
        return ConfigError(f"{path}:{number} is not a valid request", why, hint, file=str(path), line=number)

    try:
        fields = json.loads(line)
    except ValueError as error:
        raise invalid(str(error), "write one JSON object a line") from error
    if not isinstance(fields, dict):
        raise invalid("it must be an object")
    for key in fields:
        if key not in FILE_KEYS:
            raise invalid(f"unknown key {key!r}", did_you_mean(key, FILE_KEYS))
    outputs = fields.get("outputs", "text")
    try:
        files = tuple((Path(name).name, (path.parent / name).read_bytes()) for name in fields.get("files", ()))
        at_s, weight = fields.get("t"), float(fields.get("weight", 1.0))
        request = WorkloadRequest(
            outputs=tuple(outputs.split(",") if isinstance(outputs, str) else outputs),
            text=fields.get("text"),
            files=files,
            params=dict(fields.get("params") or {}),
            at_s=None if at_s is None else float(at_s),
            id=fields.get("id"),
        )
    except (OSError, TypeError, ValueError) as error:
        raise invalid(str(error)) from error
    return request, weight


def hash_of(requests: Sequence[WorkloadRequest]) -> str:
    """Return a hash of the contents of requests, for comparisons; contents themselves are not stored."""
    digest = hashlib.sha256()
    for request in requests:
        for part in (request.text, request.outputs, sorted(request.params.items()), request.at_s):
            digest.update(repr(part).encode())
        for name, data in request.files:
            digest.update(name.encode() + hashlib.sha256(data).digest())
    return digest.hexdigest()[:16]


def described(spec: WorkloadSpec) -> Mapping[str, Any]:
    """Return a workload for a list: name, title, and the options of its function."""
    function = load_target(spec.target)
    drawn = inspect.signature(function).parameters.values()
    options = {parameter.name: parameter.default for parameter in drawn if parameter.kind is parameter.KEYWORD_ONLY}
    return {"name": spec.name, "title": spec.title, "options": {**options, **spec.options}}


def check_inputs(card: ServedModel, requests: Sequence[WorkloadRequest]) -> None:
    """Raise UsageError if the model does not give an output that the requests ask for."""
    for request in requests:
        missing = [kind for kind in request.outputs if card.outputs and kind not in card.outputs]
        if missing:
            raise UsageError(
                f"{card.name} has no {missing[0]} output",
                hint=f"it gives {', '.join(card.outputs)}; choose another workload",
            )
