"""`mstarctl call`: one request to a deployment, streamed into a file. A smoke test with figures."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer

from mstar_core.client import ApiClient, Line, WavFile
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.config.run_dir import RunDirectory, deployments, find
from mstar_core.errors import ConfigError, NotFound, UsageError
from mstar_core.plugin.modality import Audio, Modality
from mstar_core.plugin.served import served_model
from mstar_core.plugin.spec import ModelSpec
from mstarctl.output import Printer, duration_text

STDOUT: Final = "-"
SUFFIXES: Final = {"audio": ".wav", "image": ".png", "video": ".mp4", "text": ".txt"}
EVERY_S: Final = 0.1
EVERYWHERE: Final = ("0.0.0.0", "::")

Files = Annotated[list[Path] | None, typer.Option(metavar="FILE", help="a file to send; may be repeated")]


def call(
    ctx: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="deployment or model; may be left out when only one runs")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="the prompt; - reads it from stdin")] = None,
    voice: Annotated[str | None, typer.Option("--voice", help="speaker, for models that have them")] = None,
    image: Annotated[
        list[Path] | None, typer.Option("--image", metavar="FILE", help="an image; may be repeated")
    ] = None,
    audio: Annotated[
        list[Path] | None, typer.Option("--audio", metavar="FILE", help="a sound; may be repeated")
    ] = None,
    video: Annotated[
        list[Path] | None, typer.Option("--video", metavar="FILE", help="a video; may be repeated")
    ] = None,
    params: Annotated[
        list[str] | None, typer.Option("--param", metavar="KEY=VALUE", help="a parameter of the model; may be repeated")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="where the answer goes; - is stdout")] = None,
    request_id: Annotated[
        str | None, typer.Option("--request-id", metavar="ID", help="your own id of the request")
    ] = None,
    is_streamed: Annotated[
        bool, typer.Option("--stream/--no-stream", help="write while it is made, or once it is whole")
    ] = True,
) -> None:
    """Send one request and write the answer to a file."""
    printer = Printer.of(ctx)
    spec = deployment_of(target)
    model = served_model(spec.plugin, spec.model)
    files = [*_files(model, "image", image), *_files(model, "audio", audio), *_files(model, "video", video)]
    words = sys.stdin.read() if text == "-" else text
    if words is None and not files:
        raise UsageError("there is nothing to send", hint='--text "Hello there"')
    given = {**parse_params(params or []), **({} if voice is None else {"voice": voice})}
    modality = model.outputs[0].kind
    sink = Sink.of(model, out, spec.name)
    if spec.weights_source == "tiny" and model.notice:
        printer.warn(model.notice)
    tally = Tally(started=time.monotonic())
    progress = Progress(printer, is_streamed=is_streamed)
    with ApiClient(endpoint_of(spec), api_key=next(iter(spec.api.api_keys), None)) as client:
        lines = client.generate(outputs=(modality,), text=words, files=files, params=given, request_id=request_id)
        try:
            for line in lines if is_streamed else list(lines):
                tally.add(line)
                sink.add(line)
                progress.show(tally, sink)
            sink.open()
        finally:
            progress.end()
            sink.close()
            if not tally.is_done and tally.chunks and sink.path is not None:
                printer.warn(f"{sink.path} holds what arrived before the end: {sink.amount}")
    report(tally, sink, spec, printer)


def deployment_of(target: str | None) -> DeploymentSpec:
    """The spec of the running deployment of that name, or of the only one that serves that model. Raises NotFound."""
    run = _run_of(None if target is None else target.partition(":")[0])
    try:
        return DeploymentSpec.load(run.spec)
    except OSError as error:
        raise NotFound(
            f"deployment {run.name!r} has just ended", hint="mstarctl ps", kind="deployment", name=run.name
        ) from error


def _run_of(name: str | None) -> RunDirectory:
    try:
        return find(name)
    except NotFound:
        serving = [
            run for run in deployments() if run.holder() is not None and DeploymentSpec.load(run.spec).model == name
        ]
        if len(serving) == 1:
            return serving[0]
        if serving:
            names = ", ".join(run.name for run in serving)
            raise NotFound(
                f"{len(serving)} deployments serve {name!r}", hint=f"name one of: {names}", kind="deployment", name=name
            ) from None
        raise


def endpoint_of(spec: DeploymentSpec) -> str:
    """Where the api of a deployment of this host is reached from here."""
    host = "127.0.0.1" if spec.api.host in EVERYWHERE else spec.api.host
    return f"http://[{host}]:{spec.api.port}" if ":" in host else f"http://{host}:{spec.api.port}"


def parse_params(texts: Sequence[str]) -> dict[str, Any]:
    """`k=v` words; a value that is JSON is taken as such, everything else as text. Raises UsageError."""
    made: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--param {text!r} is no KEY=VALUE", hint="--param temperature=0.5")
        try:
            made[key.strip()] = json.loads(value)
        except ValueError:
            made[key.strip()] = value
    return made


def _files(model: ModelSpec, kind: str, paths: Sequence[Path] | None) -> Iterator[tuple[str, bytes]]:
    if paths and kind not in {modality.kind for modality in model.inputs}:
        reads = ", ".join(modality.kind for modality in model.inputs)
        raise UsageError(f"{model.name} does not read {kind}", hint=f"it reads {reads}")
    for path in paths or ():
        try:
            yield path.name, path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read", error.strerror or str(error), file=str(path), key=kind
            ) from error


@dataclass(slots=True)
class Tally:
    """What is known of a request from its lines and a clock. Times in seconds since it was sent."""

    started: float
    chunks: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False

    def add(self, line: Line) -> None:
        """Take one line."""
        self.total_s = time.monotonic() - self.started
        if line.modality in ("start", "done"):
            self.facts |= line.metadata
            self.is_done = line.modality == "done"
            return
        self.chunks += 1
        if self.first_s is None:
            self.first_s = self.total_s


class Sink:
    """Where output lines go: a WAV file that grows, a file of another kind, or stdout. Closed by the command.

    A file is opened with the first output, so that a refused request leaves what was there before.
    """

    def __init__(self, modality: Modality, path: Path | None) -> None:
        self.kind = modality.kind
        self.path = path
        self.size_bytes = 0
        self._modality = modality
        self._file: BinaryIO | None = None
        self._wav: WavFile | None = None

    @classmethod
    def of(cls, model: ModelSpec, out: str | None, name: str) -> Sink:
        """The sink of a model's first output. Text goes to stdout unless --out names a file. Raises ConfigError."""
        modality = model.outputs[0]
        if out == STDOUT or out is None and modality.kind == "text":
            return cls(modality, None)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        path = Path(out) if out is not None else Path(f"{name}-{stamp}{SUFFIXES.get(modality.kind, '.bin')}")
        check_writable(path)
        return cls(modality, path)

    @property
    def seconds(self) -> float:
        """Seconds of sound so far, 0 for everything else."""
        return 0.0 if self._wav is None else self._wav.seconds

    @property
    def amount(self) -> str:
        """How much there is, for people."""
        return f"{self.seconds:.1f} s of audio" if self.kind == "audio" else f"{self.size_bytes} bytes"

    def add(self, line: Line) -> None:
        """Write one output line."""
        if line.modality != self.kind:
            return
        file = self.open()
        self.size_bytes += len(line.data)
        if self._wav is not None:
            self._wav.write(line.data)
        else:
            file.write(line.data)
            file.flush()

    def open(self) -> BinaryIO:
        """Begin the file, in place of what is there. Also called for an answer without any output."""
        if self._file is None:
            self._file = sys.stdout.buffer if self.path is None else _create(self.path)
            if isinstance(self._modality, Audio):
                self._wav = WavFile(self._file, self._modality.rate, self._modality.channels)
        return self._file

    def close(self) -> None:
        """Make the file whole. stdout stays open."""
        if self._file is None or self._file.closed:
            return
        if self.path is None:
            if self.kind == "text":
                self._file.write(b"\n")
            self._file.flush()
            self._file = None
        elif self._wav is not None:
            self._wav.close()
        else:
            self._file.close()


