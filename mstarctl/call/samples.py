"""Sample inputs on the command line: the chosen one, the words of the call that sends it, and its files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mstar_core.client.results import ModelSample
from mstar_core.errors import ConfigError, UsageError, did_you_mean
from mstar_core.plugin.offers import SampleInputs, kind_of
from mstarctl.call.ask import STATE_NAMES, Ask
from mstarctl.call.flags import MEDIA
from mstarctl.call.sink import STDOUT, chosen_output

RECEIVED: Final = {
    "audio": ".wav",
    "image": ".png",
    "action": ".json",
    "tensor": ".safetensors",
    "scalar": ".json",
    "video": ".mp4",
    "segments": ".srt",
}
"""Ending of --out by output. Text goes to stdout."""


def client_form(sample: SampleInputs) -> ModelSample:
    """Return a plugin's sample as the api would send it."""
    return ModelSample(
        name=sample.name,
        title=sample.title,
        output_modalities=sample.outputs,
        text=sample.text,
        files=sample.files,
        kinds=tuple(kind_of(name) for name, _ in sample.files),
        params=sample.params,
    )


def chosen(model: str, samples: Sequence[ModelSample], name: str | None) -> ModelSample:
    """Return the sample called `name`, or the first. Raises UsageError with the nearest name."""
    if not samples:
        raise UsageError(f"{model} has no samples", hint='--text "Hello there"')
    sample = samples[0] if name is None else next((candidate for candidate in samples if candidate.name == name), None)
    if sample is None:
        known = [sample.name for sample in samples]
        raise UsageError(
            f"{model} has no sample {name!r}", f"its samples: {', '.join(known)}", did_you_mean(str(name), known)
        )
    return sample


def sampled(
    sample: ModelSample,
    *,
    text: str | None,
    files: tuple[tuple[str, bytes], ...],
    params: Mapping[str, Any],
    request_id: str | None,
) -> Ask:
    """Return the request of a sample. A given text, files or parameters replace the sample's."""
    return Ask(
        outputs=sample.output_modalities,
        text=sample.text if text is None else text,
        files=files or sample.files,
        params={**sample.params, **params},
        request_id=request_id,
    )


def sampled_output(sample: ModelSample, model: str, out: str | None) -> str:
    """Return the output to write: what fits the ending of --out, else as `output_kind`. Raises UsageError."""
    if out is None or out == STDOUT:
        return output_kind(sample)
    return chosen_output(model, sample.output_modalities, out)


def output_kind(sample: ModelSample) -> str:
    """Return the output to write: the first that is not text and has a file format, if there is one."""
    return next((kind for kind in sample.output_modalities if kind in RECEIVED), "text")


def command(model: str, sample: ModelSample, folder: Path) -> str:
    """Return the `mstarctl call` that sends the sample from the files that `write` makes."""
    words = ["mstarctl", "call", model, *words_of(sample, folder)]
    return shlex.join(words)


def words_of(sample: ModelSample, folder: Path) -> Iterator[str]:
    """Yield the options of `mstarctl call`."""
    for kind, (name, _) in zip(sample.kinds, sample.files, strict=True):
        if kind not in MEDIA:
            raise UsageError(f"{sample.name} has a file of kind {kind}", hint="send it with the Python client")
        yield from (f"--{kind}", str(folder / name))
    if sample.text is not None:
        yield from ("--text", sample.text)
    for name, value in sample.params.items():
        if name == "voice":
            yield from ("--voice", str(value))
        elif name in STATE_NAMES:
            yield from ("--state", str(_state_file(sample, folder)))
        else:
            yield from ("--param", f"{name}={value if _is_word(value) else json.dumps(value)}")
    kind = output_kind(sample)
    if kind != "text":
        yield from ("--out", f"{sample.name}{RECEIVED[kind]}")


def write(sample: ModelSample, folder: Path) -> list[Path]:
    """Write the files of a sample, and its state as JSON. Raises ConfigError."""
    contents: dict[Path, bytes] = {folder / name: data for name, data in sample.files}
    for name in STATE_NAMES:
        if name in sample.params:
            contents[_state_file(sample, folder)] = json.dumps(sample.params[name]).encode() + b"\n"
    for path, data in contents.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written",
                error.strerror or str(error),
                "choose another folder with --out",
                file=str(path),
                key="out",
            ) from error
    return list(contents)


def first_call(samples: Sequence[ModelSample]) -> str:
    """Return options of `mstarctl call` for the first sample: a plain text as it is, others as --sample."""
    if not samples:
        return ""
    sample = samples[0]
    kind = output_kind(sample)
    out = [] if kind == "text" else ["--out", f"{_NAMES.get(kind, sample.name)}{RECEIVED[kind]}"]
    if sample.files or sample.text is None or not _is_plain(sample.params):
        return " ".join(["--sample", *out])
    return " ".join(["--text", _quoted(sample.text), *out])


_NAMES: Final = {"audio": "hello", "image": "picture", "action": "actions"}


def _quoted(text: str) -> str:
    """Quote a text with double quotes, which read better, where nothing in it needs others."""
    return shlex.quote(text) if any(mark in text for mark in '"$`\\!') else f'"{text}"'


def _is_plain(params: Mapping[str, Any]) -> bool:
    """Whether a call without these parameters does the same in essence."""
    return set(params) <= {"seed", "voice"}


def _is_word(value: Any) -> bool:
    """Whether --param reads the text back as this text."""
    if not isinstance(value, str):
        return False
    try:
        json.loads(value)
    except ValueError:
        return True
    return False


def _state_file(sample: ModelSample, folder: Path) -> Path:
    return folder / f"{sample.name}.state.json"
