"""GET /v1/samples: inputs that fit the served model, made by its plugin."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pybase64
from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.service import Service
from mstar_core.plugin.offers import SampleInputs, kind_of
from mstar_core.workloads.samples import samples_of


async def samples(exchange: Exchange) -> HTTPResponse:
    """Return the samples of the model with their files. They are made once, on a thread."""
    service = exchange.service
    if service.samples is None:
        service.samples = await asyncio.to_thread(_listed, service)
    return exchange.json(service.samples)


def _listed(service: Service) -> dict[str, Any]:
    deployment = service.deployment
    folder = None if deployment.folder is None else Path(deployment.folder)
    known = samples_of(service.model, deployment.weights_source, folder)
    return {"object": "list", "data": [_entry(sample) for sample in known]}


def _entry(sample: SampleInputs) -> dict[str, Any]:
    return {
        "name": sample.name,
        "title": sample.title,
        "text": sample.text,
        "output_modalities": list(sample.outputs),
        "params": dict(sample.params),
        "files": [
            {"name": name, "kind": kind_of(name), "data": pybase64.b64encode_as_string(data)}
            for name, data in sample.files
        ],
    }
