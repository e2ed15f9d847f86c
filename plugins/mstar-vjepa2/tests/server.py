"""Client of a deployment of real processes with the interface of LocalRuntime. Values are numpy arrays."""

from __future__ import annotations

import base64
import concurrent.futures
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import numpy as np

from mstar_core.api.output.units import OutputItem
from mstar_core.config.resolved import KVCacheConfig
from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.plugin.processor import MediaPart
from tests.runtime.deployment import Deployment, Served

LIMIT_S: Final = 120.0
BASE: Final = Served(model="vjepa2", plugin="vjepa2", nodes=("video_encoder", "predictor", "pooler"))
AC: Final = Served(
    model="vjepa2_ac",
    plugin="vjepa2",
    nodes=("video_encoder", "ac_predictor", "mpc_scorer", "cem_sampler", "cem_update"),
    settings={"max_seq_len": 32 * 18, "kv_cache": KVCacheConfig(pages=1024, prefix_cache=False)},
)
TYPES: Final = {"image": "image/png", "video": "video/mp4", "tensor": "application/octet-stream"}


@dataclass(frozen=True)
class Server:
    """Requests over HTTP with the outcomes of LocalRuntime."""

    deployment: Deployment

    def post(
        self,
        media: Sequence[MediaPart],
        params: Mapping[str, Any],
        outputs: Sequence[str] = ("tensor",),
        *,
        accept: str = "",
        **fields: str,
    ) -> httpx.Response:
        """Return the response of /generate with any status. fields: additional form fields."""
        data = {"model_kwargs": json.dumps(params), "output_modalities": ",".join(outputs), **fields}
        files = [("files", (part.name, part.data, TYPES[part.modality])) for part in media]
        return httpx.post(
            f"{self.deployment.url}/generate",
            data=data,
            files=files or None,
            timeout=LIMIT_S,
            headers={"accept": accept} if accept else {},
        )

    def request(
        self, *, media: Sequence[MediaPart], params: Mapping[str, Any], outputs: Sequence[str]
    ) -> RequestOutcome:
        """Run one streamed request to its end."""
        answer = self.post(media, params, outputs, streaming="true")
        assert answer.status_code == 200, answer.text
        return outcome_of(answer.text)

    def ask(self, *asks: SampleRequest) -> list[RequestOutcome]:
        """Run several concurrent requests."""
        with concurrent.futures.ThreadPoolExecutor(len(asks)) as pool:
            futures = [
                pool.submit(self.request, media=ask.media, params=ask.params, outputs=ask.outputs) for ask in asks
            ]
            return [future.result() for future in futures]

    def leaks(self) -> list[str]:
        """Raise if resources remain in use while nothing runs."""
        self.deployment.assert_clean()
        return []


def outcome_of(lines: str) -> RequestOutcome:
    """Parse the outcome from a stream of JSON lines."""
    items, outputs, error = [], {}, ""
    for line in filter(None, map(str.strip, lines.splitlines())):
        told = json.loads(line)
        data, meta = base64.b64decode(told.get("data") or ""), told.get("metadata") or {}
        match told["modality"]:
            case "start" | "progress":
                pass
            case "done":
                assert not error, error
            case "error":
                error = data.decode()
            case "video":
                outputs["video"] = outputs.get("video", b"") + data
            case modality:
                array = np.frombuffer(data, np.dtype(meta["dtype"]).newbyteorder("<")).reshape(meta["shape"])
                items.append(OutputItem(modality=modality, port=meta["name"], array=array, meta=meta))
                outputs[modality] = outputs.get(modality, b"") + data
    return RequestOutcome(status="failed" if error else "finished", outputs=outputs, chunks=(), items=tuple(items))
