"""Resolution of the weights: a given folder, the cache, a download, and failures of each."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import WeightsError
from mstar_core.plugin import WeightRef
from mstar_core.weights.sources import HuggingFace, Received
from mstar_orpheus.checkpoint.config import read_config
from mstar_orpheus.checkpoint.layout import CheckpointLayout
from mstar_orpheus.plugin import ORPHEUS
from mstar_orpheus.sources.download import needed_files, resolve_weights

LM, SNAC = (ORPHEUS.weights[name].repo for name in ("lm", "snac"))


@dataclass
class FakeHub:
    """A hub on disk with repositories in `remote` and downloads in `cache`. fails_at: a file whose download fails."""

    remote: Path
    cache: Path
    is_offline: bool = False
    fails_at: str = ""
    fetched: list[str] = field(default_factory=list)

    def cached(self, repo: str, file: str) -> Path | None:
        path = self.cache / repo / file
        return path if path.is_file() else None

    def files(self, repo: str) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (self.remote / repo).iterdir()}

    def fetch(self, repo: str, file: str, received: Received) -> Path:
        if file == self.fails_at:
            raise WeightsError(
                f"cannot fetch {file} of {repo}", "ConnectError: no route", "check the connection", file=file
            )
        source, target = self.remote / repo / file, self.cache / repo / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        received(source.stat().st_size // 2)
        received(source.stat().st_size - source.stat().st_size // 2)
        self.fetched.append(file)
        return target


@pytest.fixture
def hub(tiny_folder: Path, tmp_path: Path) -> FakeHub:
    for repo, part in ((LM, "lm"), (SNAC, "snac")):
        shutil.copytree(tiny_folder / part, tmp_path / "remote" / repo)
    (tmp_path / "remote" / LM / "training_args.bin").write_bytes(b"not wanted")
    return FakeHub(tmp_path / "remote", tmp_path / "cache")


def test_a_download_reports_bytes_up_to_the_total_and_gives_one_folder(hub: FakeHub, tiny_folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    folder = resolve_weights(hub=hub, progress=lambda done, total, file: seen.append((done, total, file)))
    assert read_config(folder) == read_config(tiny_folder)
    assert "training_args.bin" not in hub.fetched
    assert all(done <= total for done, total, _ in seen)
    weights = [total for done, total, _ in seen if total and done == total]
    lm_total = sum(path.stat().st_size for path in (hub.remote / LM).iterdir() if path.name != "training_args.bin")
    assert weights[0] == lm_total


def test_cached_files_are_used_offline_and_downloaded_once(hub: FakeHub) -> None:
    first = resolve_weights(hub=hub)
    count = len(hub.fetched)
    hub.is_offline = True
    assert resolve_weights(hub=hub) == first
    assert len(hub.fetched) == count


def test_an_interrupted_download_resumes(hub: FakeHub) -> None:
    resolve_weights(hub=hub)
    lost = next(name for name in hub.fetched if name.endswith("00002.safetensors"))
    (hub.cache / LM / lost).unlink()
    hub.fetched.clear()
    resolve_weights(hub=hub)
    assert hub.fetched == [lost]


def test_offline_errors_give_the_file_the_cache_and_the_options(hub: FakeHub) -> None:
    hub.is_offline = True
    with pytest.raises(WeightsError) as caught:
        resolve_weights(hub=hub)
    text = str(caught.value)
    assert all(part in text for part in ("config.json", LM, str(hub.cache), "--weights", "--cache-dir", "orpheus:tiny"))


def test_a_failed_download_gives_the_file_the_cache_and_the_options(hub: FakeHub) -> None:
    hub.fails_at = "pytorch_model.bin"
    with pytest.raises(WeightsError) as caught:
        resolve_weights(hub=hub)
    text = str(caught.value)
    assert all(part in text for part in ("pytorch_model.bin", SNAC, str(hub.cache), "--weights", "orpheus:tiny"))


def test_a_given_folder_is_used_as_it_is(checkpoint: Path) -> None:
    assert resolve_weights(checkpoint) == checkpoint


def test_a_given_folder_with_a_truncated_file_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "lm" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged"):
        resolve_weights(checkpoint)


def test_a_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="nowhere"):
        resolve_weights(tmp_path / "nowhere")


def test_safetensors_are_preferred_to_bin() -> None:
    ref = WeightRef(repo="a/b")
    listed = {"config.json": 1, "model.safetensors": 2, "pytorch_model.bin": 3, "optimizer.bin": 4}
    assert set(needed_files(listed, ref)) == {"config.json", "model.safetensors"}
    del listed["model.safetensors"]
    assert set(needed_files(listed, ref)) == {"config.json", "pytorch_model.bin"}
    with pytest.raises(WeightsError, match="no weights"):
        needed_files({"config.json": 1}, ref)


def test_the_hub_cache_layout_is_supported(hub: FakeHub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache = tmp_path / "hub"
    for repo in (LM, SNAC):
        base = cache / f"models--{repo.replace('/', '--')}"
        (base / "refs").mkdir(parents=True)
        (base / "refs" / "main").write_text("abc")
        shutil.copytree(hub.remote / repo, base / "snapshots" / "abc")
    folder = resolve_weights(hub=HuggingFace(cache))
    record = CheckpointLayout.find(folder)
    assert record.lm.resolve().parent.name == record.snac.resolve().parent.name == "snapshots"
    shutil.rmtree(cache / f"models--{SNAC.replace('/', '--')}")
    with pytest.raises(WeightsError, match=SNAC):
        resolve_weights(cache_dir=cache)
