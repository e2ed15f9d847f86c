"""Generator of the recordings of tests and docs, with spans and logs: `python -m tests.top.recorded`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mstar_core.observe.frames import encode
from mstarctl.top.data.recording import Recorder
from tests.top.models import orpheus, qwen
from tests.top.streams import EPOCH, Live, Simulation

RECORDINGS = Path(__file__).parent / "recordings"


def trace(simulation: Simulation, r: Live) -> dict[str, Any]:
    """Return the admin socket's answer for the trace of a request."""
    parsed = r.born + 0.012
    spans = [span_of(r, "compute", "parse", "", r.born, parsed, "api")]
    spans.append(span_of(r, "queue", "admission", "", parsed, min(simulation.t, r.admitted), "conductor"))
    for stage, begin, until in r.plan:
        end = min(simulation.t, until)
        if begin > simulation.t:
            continue
        where = (stage.node, stage.walk)
        worker = f"worker-{stage.rank}"
        spans.append(span_of(r, "queue", *where, begin - 0.02, begin, worker))
        if stage.audio_x:
            at = begin + 0.2
            while at < end:
                spans.append(span_of(r, "compute", *where, at, at + 0.016, worker))
                at += 0.28
        elif stage.tokens_s:
            steps = int((end - begin) * 1000 / stage.step_ms)
            spans.append(span_of(r, "compute", *where, begin, end, worker, count=steps, batch=14))
            wait = begin + 0.55 * (end - begin)
            spans.append(span_of(r, "wait", *where, wait, wait + 0.03 * (end - begin), worker, waits_for="Thinker"))
        else:
            spans.append(span_of(r, "compute", *where, begin, end, worker, batch=3))
    for edge in simulation.model.edges:
        fed = next((p for p in r.plan if p[0].node == edge.into and p[1] < simulation.t), None)
        if fed is not None and edge.source_rank != edge.into_rank:
            spans.append(
                span_of(
                    r,
                    "transfer",
                    edge.name,
                    "",
                    fed[1] - 0.01,
                    min(simulation.t, fed[2]),
                    f"worker-{edge.into_rank}",
                    size_bytes=2_400_000,
                )
            )
    return {"request": {"id": r.id, "handle": r.handle}, "spans": spans, "sums": [], "spans_cut": 0}


def span_of(
    r: Live, kind: str, node: str, walk: str, start: float, end: float, process: str, **more: Any
) -> dict[str, Any]:
    """Return one span in the admin socket's format."""
    return span(kind, node, walk, 1000 * (start - r.born), 1000 * (end - r.born), process, **more)


def log_lines(simulation: Simulation) -> list[dict[str, Any]]:
    """Return log lines of processes: JSON, and some plain text of native libraries."""
    newest = simulation.live[-1]
    clock = f"2026-11-21T08:{int(simulation.t / 60) % 60:02d}:{int(simulation.t) % 60:02d}.120Z"

    def said(source: str, level: str, message: str, request: str = "") -> dict[str, Any]:
        facts = {"time": clock, "level": level, "child": source, "message": message}
        return {"from": source, "line": json.dumps(facts | ({"request": request} if request else {}))}

    return [
        said("api", "INFO", f"admitted after {1000 * (newest.admitted - newest.born):.0f} ms", newest.id),
        said("conductor", "DEBUG", f"{len(simulation.live)} requests, {newest.prompt} tokens of prompt next"),
        said("worker-0", "INFO", f"prefill of {newest.prompt} tokens in 3 chunks", newest.id),
        *(
            [said("worker-0", "WARNING", "pool full: 96 pages taken back", newest.id)]
            if simulation.random.random() < 0.2
            else []
        ),
        *(
            [{"from": "worker-1", "line": "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"}]
            if simulation.random.random() < 0.1
            else []
        ),
    ]


def span(kind: str, node: str, walk: str, start_ms: float, end_ms: float, process: str, **more: Any) -> dict[str, Any]:
    """Return one span of a request in the admin socket's format."""
    rank = int(process.removeprefix("worker-")) if process.startswith("worker-") else None
    return {
        "process": process,
        "rank": rank,
        "kind": kind,
        "node": node,
        "walk": walk,
        "start_ms": round(start_ms, 1),
        "end_ms": round(end_ms, 1),
        "count": 1,
        "batch": 0,
        "size_bytes": 0,
        "is_open": False,
        **more,
    }


def record(path: Path, simulation: Simulation, seconds: float) -> None:
    """Write a recording with logs and the spans of every request."""
    path.unlink(missing_ok=True)
    recorder = Recorder(path, simulation.model.name, at=0.0)
    second = -1
    for at, frame in simulation.frames(seconds):
        recorder.frame(at, encode(frame))
        if int(at) != second and at > seconds - 12:
            for facts in log_lines(simulation):
                recorder.log(at, facts)
        second = int(at)
    for r in simulation.live:
        recorder.answer(seconds, f"/v1/requests/{r.id}/trace?handle={r.handle}", trace(simulation, r))
    recorder.close()


def lost() -> Simulation:
    """Record a deployment whose worker has just died."""
    return Simulation(qwen(), seed=3, requests=6, uptime=600.0)


CAUSE = {
    "time": EPOCH + 600,
    "child": "worker-0",
    "class": "OutOfMemoryError",
    "message": "CUDA out of memory: 2.0 GiB wanted, 0.4 of 79.1 GiB free",
    "rank": 0,
}


def write_recordings() -> None:
    """Write all recordings."""
    RECORDINGS.mkdir(exist_ok=True)
    record(RECORDINGS / "qwen3_omni.mstar.gz", Simulation(qwen(), hz=1.0), 300)
    record(RECORDINGS / "orpheus.mstar.gz", Simulation(orpheus(), hz=2.0, requests=9, uptime=95.0), 30)
    record(RECORDINGS / "hosts.mstar.gz", Simulation(qwen(), hz=1.0, requests=9, hosts={1: "node-b"}), 40)
    broken = lost()
    (RECORDINGS / "lost.mstar.gz").unlink(missing_ok=True)
    recorder = Recorder(RECORDINGS / "lost.mstar.gz", "qwen3_omni", at=0.0)
    for at, frame in broken.frames(5):
        recorder.frame(at, encode(frame))
    for frame in broken.lose(CAUSE):
        recorder.frame(5.25, encode(frame))
    recorder.close()


if __name__ == "__main__":
    write_recordings()
