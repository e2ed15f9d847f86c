"""Shares of a GPU's memory: never above the device, all or none, freed by a kill, and refusals name the holders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.errors import StartError
from mstar_core.host.gpu_locks import (
    FOLDER_VARIABLE,
    MemoryClaim,
    acquire_gpus,
    gpu_holder,
    gpu_holders,
    note_holder,
    release,
    resize_gpus,
)

GIB = 1 << 30
TOTAL = 80 * GIB
GPUS = {"cuda:0": "GPU-aaaa", "cuda:1": "GPU-bbbb"}


@pytest.fixture(autouse=True, scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder for the properties, whose examples share it; the tests below have one each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("ledger")))
        yield


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


def claims(**gib: float) -> dict[str, MemoryClaim]:
    """Claims by key from GiB by the letter of a GPU: `claims(a=20)`."""
    devices = {key: device for device, key in GPUS.items()}
    keys = {letter: f"GPU-{letter * 4}" for letter in gib}
    return {
        keys[letter]: MemoryClaim(device=devices[keys[letter]], need_bytes=int(size * GIB), total_bytes=TOTAL)
        for letter, size in gib.items()
    }


def take(name: str, **gib: float) -> dict[str, int]:
    """Acquire shares of the GPUs that are named."""
    wanted = claims(**gib)
    return acquire_gpus({claim.device: key for key, claim in wanted.items()}, name, wanted)


def held_gib(key: str) -> list[tuple[str, float]]:
    return [(holder.name, (holder.held_bytes or 0) / GIB) for holder in gpu_holders(key)]


def test_several_deployments_share_a_gpu_and_the_one_too_many_is_told_who_holds_what(folder: Path) -> None:
    first, second = take("omni", a=40), take("speech", a=25)
    assert held_gib("GPU-aaaa") == [("omni", 40), ("speech", 25)]
    with pytest.raises(StartError) as refused:
        take("robot", a=20)
    error = refused.value
    assert (error.title, error.code) == ("GPU 0 has too little memory left for robot", "gpu_memory_short")
    assert "needs 20.0 GiB of 80.0 GiB" in error.detail and f"{5 * GIB:,} bytes too few" in error.detail
    assert f"'omni' (pid {os.getpid()}" in error.detail and "holds 25.0 GiB" in error.detail
    assert error.facts["holders"] == ["omni", "speech"] and error.facts["short_bytes"] == 5 * GIB
    release(second)
    release(take("robot", a=20))
    release(first)
    assert gpu_holder("GPU-aaaa") is None


def test_a_claim_above_the_device_can_never_fit(folder: Path) -> None:
    with pytest.raises(StartError, match="can never fit on GPU 0") as refused:
        take("huge", a=81)
    assert refused.value.code == "gpu_memory_never"


def test_several_gpus_are_taken_together_or_not_at_all(folder: Path) -> None:
    held = take("first", b=70)
    with pytest.raises(StartError, match="GPU 1 has too little"):
        take("second", a=20, b=20)
    assert gpu_holder("GPU-aaaa") is None
    release(held)


def test_a_whole_gpu_and_a_share_exclude_each_other(folder: Path) -> None:
    share = take("shared", a=10)
    with pytest.raises(StartError) as refused:
        acquire_gpus({"cuda:0": "GPU-aaaa"}, "alone")
    assert refused.value.title == "GPU 0 is in use" and "holds 10.0 GiB of it" in refused.value.detail
    release(share)
    whole = acquire_gpus({"cuda:0": "GPU-aaaa"}, "alone")
    with pytest.raises(StartError, match="GPU 0 is in use"):
        take("shared", a=10)
    release(whole)


def test_a_sleeper_gives_memory_back_and_may_not_get_it_again(folder: Path) -> None:
    sleeper = take("sleeper", a=60, b=60)
    resize_gpus(sleeper, claims(a=1, b=1), "sleeper")
    other = take("other", b=70)
    with pytest.raises(StartError, match="GPU 1 has too little memory left for sleeper"):
        resize_gpus(sleeper, claims(a=60, b=60), "sleeper")
    assert held_gib("GPU-aaaa") == [("sleeper", 1)], "a refused change changes nothing"
    release(other)
    resize_gpus(sleeper, claims(a=60, b=60), "sleeper")
    assert held_gib("GPU-bbbb") == [("sleeper", 60)]
    note_holder(sleeper["GPU-bbbb"], "renamed")
    assert held_gib("GPU-bbbb") == [("renamed", 60)], "a new name keeps the bytes"
    release(sleeper)


def test_a_killed_holder_leaves_no_share_behind(folder: Path) -> None:
    body = (
        "import sys\nfrom mstar_core.host.gpu_locks import MemoryClaim, acquire_gpus\n"
        f"claim = MemoryClaim(device='cuda:0', need_bytes={70 * GIB}, total_bytes={TOTAL})\n"
        "kept = acquire_gpus({'cuda:0': 'GPU-aaaa'}, 'other', {'GPU-aaaa': claim})\n"
        "print('held', flush=True)\nsys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", body], stdin=pipe, stdout=pipe, env=environment) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(StartError, match="too little memory left"):
            take("next", a=20)
        other.kill()
        other.wait(60)
    assert gpu_holder("GPU-aaaa") is None
    release(take("next", a=20))
    release(acquire_gpus({"cuda:0": "GPU-aaaa"}, "alone"))


SIZES = st.integers(min_value=0, max_value=100)


@given(st.lists(st.tuples(st.sampled_from(["take", "alone", "resize", "end"]), SIZES, SIZES), max_size=30))
def test_no_sequence_of_deployments_exceeds_a_device(turns: list[tuple[str, int, int]]) -> None:
    live: list[tuple[str, dict[str, int]]] = []
    try:
        for number, (turn, first, second) in enumerate(turns):
            name = f"d{number}"
            sizes = {letter: size for letter, size in (("a", first), ("b", second)) if size}
            try:
                match turn:
                    case "take":
                        live.append((name, take(name, **sizes)))
                    case "alone":
                        live.append((name, acquire_gpus(GPUS, name)))
                    case "resize" if live:
                        owner, held = live[first % len(live)]
                        resize_gpus(held, claims(a=first, b=second), owner)
                    case "end" if live:
                        release(live.pop(first % len(live))[1])
            except StartError as error:
                assert error.code in ("gpu_in_use", "gpu_memory_short", "gpu_memory_never")
                known = {owner for owner, _ in live}
                assert error.code == "gpu_memory_never" or set(error.facts["holders"]) <= known != set()
            for key in GPUS.values():
                holders = gpu_holders(key)
                assert sum(holder.held_bytes or 0 for holder in holders) <= TOTAL
                assert len(holders) == 1 or all(holder.held_bytes is not None for holder in holders)
    finally:
        for _, held in live:
            release(held)
    assert all(gpu_holder(key) is None for key in GPUS.values())


def test_racing_deployments_neither_exceed_a_device_nor_block_each_other(folder: Path) -> None:
    """Each takes both GPUs in its own order of names, changes its size and ends; all of them finish."""

    def life(seed: int) -> list[int]:
        random, seen = Random(seed), []
        for turn in range(6):
            try:
                held = take(f"d{seed}-{turn}", a=random.randint(1, 50), b=random.randint(1, 50))
            except StartError as error:
                assert error.code == "gpu_memory_short" and error.facts["holders"]
                continue
            seen += [sum(h.held_bytes or 0 for h in gpu_holders(key)) for key in GPUS.values()]
            release(held)
        return seen

    with ThreadPoolExecutor(8) as pool:
        sums = [size for seen in pool.map(life, range(8)) for size in seen]
    assert sums and max(sums) <= TOTAL
    assert all(gpu_holder(key) is None for key in GPUS.values())
