"""Sample inputs of every model: the checkpoint's own processor takes them, and they are the same each time."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from mstar_core.api.parse.params import count_order
from mstar_core.api.preprocess.child import load_processor
from mstar_core.errors import PluginError
from mstar_core.plugin.offers import SampleInputs, kind_of
from mstar_core.plugin.params import parse_params
from mstar_core.plugin.processor import MediaPart, PromptRequest
from mstar_core.plugin.spec import ModelSpec
from mstar_core.targets import load_target
from mstar_core.workloads.samples import samples_of
from mstarctl.plugins import Plugins
from mstarctl.start.target import find, resolve_target
from tests.families.families import SPECS

EMBEDDED = [(name, source) for name in sorted(SPECS) for source in ("tiny", "mini") if SPECS[name].embedded(source)]
ROBOTS = {"pi05_droid": 8, "pi05_aloha": 14, "pi05_libero": 8}


@functools.cache
def checkpoint(model: str, source: str) -> Path:
    """Return the folder of an embedded checkpoint."""
    target = SPECS[model].embedded(source)
    assert target is not None
    home = Path(tempfile.mkdtemp(prefix="mstar-samples-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return Path(load_target(target)(home / model) or home / model)


def accepted(spec: ModelSpec, folder: Path, sample: SampleInputs) -> None:
    """Prepare the request as the api does. Raises RequestError if the model refuses it."""
    assert spec.processor is not None
    processor = load_processor(spec.processor, folder, spec.model_kwargs)
    media = tuple(MediaPart(modality=kind_of(name), data=data, name=name) for name, data in sample.files)
    processor.process_prompt(
        PromptRequest(
            text=sample.text,
            media=media,
            order=count_order(sample.kinds),
            seed=1,
            max_seq_len=spec.max_seq_len,
            params=parse_params(spec.params, dict(sample.params)).params,
            outputs=frozenset(sample.outputs),
        )
    )


@pytest.mark.parametrize(("model", "source"), EMBEDDED)
def test_a_checkpoint_takes_its_samples(model: str, source: str) -> None:
    folder = checkpoint(model, source)
    spec = SPECS[model].bound(folder, SPECS[model].model_kwargs)
    made = samples_of(spec, source, folder)
    assert made == samples_of(spec, source, folder)
    assert len({each.name for each in made}) == len(made) > 0
    for sample in made:
        assert set(sample.outputs) <= {modality.kind for modality in spec.outputs}
        accepted(spec, folder, sample)


@pytest.mark.parametrize(("name", "count"), ROBOTS.items())
def test_a_robots_sample_has_the_robots_state(name: str, count: int) -> None:
    target = find(name, Plugins.discover())
    spec = target.spec.bound(None, resolve_target(target).model_kwargs)
    (sample,) = samples_of(spec, "official")
    assert len(sample.params["robot_state"]) == count


def test_samples_of_official_weights_need_no_weights() -> None:
    for spec in SPECS.values():
        for sample in samples_of(spec, "official"):
            parse_params(spec.params, dict(sample.params))
            assert {modality.kind for modality in spec.inputs} >= set(sample.kinds)


def test_a_model_without_a_function_gets_a_sample_by_its_declaration() -> None:
    spec = replace(SPECS["qwen3_omni"], make_samples=None, samples=(SPECS["qwen3_omni"].samples[5],))
    (sample,) = samples_of(spec, "")
    assert sample.kinds == ("image", "audio", "text")


def test_a_failing_function_is_the_plugins_fault() -> None:
    spec = replace(SPECS["orpheus"], make_samples="tests.families.test_samples:broken")
    with pytest.raises(PluginError, match="plugin orpheus cannot make the samples of orpheus"):
        samples_of(spec, "")


def broken(*_: object) -> list[SampleInputs]:
    raise ZeroDivisionError
