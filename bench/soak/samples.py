"""Requests that a deployment says it can serve, as bodies of /generate."""

from __future__ import annotations

from typing import Any, Final

import httpx

SEED: Final = 11


def sample_bodies(url: str, max_tokens: int = 0) -> dict[str, dict[str, Any]]:
    """Return the samples of a deployment by name. Each has a seed, so that two runs of one have the same bytes.

    max_tokens: limit of the ids of samples that write or speak; 0 is none.
    """
    listed = httpx.get(f"{url}/v1/samples", timeout=60).raise_for_status().json()
    return {sample["name"]: body_of(sample, max_tokens) for sample in listed["data"]}


def body_of(sample: dict[str, Any], max_tokens: int = 0) -> dict[str, Any]:
    """Return one sample as a body."""
    has_limit = max_tokens and not {"text", "audio"}.isdisjoint(sample["output_modalities"])
    limits = {"max_output_tokens": max_tokens} if has_limit else {}
    files = [{"name": file["name"], "data": file["data"]} for file in sample["files"]]
    return {
        "text": sample["text"],
        "output_modalities": sample["output_modalities"],
        "model_kwargs": {"seed": SEED, **limits, **sample["params"]},
        **({"files": files} if files else {}),
    }