def check_writable(path: Path) -> None:
    """Raises ConfigError before anything is sent when the answer could not be kept."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint="name a file with --out", file=str(path), key="out")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path} cannot be written", f"there is no folder {path.parent}", f"mkdir -p {path.parent}", key="out"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written", "permission denied", "choose another file with --out", key="out")


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written", error.strerror or str(error), file=str(path), key="out"
        ) from error


class Progress:
    """One line on stderr that counts, on a terminal; elsewhere the first chunk only."""

    def __init__(self, printer: Printer, *, is_streamed: bool) -> None:
        self._printer = printer
        self._is_drawn = is_streamed and sys.stderr.isatty() and not printer.options.quiet
        self._next = 0.0
        self._has_drawn = False
        self._has_said = False

    def show(self, tally: Tally, sink: Sink) -> None:
        """Draw what there is, at most ten times a second."""
        if tally.chunks and not self._is_drawn and not self._has_said:
            self._has_said = True
            self._printer.say(f"first {sink.kind} after {duration_text(tally.first_s or 0.0)}")
        now = time.monotonic()
        if self._is_drawn and now >= self._next:
            self._next, self._has_drawn = now + EVERY_S, True
            print(
                f"\r\x1b[2K{tally.chunks} chunks  {sink.amount}  {duration_text(tally.total_s)}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        """Clear the line."""
        if self._has_drawn:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._has_drawn = False


def report(tally: Tally, sink: Sink, spec: DeploymentSpec, printer: Printer) -> None:
    """Figures on stderr; the file, or everything as data, on stdout."""
    factor = tally.total_s / sink.seconds if sink.seconds else None
    facts = tally.facts
    item: dict[str, Any] = {
        "name": facts.get("request_id"),
        "deployment": spec.name,
        "model": spec.model,
        "weights": spec.weights_source,
        "out": None if sink.path is None else str(sink.path),
        "modality": sink.kind,
        "chunks": tally.chunks,
        "audio_s": round(sink.seconds, 4) if sink.kind == "audio" else None,
        "bytes": sink.size_bytes,
        "first_ms": None if tally.first_s is None else round(tally.first_s * 1000, 1),
        "total_ms": round(tally.total_s * 1000, 1),
        "real_time_factor": None if factor is None else round(factor, 3),
        "finish_reason": facts.get("finish_reason"),
        "seed": facts.get("seed"),
        "usage": facts.get("usage"),
        "warnings": list(facts.get("warnings", [])),
    }
    for warning in item["warnings"]:
        printer.warn(warning)
    first = "nothing came" if tally.first_s is None else f"time to first {sink.kind} {duration_text(tally.first_s)}"
    speed = "" if factor is None else f", real-time factor {factor:.2f}"
    took = f"{tally.chunks} chunks, {sink.amount} in {duration_text(tally.total_s)}"
    printer.say(f"{spec.name}: {took} ({first}{speed}; finish: {item['finish_reason']}, seed {item['seed']})")
    if sink.kind == "audio" and not tally.chunks:
        printer.warn("no sound came: the model ended before its first window; try another --param seed=N")
    if sink.path is None:
        return
    printer.say(f"wrote {sink.path}")
    printer.item("call", item, str(sink.path))
