"""Sample inputs of a model, made by its plugin or from its declared samples.

Read by the api (`GET /v1/samples`), `mstarctl sample` and the example that `mstarctl up` prints.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mstar_core.errors import MstarError, PluginError
from mstar_core.plugin.offers import SampleInputs
from mstar_core.plugin.spec import ModelSpec
from mstar_core.targets import load_target
from mstar_core.workloads import media

GREETING: Final = "Hello there"

MakeSamples = Callable[[ModelSpec, str, "Path | None"], Sequence[SampleInputs]]
"""A target of `ModelSpec.make_samples`, called with the bound spec, the source of the weights (`tiny`, `mini`,
`official`, `folder`, or empty if unknown) and the checkpoint's folder, None before the weights are present.

The first sample is the one to try first. The same arguments give the same bytes. It may import numpy and decoders.
"""


def samples_of(spec: ModelSpec, source: str, folder: Path | None = None) -> tuple[SampleInputs, ...]:
    """Return the sample inputs of a model. Raises PluginError if its plugin fails to make them."""
    if spec.make_samples is None:
        return _by_declaration(spec, source)
    try:
        make: MakeSamples = load_target(spec.make_samples)
        return tuple(make(spec, source, folder))
    except MstarError:
        raise
    except Exception as error:  # isolation boundary of a plugin
        raise PluginError(
            f"plugin {spec.plugin} cannot make the samples of {spec.name}",
            f"{type(error).__name__}: {error}",
            "mstarctl plugins check tests them",
            plugin=spec.plugin,
        ) from error


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
