"""A deployment of real processes that is asked like a bench: HTTP in, HTTP out, values as numpy arrays."""

from __future__ import annotations

import base64
import concurrent.futures
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import numpy as np

from mstar_core.config.deployment import KVCacheConfig
from mstar_core.conformance.fake_api import ReceivedOutput, RequestOutcome, SampleRequest
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
    """Requests over HTTP, with a bench's answers."""

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
        """One answer of /generate, whatever it is. fields: further fields of the form."""
        data = {"model_kwargs": json.dumps(params), "output_modalities": ",".join(outputs), **fields}
        files = [("files", (part.name, part.data, TYPES[part.modality])) for part in media]
        return httpx.post(
            f"{self.deployment.url}/generate", data=data, files=files or None, timeout=LIMIT_S,
            headers={"accept": accept} if accept else {},
        )  # fmt: skip

    def request(
        self, *, media: Sequence[MediaPart], params: Mapping[str, Any], outputs: Sequence[str]
    ) -> RequestOutcome:
        """One request, streamed, to its end."""
        answer = self.post(media, params, outputs, streaming="true")
        assert answer.status_code == 200, answer.text
        return outcome_of(answer.text)

    def ask(self, *asks: SampleRequest) -> list[RequestOutcome]:
        """Several requests at once."""
        with concurrent.futures.ThreadPoolExecutor(len(asks)) as pool:
            futures = [
                pool.submit(self.request, media=each.media, params=each.params, outputs=each.outputs) for each in asks
            ]
            return [future.result() for future in futures]

    def leaks(self) -> list[str]:
        """What is held although nothing runs; raises where it stays."""
        self.deployment.assert_clean()
        return []


def outcome_of(lines: str) -> RequestOutcome:
    """What a stream of JSON lines tells."""
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
                items.append(ReceivedOutput(modality=modality, port=meta["name"], array=array, meta=meta))
                outputs[modality] = outputs.get(modality, b"") + data
    return RequestOutcome(status="failed" if error else "finished", outputs=outputs, chunks=(), items=tuple(items))
