"""Light modules, and the generated checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.errors import ConfigError, StartError
from mstar_core.plugin.check.spec_check import check_spec
from mstar_vjepa2 import tiny
from mstar_vjepa2.plugin import WEIGHTS
from mstar_vjepa2.published import key_map
from mstar_vjepa2.tiny import write_ac, write_base

from .conftest import SPECS, film, picture

HEAVY = ("torch", "numpy", "av", "PIL", "safetensors", "transformers")
WRITE = {"vjepa2": write_base, "vjepa2_ac": write_ac}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("plugin", HEAVY),
        ("tiny", HEAVY),
        ("checkpoint.files", HEAVY),
        ("processor", ("torch", "transformers")),
        ("ac_processor", ("torch", "transformers")),
    ],
)
def test_what_runs_outside_the_workers_loads_nothing_heavy(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import mstar_vjepa2.{module}; print([name for name in {heavy} if name in sys.modules])"
    path = [entry for entry in sys.path if entry]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; {code}"], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", SPECS)
def test_a_checkpoint_of_its_own_is_small_and_the_same_every_time(name: str, tmp_path: Path) -> None:
    first, second = (WRITE[name](tmp_path / str(number) / name) for number in range(2))
    files = sorted(path.name for path in first.iterdir())
    assert files == ["config.json", "model.safetensors", "tiny.json"]
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
    assert sum((first / file).stat().st_size for file in files) < 3_000_000
    spec = SPECS[name].bound(first, SPECS[name].model_kwargs)
    assert check_spec(spec) == [] and spec.notice


def test_a_checkpoint_that_is_there_is_left_alone_and_an_older_one_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_base(tmp_path / "vjepa2")
    (folder / "mine").touch()
    assert (write_base(folder) / "mine").exists()
    monkeypatch.setattr(tiny, "VERSION", tiny.VERSION + 1)
    assert not (write_base(folder) / "mine").exists()
    assert json.loads((folder / "tiny.json").read_text())["model"] == "vjepa2:tiny"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="cannot write the checkpoint vjepa2"):
        write_base(tmp_path / "file" / "vjepa2")


def test_its_base_model_encodes_predicts_and_classifies(tiny_base: Path) -> None:
    bench = LocalRuntime(SPECS["vjepa2"].bound(tiny_base, {}), tiny_base)
    for task, port, size in (
        ("encode", "encoder_hidden", 48),
        ("predict", "predicted_hidden", 48),
        ("rollout", "predicted_hidden", 48),
        ("classify", "logits", 4),
    ):
        outcome = bench.request(media=[film(8)], params={"task": task}, outputs=("tensor",))
        assert outcome.status == "finished", outcome.cause
        value = outcome.of(port)[0]
        assert value.shape[-1] == size and np.isfinite(value).all() and float(value.std()) > 0.01
    assert bench.leaks() == []


def test_its_action_model_heeds_actions(tiny_ac: Path) -> None:
    bench = LocalRuntime(SPECS["vjepa2_ac"].bound(tiny_ac, {}), tiny_ac)

    def roll(move: float) -> Any:
        params = {"task": "rollout", "actions": [[move] * 7] * 2, "states": [[0.1] * 7]}
        outcome = bench.request(media=[picture()], params=params, outputs=("tensor",))
        assert outcome.status == "finished", outcome.cause
        return np.concatenate(outcome.of("next_frame"))

    still, moved = roll(0.0), roll(0.05)
    assert still.shape == (2, 16, 48) and np.isfinite(still).all()
    assert float(np.abs(still - moved).mean()) > 0.01
    assert np.allclose(still, roll(0.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": "vitl"}, "did you mean 'weights'"),
        ({"weights": "vitxl"}, "vitxl"),
        ({"pooler_heads": 0}, "pooler_heads is 0"),
        ({"pooler_heads": True}, "pooler_heads is True"),
    ],
)
def test_a_wrong_start_option_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SPECS["vjepa2"].bound(None, given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_latent_frame": 37}, "did you mean 'max_latent_frames'"),
        ({"max_latent_frames": 0}, "max_latent_frames is 0"),
        ({"max_latent_frames": 257}, "max_latent_frames is 257"),
    ],
)
def test_a_wrong_start_option_of_the_action_model_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SPECS["vjepa2_ac"].bound(None, given)


def test_the_action_model_takes_as_many_frames_as_it_is_told(tiny_ac: Path) -> None:
    assert SPECS["vjepa2_ac"].bound(None, {"max_latent_frames": 37}).max_seq_len == 37 * 258
    assert SPECS["vjepa2_ac"].bound(tiny_ac, {"max_latent_frames": 37}).max_seq_len == 37 * 18
    assert SPECS["vjepa2_ac"].bound(None, {}).max_seq_len == 32 * 258


def test_every_published_name_has_a_place_and_every_place_a_name() -> None:
    maps = key_map()
    assert set(maps) == {*WEIGHTS, "ac"}
    for name, keys in maps.items():
        targets = {target for target in keys.targets.values() if target is not None}
        assert targets == keys.places, name


def test_modules_run_in_half_precision_too(tiny_base: Path) -> None:
    from .conftest import build

    nodes = build("vjepa2", tiny_base, torch.bfloat16)
    encoder = nodes["video_encoder"]
    assert encoder.encoder.rotary.frequencies.dtype == torch.float32
    hidden = encoder(pixel_values_videos=torch.zeros(1, 4, 3, 32, 32, dtype=torch.uint8))["encoder_hidden"]
    every = torch.arange(hidden.shape[1])[None]
    actual = nodes["predictor"](encoder_hidden=hidden, context_mask=every, target_mask=every)
    assert hidden.dtype == actual["window"].dtype == torch.bfloat16
    assert actual["predicted_hidden"].dtype == nodes["pooler"](encoder_hidden=hidden)["logits"].dtype == torch.float32
