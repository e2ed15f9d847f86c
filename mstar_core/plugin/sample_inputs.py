"""Sample inputs of a model: requests that a person may send at once. Made by plugins without torch.

Read by the api (`GET /v1/samples`), `mstarctl sample` and the example that `mstarctl up` prints.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final

from mstar_core.errors import MstarError, PluginError
from mstar_core.plugin.spec import ModelSpec

GREETING: Final = "Hello there"
KINDS: Final[Mapping[str, str]] = {
    ".png": "image", ".jpg": "image", ".wav": "audio", ".mp4": "video", ".npy": "tensor",
}  # fmt: skip
"""Modalities of sample files by their endings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInputs:
    """Inputs of one request. name: one word; title: what the request does, in one line.

    files: name and content of each, in the order in which they are sent; the ending of a name is one of `KINDS`.
    """

    name: str
    title: str
    outputs: tuple[str, ...]
    text: str | None = None
    files: tuple[tuple[str, bytes], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Modalities of the inputs in order, the text last."""
        files = (kind_of(name) for name, _ in self.files)
        return (*files, *(("text",) if self.text is not None else ()))


MakeSamples = Callable[[ModelSpec, str, "Path | None"], Sequence[SampleInputs]]
"""A target of `ModelSpec.make_samples`, called with the bound spec, the source of the weights (`tiny`, `mini`,
`official`, `folder`, or empty if unknown) and the checkpoint's folder, None before the weights are present.

The first sample is the one to try first. The same arguments give the same bytes. It may import numpy and decoders.
"""


def samples_of(spec: ModelSpec, source: str, folder: Path | None = None) -> tuple[SampleInputs, ...]:
    """Return the sample inputs of a model. Raises PluginError if its plugin fails to make them."""
    if spec.make_samples is None:
        return _by_declaration(spec, source)
    from mstar_core.targets import load_target  # here, because plugins import this module for the class alone

    try:
        make: MakeSamples = load_target(spec.make_samples)
        return tuple(make(spec, source, folder))
    except MstarError:
        raise
    except Exception as error:  # isolation boundary of a plugin
        raise PluginError(
            f"plugin {spec.plugin} cannot make the samples of {spec.name}", f"{type(error).__name__}: {error}",
            "mstarctl plugins check tests them", plugin=spec.plugin,
        ) from error  # fmt: skip


def kind_of(name: str) -> str:
    """Return the modality of a sample file. Raises PluginError for an unknown ending."""
    suffix = PurePath(name).suffix.lower()
    if suffix not in KINDS:
        raise PluginError(f"the sample file {name!r} has an unknown ending", hint=f"one of {', '.join(KINDS)}")
    return KINDS[suffix]


def _by_declaration(spec: ModelSpec, source: str) -> tuple[SampleInputs, ...]:
    """Make one request from the kinds of the first declared sample: a greeting, and small synthetic media."""
    if not spec.samples:
        return ()
    sample = spec.samples[0]
    kinds = spec.sample_inputs(sample)
    tiny = sample.tiny if source == "tiny" else {}
    outputs = tuple(sorted(sample.outputs)) or tuple(modality.kind for modality in spec.outputs[:1])
    return (
        SampleInputs(
            name="first",
            title=f"{' and '.join(dict.fromkeys(kinds))} to {' and '.join(outputs)}",
            outputs=outputs,
            text=(spec.prompt_of(source) or GREETING) if "text" in kinds else None,
            files=tuple(_media(kind, number) for number, kind in enumerate(kinds) if kind != "text"),
            params={**sample.params, **tiny},
        ),
    )


def _media(kind: str, number: int) -> tuple[str, bytes]:
    """Return a small file of one modality. Raises PluginError if the plugin has to make it itself."""
    from mstar_core.workloads import media

    chance = random.Random(number)
    match kind:
        case "image":
            return f"picture{number or ''}.png", media.picture(chance, 128)
        case "audio":
            return f"sound{number or ''}.wav", media.recording(chance, 1.0)
        case "video":
            return f"clip{number or ''}.mp4", media.clip(media.ball_clip(16, 128))
        case _:
            raise PluginError(f"no sample of kind {kind} can be made", hint="name a function in make_samples")
