"""Requests of load tests, sample requests, and the synthetic inputs that they carry. Plugins build theirs from it."""

from __future__ import annotations

from mstar_core.workloads.media import picture, recording, video_array
from mstar_core.workloads.request import ServedModel, WorkloadRequest, length, numbered
from mstar_core.workloads.words import sentence

__all__ = [
    "ServedModel",
    "WorkloadRequest",
    "length",
    "numbered",
    "picture",
    "recording",
    "sentence",
    "video_array",
]
