"""Bronze checks of the inputs that people send first: samples, and raw prompts of models that take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mstar_core.api.parse.params import check_outputs, count_order
from mstar_core.conformance.miniature import miniature
from mstar_core.errors import PluginError, RequestError
from mstar_core.plugin.conformance import Subject
from mstar_core.plugin.offers import kind_of
from mstar_core.plugin.params import parse_params
from mstar_core.plugin.processor import MediaPart, PromptRequest, TokenizingProcessor
from mstar_core.workloads.samples import samples_of

TINY = "tiny"
RAW_ROUTES = frozenset(("completion", "embedding", "tokenize"))
"""Routes that need a `TokenizingProcessor`."""

TEXT = "Pages of 3 cats, naïve – 猫."
NO_ID = 2**40


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


def raw_prompts(subject: Subject) -> None:
    """Tokenize a text, spell its ids, and let the processor read the text and the ids as raw prompts."""
    routes = subject.model.routes & RAW_ROUTES
    if not routes:
        return
    small = miniature(subject)
    spec, processor = small.spec, small.processor
    if not isinstance(processor, TokenizingProcessor):
        names = ", ".join(sorted(routes))
        raise PluginError(f"the processor of {spec.name} cannot serve {names}", hint="add `tokenize` and `spell`")
    output = "embedding" if "embedding" in routes else "text"
    raw = PromptRequest(
        text=TEXT,
        is_raw=True,
        seed=1,
        max_seq_len=spec.max_seq_len,
        params=parse_params(spec.params, {}).params,
        outputs=frozenset((output,)),
    )
    plain = list(processor.tokenize(raw, adds_special=False))
    spelled = b"".join(processor.spell(plain)).decode()
    if spelled != TEXT:
        raise PluginError(f"{spec.name} spells the ids of a text as another text", f"{TEXT!r} became {spelled!r}")
    ids = list(processor.tokenize(raw, adds_special=True))
    counts = {
        "a text": processor.process_prompt(raw).prompt_tokens,
        "ids": processor.process_prompt(replace(raw, text=None, ids=ids)).prompt_tokens,
    }
    for what, count in counts.items():
        if count != len(ids):
            raise PluginError(f"a raw prompt of {what} has {count} tokens", f"its tokenization has {len(ids)}")
    _refuses_ids(processor, raw)


def _refuses_ids(processor: TokenizingProcessor, raw: PromptRequest) -> None:
    """Check that ids outside the vocabulary are refused by field."""
    calls: dict[str, Callable[[], object]] = {
        "reads": lambda: processor.process_prompt(replace(raw, text=None, ids=(NO_ID,))),
        "spells": lambda: processor.spell((NO_ID,)),
    }
    for what, call in calls.items():
        try:
            call()
        except RequestError as error:
            if error.facts.get("field") == "ids":
                continue
            raise PluginError(f"the refusal of the id {NO_ID} names another field", hint="name `ids`") from error
        raise PluginError(f"the processor {what} the id {NO_ID}, which no vocabulary has", hint="raise RequestError")
