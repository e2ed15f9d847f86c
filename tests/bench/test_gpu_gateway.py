"""Parts of the benchmark of four models behind one gateway: its requests, its client, and what it reads from logs."""

from __future__ import annotations

import json
import os
from email import message_from_bytes
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from bench.gateway.client import Lost, send
from bench.gateway.load import met
from bench.gateway.logs import by_model, copy_logs, events, moves
from bench.gateway.models import BUDGETS, HOST, MODELS, Ask, asks, write_file
from bench.gateway.watch import last_words, processor_s, progress_of, state_of
from bench.serving.deployment import parents
from mstar_core.gateway.serve_file import load_serve_file
from tests.fakes.deployments import serve_on_port

LINES = (
    b'{"modality":"start","data":"","metadata":{}}\n'
    b'{"modality":"audio","data":"AAAAAA==","metadata":{"sample_rate":2,"num_channels":1}}\n'
    b'{"modality":"done","data":"","metadata":{"usage":{}}}\n'
)


@pytest.mark.parametrize("name", MODELS)
def test_each_request_is_a_form_with_a_whole_stream(name: str) -> None:
    ask = asks()[name]
    form = message_from_bytes(b"Content-Type: " + ask.content_type.encode() + b"\r\n\r\n" + ask.body)
    names = [part.get_param("name", header="content-disposition") for part in form.get_payload()]
    assert {"text", "streaming", "stream_events"} <= set(names)
    assert names.count("files") == (3 if name == "pi05" else 0)


def test_the_file_shares_the_gpu_among_models_that_do_not_fit_together(tmp_path: Path) -> None:
    path = write_file(
        tmp_path / "serve.yaml", port=8650, device="cuda", is_tiny=False, host_memory=None, weights={"omni": tmp_path}
    )
    serve = load_serve_file(path)
    assert serve.sleepable and list(serve.models) == list(MODELS)
    sizes = {name: int(text.removesuffix("GiB")) for name, text in BUDGETS.items()}
    assert sum(sizes.values()) > 140
    assert sizes["omni"] > int(HOST.removesuffix("GiB")) >= sum(sizes.values()) - sizes["omni"]


async def test_an_answer_has_its_times_and_sound_and_one_that_is_not_whole_is_lost() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        text = (await request.read()).decode()
        body = {"whole": LINES, "cut": LINES[: LINES.index(b'{"modality":"done"')]}.get(text, b"")
        status = 503 if text == "full" else 200
        return web.Response(body=body, status=status, content_type="application/x-ndjson")

    url, close = await serve_on_port(web.Server(answer))
    try:
        async with aiohttp.ClientSession() as session:
            heard = await send(session, url, Ask(body=b"whole", content_type="text/plain"), 60.0)
            assert heard.pieces >= 1 and 0 < heard.first_s <= heard.took_s
            assert heard.audio_s == 1.0 and heard.gaps == 0
            for text in (b"cut", b"full", b"nothing"):
                with pytest.raises(Lost):
                    await send(session, url, Ask(body=text, content_type="text/plain"), 60.0)
    finally:
        await close()


def test_wakes_and_sleeps_are_read_from_the_logs(tmp_path: Path) -> None:
    gateway, omni = tmp_path / "gateway" / "start", tmp_path / "omni" / "start"
    gateway.mkdir(parents=True)
    omni.mkdir(parents=True)
    lines = ('{"message": "omni was woken in 1.250 s"}', '{"message": "pi05 was loaded in 9.000 s"}')
    (gateway / "gateway.log").write_text("\n".join(lines))
    (omni / "worker-0.log").write_text("omni sleeps\n")
    found = [{"type": "deployment.sleeps", "level": 2, "took_s": 0.5}, {"type": "deployment.woken", "took_s": 1.0}]
    (omni / "events.ndjson").write_text("".join(json.dumps(each) + "\n" for each in found))
    moved = moves(tmp_path)
    assert moved == {"woken": [{"model": "omni", "s": 1.25}], "loaded": [{"model": "pi05", "s": 9.0}]}
    slept = events(tmp_path, "deployment.sleeps")
    expected = {"p50": 0.5, "p99": 0.5, "min": 0.5, "max": 0.5, "n": 1}
    assert by_model(slept, "took_s") == {"all": expected, "omni": expected}
    assert "omni sleeps" in last_words(tmp_path / "omni")
    copy_logs(tmp_path, tmp_path / "copy")
    assert (tmp_path / "copy" / "omni_start_worker-0.log").read_text() == "omni sleeps\n"
    assert (tmp_path / "copy.tar.gz").is_file()


def test_states_and_progress_are_said_in_words() -> None:
    item = {"state": "sleeping", "sleep_level": 2, "reason": "waits for omni", "progress": None}
    assert met(item) == "wake_2" and state_of(item) == "sleeping at level 2, waits for omni"
    item = {"state": "loading", "sleep_level": 0, "reason": "", "progress": {"text": "weights", "share": 0.4}}
    assert met(item) == "loading" and progress_of(item) == "weights 40 %"
    assert met({"state": "absent"}) == "start" and met({"state": "idle"}) == "awake"
    assert met({"state": "sleeping", "sleep_level": 0}) == "falling_asleep"


def test_processor_time_and_children_of_a_process_are_read_from_proc() -> None:
    assert processor_s(os.getpid()) > 0
    assert processor_s(2**22 + 1) == 0
    assert parents()[os.getpid()] == os.getppid()
