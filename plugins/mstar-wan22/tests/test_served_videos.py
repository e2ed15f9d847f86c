"""/v1/videos over HTTP with OpenAI's client: creation, progress, content, pages, deletion, and deaths of processes."""

from __future__ import annotations

import base64
import io
import json
import sqlite3
from collections.abc import Iterator
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from mstar_core.config.resolved import ApiConfig
from mstar_core.transport.shm import INLINE_BYTES
from mstar_core.workloads.media import ball_picture, png
from tests.runtime.deployment import Deployment, Served, until

WAN = Served(
    model="wan22",
    plugin="wan22",
    nodes=("text_encoder", "vae_encoder", "transformer", "solver", "vae_decoder"),
    settings={"max_seq_len": 4096, "max_concurrent_requests": 2},
)
SMALL = {"num_frames": 9, "num_inference_steps": 4, "seed": 7}
SIZE = "64x32"
LIMIT_S = 120.0
LARGE = "256x128"
LONG = {"num_inference_steps": 32, "num_frames": 17}


@pytest.fixture(scope="module")
def server() -> Iterator[Deployment]:
    with Deployment(served=WAN) as running:
        yield running
        running.assert_clean()


@pytest.fixture
def client(server: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def created(client: openai.OpenAI, *, size: str = SIZE, **changes: Any) -> Any:
    with pytest.warns(DeprecationWarning):
        return client.videos.create(
            prompt="a cat walks",
            size=size,  # type: ignore[arg-type]  # the client lists the sizes of another model
            extra_body={**SMALL, **changes.pop("extra", {})},
            **changes,  # type: ignore[arg-type]
        )


def finished(client: openai.OpenAI, video_id: str) -> Any:
    def poll() -> Any:
        with pytest.warns(DeprecationWarning):
            video = client.videos.retrieve(video_id)
        return video if video.status in ("completed", "failed") else None

    return until(poll, "the video")


def frames_of(data: bytes) -> tuple[np.ndarray, float]:
    with av.open(io.BytesIO(data)) as container:
        (stream,) = container.streams.video
        rate = float(stream.average_rate or 0)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]), rate


def content(client: openai.OpenAI, video_id: str, **query: Any) -> bytes:
    with pytest.warns(DeprecationWarning):
        return client.videos.download_content(video_id, **query).read()


def test_a_video_has_a_time_limit_of_its_own(server: Deployment, client: openai.OpenAI) -> None:
    video = created(client)
    with sqlite3.connect(server.run.path / "videos" / "videos.sqlite") as rows:
        ((request,),) = rows.execute("SELECT request FROM videos WHERE id = ?", (video.id,)).fetchall()
    assert json.loads(request)["timeout_s"] == ApiConfig().videos_timeout_s > ApiConfig().timeout_s
    finished(client, video.id)


def test_a_video_from_a_text(client: openai.OpenAI, server: Deployment) -> None:
    video = created(client)
    assert (video.object, video.size, video.prompt, video.seconds) == ("video", SIZE, "a cat walks", "0.375")
    assert video.status in ("queued", "in_progress")
    done = finished(client, video.id)
    assert (done.status, done.progress, done.error) == ("completed", 100, None)
    assert done.expires_at > done.completed_at >= done.created_at
    frames, rate = frames_of(content(client, video.id))
    assert frames.shape == (9, 32, 64, 3)
    assert rate == 24
    thumbnail = Image.open(io.BytesIO(content(client, video.id, variant="thumbnail")))
    assert thumbnail.size == (64, 32)
    shown = streamed(server, "a cat walks")
    # The file has half the colour resolution, so brightness is compared.
    assert np.corrcoef(frames.mean(-1).ravel(), shown.mean(-1).ravel())[0, 1] > 0.8


def test_ranges_of_a_file(client: openai.OpenAI, server: Deployment) -> None:
    video = created(client, extra={"num_frames": 1})
    finished(client, video.id)
    url = f"{server.url}/v1/videos/{video.id}/content"
    whole = httpx.get(url, timeout=LIMIT_S)
    size = len(whole.content)
    assert (whole.status_code, whole.headers["accept-ranges"]) == (200, "bytes")
    for asked, start, stop in (("5-9", 5, 10), (f"{size - 3}-", size - 3, size), ("-4", size - 4, size)):
        part = httpx.get(url, headers={"Range": f"bytes={asked}"}, timeout=LIMIT_S)
        assert (part.status_code, part.content) == (206, whole.content[start:stop])
        assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
        assert part.headers["content-length"] == str(stop - start)
    beyond = httpx.get(url, headers={"Range": f"bytes={size}-"}, timeout=LIMIT_S)
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")
    assert beyond.json()["error"]["code"] == "range_not_satisfiable"
    assert httpx.get(url, headers={"Range": "bytes=0-1", "If-Range": '"tag"'}, timeout=LIMIT_S).content == whole.content


