"""Bronze check of the inputs that people send first: `mstarctl sample`, `GET /v1/samples`."""

from __future__ import annotations

from mstar_core.api.parse.params import check_outputs, count_order
from mstar_core.conformance.miniature import miniature
from mstar_core.errors import PluginError
from mstar_core.plugin.conformance import Subject
from mstar_core.plugin.offers import kind_of
from mstar_core.plugin.params import parse_params
from mstar_core.plugin.processor import MediaPart, PromptRequest
from mstar_core.workloads.samples import samples_of

TINY = "tiny"


def sample_inputs(subject: Subject) -> None:
    """Make the samples twice, compare them, and let the processor of the miniature take each."""
    small = miniature(subject)
    spec = small.spec
    samples = samples_of(spec, TINY, small.folder)
    if samples != samples_of(spec, TINY, small.folder):
        raise PluginError(f"the samples of {spec.name} differ from call to call", hint="use a seed")
    if len({sample.name for sample in samples}) != len(samples):
        raise PluginError(f"two samples of {spec.name} have one name", hint="each name once")
    for sample in samples:
        media = tuple(MediaPart(modality=kind_of(name), data=data, name=name) for name, data in sample.files)
        small.processor.process_prompt(
            PromptRequest(
                text=sample.text,
                media=media,
                order=count_order(sample.kinds),
                seed=1,
                max_seq_len=spec.max_seq_len,
                params=parse_params(spec.params, dict(sample.params)).params,
                outputs=frozenset(check_outputs(spec, sample.outputs)),
            )
        )
