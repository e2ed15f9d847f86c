"""Answers of `transformers` to the same ids, for the gold checks. A development tool: no process serves with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from mstar_core.plugin.check.reference import ReferenceRequest, greedy_ids
from mstar_llm.checkpoint.config import read_config


def reference(folder: Path, request: ReferenceRequest) -> Mapping[str, npt.NDArray[Any]]:
    """Return {"token": greedy ids of the answer}. Each step reads all ids again, without a cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    prompt = request.arrays["tokens"].tolist()

    def logits(written: list[int]) -> npt.NDArray[Any]:
        with torch.no_grad():
            last: npt.NDArray[Any] = model(torch.tensor([prompt + written])).logits[0, -1].numpy()
        return last

    ids = greedy_ids(logits, ends=read_config(folder).stop_ids, limit=request.params.max_output_tokens)
    return {"token": np.array(ids)}
