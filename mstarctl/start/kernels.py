"""Names and folder of prebuilt attention kernels (`make kernels`), for `mstarctl doctor`.

The names are FlashInfer's for paged decode and prefill with one dtype for query, cache and output.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

AOT_DIR: Final = "FLASHINFER_AOT_DIR"
"""Environment variable that names the folder of prebuilt kernels."""

SHORT: Final = {"bfloat16": "bf16", "float16": "f16"}


def kernel_names(head_dim: int, dtype: str = "bfloat16") -> tuple[str, str]:
    """Return the names of the decode and the prefill kernel for a head size."""
    short = SHORT[dtype]
    same = (
        f"dtype_q_{short}_dtype_kv_{short}_dtype_o_{short}_dtype_idx_i32_head_dim_qk_{head_dim}_head_dim_vo_{head_dim}"
        "_posenc_0_use_swa_False_use_logits_cap_False"
    )
    return f"batch_decode_with_kv_cache_{same}", f"batch_prefill_with_kv_cache_{same}_f16qk_False"


def prebuilt_folder() -> Path | None:
    """Return the folder that the environment names, None if it names none."""
    named = os.environ.get(AOT_DIR)
    return Path(named) if named else None


def is_prebuilt(folder: Path | None, name: str) -> bool:
    """Return whether the folder contains the kernel."""
    return folder is not None and (folder / name / f"{name}.so").is_file()
