"""GPU checks of doctor: a failed check names the package and the command, and nothing imports torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.host.hardware.gpus import Gpu, parse_smi
from mstarctl.commands.doctor_gpu import gpu_findings, missing_kernels, torch_cuda
from mstarctl.commands.finding import FAILED, NA, OK, WARN, Finding
from mstarctl.start.kernels import AOT_DIR, kernel_names

GIB = 1 << 30
H100 = Gpu(name="NVIDIA H100", driver="580.1", free=70 * GIB, total=80 * GIB)
DECODE = (
    "batch_decode_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128_"
    "posenc_0_use_swa_False_use_logits_cap_False"
)
"""A name that FlashInfer 0.6.18 gave a kernel it built."""


def found(*present: Gpu) -> dict[str, Finding]:
    return {finding.name: finding for finding in gpu_findings(list(present))}


def test_without_a_gpu_nothing_fails() -> None:
    assert {finding.state for finding in found().values()} <= {OK, NA}


@pytest.mark.skipif(torch_cuda() != "", reason="torch is built with CUDA here, so nothing is lacking")
def test_a_gpu_without_its_packages_fails_with_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AOT_DIR, raising=False)
    checks = found(H100)
    for name, command in (
        ("torch cuda", "pip install torch"),
        ("triton", "pip install triton"),
        ("flashinfer", "pip install 'mstarctl[cuda]'"),
    ):
        assert checks[name].state == FAILED and command in checks[name].detail
    assert checks["gpu driver"].detail == "580.1" and "70.0 GiB of 80.0 GiB" in checks["gpu 0 memory"].detail


def test_little_free_memory_is_a_warning() -> None:
    busy = Gpu(name="NVIDIA H100", driver="580.1", free=GIB, total=80 * GIB)
    checks = found(H100, busy)
    assert (checks["gpu 0 memory"].state, checks["gpu 1 memory"].state) == (OK, WARN)


def test_missing_kernels_and_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(AOT_DIR, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    checks = found(H100)
    assert checks["prebuilt kernels"].state == FAILED and DECODE in checks["prebuilt kernels"].detail
    assert "pip install ninja" in checks["ninja"].detail and "apt-get install gcc" in checks["cc"].detail
    for name in missing_kernels():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    checks = found(H100)
    assert (checks["prebuilt kernels"].state, checks["ninja"].state, checks["cc"].state) == (OK, NA, FAILED)


def test_kernels_are_named_as_flashinfer_names_them() -> None:
    assert kernel_names(128)[0] == DECODE
    assert kernel_names(64, "float16")[1].endswith(
        "head_dim_vo_64_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
    )


def test_the_drivers_tool_is_read() -> None:
    said = "NVIDIA H100 80GB HBM3, 580.95.05, 80995, 81559\n[N/A]\n"
    (gpu,) = parse_smi(said)
    assert (gpu.name, gpu.driver, gpu.total >> 20) == ("NVIDIA H100 80GB HBM3", "580.95.05", 81559)
