"""A pack of kernels is Triton's cache in one file, without what no launch reads and without paths of its machine."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from mstar_core.errors import ConfigError
from mstar_core.host.kernel_pack import VARIABLE, install, install_named, pack

KEY, LAUNCHER = "A" * 52, "B" * 52
SO = "__triton_launcher.cpython-312-x86_64-linux-gnu.so"


def cache(folder: Path) -> Path:
    """A cache with one kernel and one launcher, as Triton writes it."""
    own = folder / KEY
    own.mkdir(parents=True)
    files = {"k.json": b'{"name": "k"}', "k.cubin": b"\x7fELF", "k.ttir": b"module", "k.source": b"source"}
    for name, content in files.items():
        (own / name).write_bytes(content)
    (own / "__grp__k.json").write_text(json.dumps({"child_paths": {name: str(own / name) for name in files}}))
    (folder / LAUNCHER).mkdir()
    (folder / LAUNCHER / SO).write_bytes(b"so")
    (folder / "lock").touch()
    return folder


def test_an_installed_pack_is_found_where_triton_looks(tmp_path: Path) -> None:
    assert pack(cache(tmp_path / "made"), tmp_path / "kernels.tar.xz") == 1
    into = tmp_path / "there" / "cache"
    assert install(tmp_path / "kernels.tar.xz", into) == 2
    group = json.loads((into / KEY / "__grp__k.json").read_text())["child_paths"]
    assert group == {name: str(into / KEY / name) for name in ("k.cubin", "k.json")}
    assert (into / KEY / "k.cubin").read_bytes() == b"\x7fELF" and not (into / KEY / "k.ttir").exists()
    assert [path.name for path in (into / LAUNCHER).iterdir()] == [SO]
    assert sorted(path.name for path in into.iterdir() if not path.name.startswith(".")) == [KEY, LAUNCHER]


def test_a_pack_is_installed_once_and_replaces_no_kernel(tmp_path: Path) -> None:
    pack(cache(tmp_path / "made"), tmp_path / "kernels.tar.xz")
    into = tmp_path / "cache"
    (into / KEY).mkdir(parents=True)
    (into / KEY / "k.cubin").write_bytes(b"own")
    assert install(tmp_path / "kernels.tar.xz", into) == 1
    assert (into / KEY / "k.cubin").read_bytes() == b"own"
    assert install(tmp_path / "kernels.tar.xz", into) == 0


def test_packs_of_equal_kernels_are_equal(tmp_path: Path) -> None:
    for name in ("one", "two"):
        pack(cache(tmp_path / name), tmp_path / f"{name}.tar.xz")
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()


@pytest.mark.parametrize("name", ["../out.so", f"{KEY}/../../out.so", f"{KEY}/deep/out.so", "/etc/out.so", "a/k.so"])
def test_a_file_outside_a_key_is_rejected(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar.xz", "w:xz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 3
        archive.addfile(entry, io.BytesIO(b"bad"))
    with pytest.raises(ConfigError, match="not a pack"):
        install(tmp_path / "bad.tar.xz", tmp_path / "cache")
    assert not [*tmp_path.rglob("*.so")]
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_the_environment_names_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert install_named(tmp_path / "cache") == 0
    pack(cache(tmp_path / "made"), tmp_path / "kernels.tar.xz")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels.tar.xz"))
    assert install_named(tmp_path / "cache") == 2
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing.tar.xz"))
    with pytest.raises(ConfigError, match=r"missing.tar.xz cannot be read"):
        install_named(tmp_path / "cache")
    (tmp_path / "torn.tar.xz").write_bytes((tmp_path / "kernels.tar.xz").read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read as a pack"):
        install(tmp_path / "torn.tar.xz", tmp_path / "cache")