def streamed(server: Deployment, text: str, **fields: Any) -> np.ndarray:
    """Return the frames of /generate."""
    body = {"text": text, "output_modalities": ["video"], "width": 64, "height": 32, **SMALL, **fields}
    chunks, counts = [], []
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=LIMIT_S) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            event = json.loads(line)
            if event.get("modality") == "video" and "data" in event:
                data = np.frombuffer(base64.b64decode(event["data"]), np.uint8)
                shape = event["metadata"]["shape"]
                chunks.append(data.reshape(shape))
                counts.append(shape[0])
    assert counts == [1, 4, 4]
    return np.concatenate(chunks)


def test_a_video_from_an_image(client: openai.OpenAI, server: Deployment) -> None:
    picture = png(ball_picture(64, 0.5))
    video = created(client, input_reference=("picture.png", picture, "image/png"))
    assert finished(client, video.id).status == "completed"
    reference = {"image_url": f"data:image/png;base64,{base64.b64encode(picture).decode()}"}
    body = {"prompt": "a cat walks", "size": SIZE, "input_reference": reference, **SMALL}
    by_url = httpx.post(f"{server.url}/v1/videos", json=body, timeout=LIMIT_S).raise_for_status().json()["id"]
    assert finished(client, by_url).status == "completed"
    assert content(client, video.id) == content(client, by_url)


def test_pages_and_deletion(client: openai.OpenAI) -> None:
    ids = [created(client, extra={"num_frames": 1}).id for _ in range(3)]
    for video_id in ids:
        finished(client, video_id)
    with pytest.warns(DeprecationWarning):
        page = client.videos.list(limit=2, order="desc")
    assert [video.id for video in page.data] == ids[:0:-1]
    assert page.has_more
    rest = list(page.get_next_page().data)
    assert rest[0].id == ids[0]
    with pytest.warns(DeprecationWarning):
        assert client.videos.delete(ids[0]).deleted
        for call in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
            with pytest.raises(openai.NotFoundError):
                call(ids[0])


@pytest.mark.parametrize("query", ["limit=", "limit=101", "order=", "after="])
def test_a_page_takes_no_empty_values(server: Deployment, query: str) -> None:
    answer = httpx.get(f"{server.url}/v1/videos?{query}", timeout=LIMIT_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"extra": {"num_frames": 8}}, "num_frames"),
        ({"size": "60x32"}, "width"),
        ({"extra": {"num_inference_steps": 0}}, "num_inference_steps"),
        ({"seconds": "long"}, "seconds"),
    ],
)
def test_wrong_requests_are_refused_at_once(client: openai.OpenAI, changes: dict[str, Any], field: str) -> None:
    body = {"prompt": "a cat", "size": SIZE, **SMALL, **changes.get("extra", {})}
    body |= {name: value for name, value in changes.items() if name != "extra"}
    answer = httpx.post(f"{client.base_url}videos", json=body, timeout=LIMIT_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_video_that_runs_is_not_ready_and_can_be_deleted(client: openai.OpenAI) -> None:
    video = created(client, extra={"num_inference_steps": 100, "num_frames": 33})
    with pytest.warns(DeprecationWarning), pytest.raises(openai.ConflictError) as refused:
        client.videos.download_content(video.id)
    assert refused.value.code == "video_not_ready"
    with pytest.warns(DeprecationWarning):
        assert client.videos.delete(video.id).deleted
    with pytest.warns(DeprecationWarning), pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)


@pytest.fixture(scope="module")
def undisturbed(server: Deployment) -> bytes:
    """Return the file of a video of LONG."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        video = created(client, size=LARGE, extra=LONG)
        assert finished(client, video.id).status == "completed"
        return content(client, video.id)


@pytest.mark.parametrize("process", ["api", "worker-0", "conductor"])
def test_a_video_goes_on_after_a_death(
    client: openai.OpenAI, server: Deployment, undisturbed: bytes, process: str
) -> None:
    video = created(client, size=LARGE, extra=LONG)
    state = server.run.path / "videos" / video.id / "state.msgpack"
    until(state.exists, "a saved state")
    assert state.stat().st_size > INLINE_BYTES, "no message holds this state"
    server.kill(server.pids()[process])
    progress: list[int] = []
    done = until(lambda: _retried(client, video.id, progress), "the video")
    assert done.status == "completed"
    assert progress == sorted(progress)  # it begins at the saved step
    assert content(client, video.id) == undisturbed
    if process.startswith("worker"):  # the first noise and the rest of the steps; all would be one more
        until(lambda: 0 < _steps(server) <= LONG["num_inference_steps"], "telemetry of a part of the steps")


def _steps(server: Deployment) -> float:
    """Return the calls of the solver since the start of the worker."""
    lines = httpx.get(f"{server.url}/metrics", timeout=LIMIT_S).text.splitlines()
    return next(
        (float(line.split()[-1]) for line in lines if line.startswith('mstar_step_seconds_count{node="solver"')), 0
    )


def _retried(client: openai.OpenAI, video_id: str, progress: list[int]) -> Any:
    try:
        with pytest.warns(DeprecationWarning):
            video = client.videos.retrieve(video_id)
    except (openai.APIConnectionError, openai.InternalServerError):
        return None
    progress.append(video.progress)
    return video if video.status in ("completed", "failed") else None
