"""Official weights: from the cache, by download of either layout, and errors if they are not available."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar_core.errors import WeightsError
from mstar_core.weights.sources import HuggingFace, Received
from mstar_pi05.checkpoint.config import read_sizes
from mstar_pi05.plugin import TOKENIZER_REPO, WEIGHTS_REPO
from mstar_pi05.processor import Processor
from mstar_pi05.robots.statistics import find_statistics
from mstar_pi05.sources.download import resolve_weights


@dataclass
class FakeHub:
    """A hub on disk. remote: repositories; cache: fetched files. refuses: a repository that requires a login."""

    remote: Path
    cache: Path
    is_offline: bool = False
    refuses: str = ""
    fetched: list[str] = field(default_factory=list)

    def cached(self, repo: str, file: str) -> Path | None:
        path = self.cache / repo / file
        return path if path.is_file() else None

    def files(self, repo: str) -> dict[str, int]:
        if repo == self.refuses:
            raise WeightsError(f"cannot fetch {repo}", "GatedRepoError: 403", "accept the licence and set HF_TOKEN")
        root = self.remote / repo
        return {path.relative_to(root).as_posix(): path.stat().st_size for path in root.rglob("*") if path.is_file()}

    def fetch(self, repo: str, file: str, received: Received) -> Path:
        source, target = self.remote / repo / file, self.cache / repo / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        received(source.stat().st_size)
        self.fetched.append(file)
        return target


def as_lerobot(tiny: Path, folder: Path) -> None:
    """Write the tiny checkpoint in lerobot's layout: keys with `model.`, shards, statistics with the processors."""
    folder.mkdir(parents=True)
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "type": "pi05", "chunk_size": config["action_horizon"]}))
    weights = {f"model.{name}": value for name, value in load_file(tiny / "model.safetensors").items()}
    names, files = sorted(weights), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    for file, part in zip(files, parts, strict=True):
        save_file({name: weights[name] for name in part}, folder / file)
    placed = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    for kind, step, feature in (("pre", "normalizer", "observation.state"), ("post", "unnormalizer", "action")):
        state = f"policy_{kind}processor_step_1_{step}_processor.safetensors"
        values = {f"{feature}.q01": -torch.ones(8), f"{feature}.q99": torch.ones(8)}
        save_file(values, folder / state)
        norm_map = {"STATE": "QUANTILES", "ACTION": "QUANTILES"}
        made = {"registry_name": f"{step}_processor", "config": {"norm_map": norm_map}, "state_file": state}
        (folder / f"policy_{kind}processor.json").write_text(json.dumps({"steps": [made]}))


def as_openpi(tiny: Path, folder: Path) -> None:
    """Write the tiny checkpoint in the layout of openpi's conversion: one file, statistics in assets."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("tokenizer.json", "tiny.json"))


@pytest.fixture(params=["lerobot", "openpi"])
def hub(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path: Path) -> FakeHub:
    lay_out = as_lerobot if request.param == "lerobot" else as_openpi
    lay_out(tiny_folder, tmp_path / "remote" / WEIGHTS_REPO)
    for name in ("README.md", "train_config.json", "optimizer.safetensors"):
        (tmp_path / "remote" / WEIGHTS_REPO / name).write_bytes(b"not wanted")
    (tmp_path / "remote" / TOKENIZER_REPO).mkdir(parents=True)
    shutil.copy(tiny_folder / "tokenizer.json", tmp_path / "remote" / TOKENIZER_REPO)
    return FakeHub(tmp_path / "remote", tmp_path / "cache")


def test_a_download_becomes_one_folder_that_serves(hub: FakeHub, tiny_folder: Path, models: Any) -> None:
    seen: list[tuple[int, int, str]] = []
    folder = resolve_weights(hub=hub, progress=lambda done, total, file: seen.append((done, total, file)))
    assert read_sizes(folder) == read_sizes(tiny_folder)
    assert not {"README.md", "train_config.json", "optimizer.safetensors"} & set(hub.fetched)
    statistics = find_statistics(folder, None)
    assert statistics is not None and statistics.state is not None and len(statistics.state) == 8
    assert Processor(folder, {}).tokenizer.encode([("go", True)])
    assert sum(value.numel() for value in models(folder).policy().state_dict().values()) > 0
    assert models(folder).cameras() is not None
    assert [done for done, total, _ in seen if done == total]


def test_what_is_cached_is_not_fetched_again(hub: FakeHub) -> None:
    first = resolve_weights(hub=hub)
    hub.fetched.clear()
    hub.is_offline = True
    assert resolve_weights(hub=hub) == first
    assert hub.fetched == []


def test_a_download_that_broke_off_goes_on(hub: FakeHub) -> None:
    resolve_weights(hub=hub)
    lost = next((hub.cache / WEIGHTS_REPO).glob("model*.safetensors"))
    lost.unlink()
    hub.fetched.clear()
    resolve_weights(hub=hub)
    assert hub.fetched == [lost.name]


def test_without_a_login_for_the_tokenizer_it_says_how_else(hub: FakeHub) -> None:
    hub.refuses = TOKENIZER_REPO
    with pytest.raises(WeightsError, match="paligemma") as caught:
        resolve_weights(hub=hub)
    assert "HF_TOKEN" in caught.value.hint and "paligemma_tokenizer.model" in caught.value.hint


def test_offline_names_the_places_and_the_ways(hub: FakeHub) -> None:
    hub.is_offline = True
    with pytest.raises(WeightsError, match=WEIGHTS_REPO) as caught:
        resolve_weights(hub=hub)
    assert str(hub.cache) in caught.value.detail and "--weights DIR" in caught.value.hint


def test_a_repository_without_weights_is_refused(hub: FakeHub) -> None:
    for path in (hub.remote / WEIGHTS_REPO).glob("model*.safetensors"):
        path.unlink()
    with pytest.raises(WeightsError, match="contains no weights"):
        resolve_weights(hub=hub)


def test_a_folder_is_taken_as_it_is(tiny_folder: Path) -> None:
    assert resolve_weights(tiny_folder) == tiny_folder


@pytest.mark.parametrize(
    ("keep", "said"), [(0, "too few"), (100, "too few"), (-1, "from its header"), (None, "looked for")]
)
def test_a_damaged_folder_is_named_before_anything_starts(keep: int | None, said: str, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(data[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors") as caught:
        resolve_weights(checkpoint)
    assert said in caught.value.detail


def test_the_real_hub_is_what_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match=WEIGHTS_REPO) as caught:
        resolve_weights(cache_dir=tmp_path)
    assert str(HuggingFace(tmp_path).cache) in caught.value.detail
