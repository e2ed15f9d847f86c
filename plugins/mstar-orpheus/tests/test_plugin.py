"""The plugin without torch: imports, the graph, binding to a checkpoint, parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ConfigError, RequestError
from mstar_core.graph import Loop, SlidingWindow, StopOn
from mstar_core.plugin import param_specs, parse_params
from mstar_core.plugin.check.spec_check import check_spec
from mstar_core.plugin.json_form import spec_to_json
from mstar_orpheus.checkpoint.config import NOISE_MODES, SpecialIds
from mstar_orpheus.plugin import OFFICIAL, ORPHEUS, OpenParams, Params

HEAVY = ("torch", "numpy", "tokenizers", "transformers", "safetensors", "huggingface_hub")


@pytest.mark.parametrize(
    ("module", "heavy"), [("plugin", HEAVY), ("sources.download", HEAVY), ("processor", ("torch", "transformers"))]
)
def test_modules_outside_the_workers_import_nothing_heavy(module: str, heavy: tuple[str, ...]) -> None:
    """Listing and planning import these modules; torch takes more than a second."""
    code = f"import mstar_orpheus.{module}; print([name for name in {heavy} if name in sys.modules])"
    path = [entry for entry in sys.path if entry]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; {code}"], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_the_spec_is_valid() -> None:
    assert check_spec(ORPHEUS) == []


def test_binding_takes_ids_and_sizes_from_the_checkpoint(checkpoint: Path, golden: Any) -> None:
    config, spec = golden.json("config.json"), ORPHEUS.bound(checkpoint, {})
    stream, kv = spec.streams[0], spec.node("LLM").kv
    first = config["audio_token_offset"]
    assert stream.accept == range(first, first + 7 * config["codebook_size"])
    assert stream.chunk == SlidingWindow(
        config["window_tokens"], config["stride_tokens"], tail="drop", first_from="first_window_frames"
    )
    assert kv is not None
    llm = config["llm"]
    assert (kv.layers, kv.kv_heads, kv.head_dim) == (
        llm["num_hidden_layers"],
        llm["num_key_value_heads"],
        llm["head_dim"],
    )
    decode = spec.walk("decode")[1]
    assert isinstance(decode, Loop)
    assert decode.stop == StopOn("token", (config["stop_token_id"],), unless="ignore_eos")
    assert spec.max_seq_len == min(ORPHEUS.max_seq_len, llm["max_position_embeddings"])
    assert check_spec(spec) == []


def test_without_a_checkpoint_the_official_ids_apply() -> None:
    assert ORPHEUS.bound(None, {}).streams[0].accept == range(128266, 156938)
    assert SpecialIds().stop == 128258
    assert OFFICIAL.audio_ids[-1] < OFFICIAL.vocab_size
    kv = ORPHEUS.node("LLM").kv
    assert kv is not None
    assert kv.bytes_per_token(2) == 114_688


def test_an_unknown_model_kwarg_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'allow_any_voice'"):
        ORPHEUS.bound(None, {"allow_any_voices": True})
    with pytest.raises(ConfigError, match="true or false"):
        ORPHEUS.bound(None, {"allow_any_voice": "yes"})
    with pytest.raises(ConfigError, match="restrict_vocabulary is 1"):
        ORPHEUS.bound(None, {"restrict_vocabulary": 1})


def test_the_vocabulary_is_restricted_only_on_request() -> None:
    whole, cut = (ORPHEUS.bound(None, {"restrict_vocabulary": inputs}).node("LLM").sampling for inputs in (False, True))
    assert whole is not None and whole.vocabulary == () and ORPHEUS.node("LLM").sampling == whole
    assert cut is not None and cut.vocabulary == (range(128258, 128259), range(128266, 128266 + 7 * 4096))
    assert ORPHEUS.model_kwargs == {"allow_any_voice": False, "restrict_vocabulary": False}
    spec = ORPHEUS.bound(None, {"restrict_vocabulary": True})
    assert json.loads(json.dumps(spec_to_json(spec))) == spec_to_json(spec) and check_spec(spec) == []


def test_both_parameter_classes_differ_only_in_the_voice_check() -> None:
    assert param_specs(Params) == param_specs(OpenParams)
    assert parse_params(OpenParams, {"voice": "anyone"}).params.voice == "anyone"


def test_the_defaults_are_those_of_the_speech_api() -> None:
    actual = parse_params(Params, {}).params
    assert (actual.voice, actual.temperature, actual.top_p, actual.repetition_penalty) == ("tara", 0.6, 0.8, 1.3)
    assert (actual.max_output_tokens, actual.noise, actual.flush, actual.ignore_eos) == (4096, "seeded", False, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("top_p", 0),
        ("repetition_penalty", 0.9),
        ("noise", "loud"),
        ("max_output_tokens", 0),
        ("seed", -1),
        ("flush", "perhaps"),
        ("prompt_token_ids", "1 2"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_params(Params, {name: value})
    assert caught.value.field == name


def test_noise_is_sent_to_the_node_by_the_index_of_its_mode() -> None:
    noise = next(spec for spec in param_specs(Params) if spec.name == "noise")
    assert noise.choices == NOISE_MODES
