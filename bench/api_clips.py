"""Path of clip requests to the conductor and back: client latency and CPU time of the api, for one or two
trees.

Run from the repository root: `python bench/api_clips.py [--against FOLDER] [--save NAME]`. Prints one JSON object. As
in `api_cameras`, the api is a separate process with a real pool, and fakes of conductor and worker in the client's
process answer immediately. `clip`: 64 frames of 256 pixels (12.6 MB of `.npy`) to one vector; `all`: one frame,
answered with every token (8192 x 1024, bfloat16, 16.8 MB) as binary frames; `steps`: 30 responses of 1.44 MB. The fake
worker sends what a worker of that tree sends.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.serving.figures import median
from bench.serving.in_turn import by_figure, keep, measured, parser_of
from mstar_core.messages.flow import Output, Outputs
from mstar_core.messages.requests import NewRequest
from mstar_vjepa2.plugin import base_spec
from tests.api.own_process import own_api, spec_in
from tests.fakes.conductor import FakeDeployment

SPEC: Final = base_spec()
KINDS: Final = ("clip", "all", "steps")
CONFIG: Final = {
    "model_type": "vjepa2",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "mlp_ratio": 4.0,
}
FRAMES: Final = "application/x-mstar-frames"
BOUNDARY: Final = "between-the-parts-of-a-clip"
WARM: Final = 4


def main() -> None:
    """Measure, print, and save with --save."""
    parser = parser_of(__doc__, requests=15)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.requests))
        return
    windows, begun = measured(options, __file__, options.kinds)
    report = {
        **begun,
        "workload": f"windows of {options.requests} requests one after the other; conductor and worker answer at once; "
        "the trees in turn",
        "ms": {kind: by_figure(found) for kind, found in windows.items()},
        "windows": windows,
    }
    keep(report, options.save)


async def serve(requests: int) -> None:
    """Serve one tree: one window per line of standard input."""
    arrived: list[float] = []
    every = np.random.default_rng(1).standard_normal((8192, 1024)).astype(np.float32)
    # Workers with this feature send numbers in the requested dtype.
    halves = (every.view(np.uint32) >> 16).astype(np.uint16) if _sends_halves() else None
    frame = every[:256, :1024].repeat(2, axis=1)[None, :, :1408].copy()

    def answer(fake: FakeDeployment, request: NewRequest) -> None:
        arrived.append(time.monotonic())
        if request.params["pooling"] == "mean":
            fake.output(request.handle, "tensor", every[0])
        elif request.params["horizon"] == 30:
            for _ in range(30):
                fake.output(request.handle, "tensor", frame)
        elif halves is not None:
            ref = fake._tensors.put(halves, "api", dtype="bfloat16")
            fake._seq[request.handle] = 1
            item = Output(handle=request.handle, seq=0, port="encoder_hidden", modality="tensor", ref=ref)
            fake.tell(Outputs(worker="worker-0", items=[item]), sender="worker-0")
        else:
            fake.output(request.handle, "tensor", every)
        fake.finish(request.handle)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mstar-api-")))
        (folder / "vjepa2").mkdir()
        (folder / "vjepa2" / "config.json").write_text(json.dumps(CONFIG))
        header = json.dumps({"encoder.none": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
        (folder / "vjepa2" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        deployment = msgspec.structs.replace(spec_in(str(folder), SPEC), folder=str(folder / "vjepa2"))
        deployment = msgspec.structs.replace(deployment, max_seq_len=SPEC.max_seq_len)
        fake = FakeDeployment(deployment.ipc_dir, answer)
        stack.callback(fake.close)
        fake.attach()
        async with own_api(deployment, fake.supervisor, "bench.api_clips") as api:
            await fake.until(lambda: bool(fake.received))
            fake.ready()
            await api.ready()
            with closing(Viewer(api.port)) as viewer:
                print("{}", flush=True)
                while kind := (await asyncio.to_thread(sys.stdin.readline)).strip():
                    await asyncio.to_thread(_load, viewer, kind, WARM)
                    arrived.clear()
                    cpu, children = api.cpu_s, _children_cpu_s(api.pid)
                    begun, took = await asyncio.to_thread(_load, viewer, kind, requests)
                    found = {
                        "to_conductor_ms": [at - start for at, start in zip(arrived, begun, strict=True)],
                        "whole_ms": took,
                        "api_cpu_ms": [(api.cpu_s - cpu) / requests],
                        "pool_cpu_ms": [(_children_cpu_s(api.pid) - children) / requests],
                    }
                    print(json.dumps({k: round(1000 * median(sorted(v)), 3) for k, v in found.items()}), flush=True)


def _sends_halves() -> bool:
    try:
        from mstar_core.worker.arrays import narrowed  # noqa: F401  only whether this tree has it
    except ImportError:
        return False
    return True


def _children_cpu_s(parent: int) -> float:
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def _load(viewer: Viewer, kind: str, requests: int) -> tuple[list[float], list[float]]:
    begun, took = [], []
    for _ in range(requests):
        begun.append(time.monotonic())
        took.append(viewer.ask(kind))
    return begun, took


class Viewer:
    """A client over one connection that sends prepared bytes. Used by one thread."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._connection.connect()
        clip, frame = _npy(64), _npy(2)
        self._bodies = {
            "clip": _body({"task": "encode", "pooling": "mean"}, clip),
            "all": _body({"task": "encode", "output_dtype": "bfloat16"}, frame),
            "steps": _body({"task": "rollout", "horizon": 30}, frame),
        }

    def ask(self, kind: str) -> float:
        """Send a request and return the seconds until its last byte. Raises RuntimeError for a status other
        than 200.
        """
        start = time.monotonic()
        kinds = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", "Accept": FRAMES}
        self._connection.request("POST", "/generate", body=self._bodies[kind], headers=kinds)
        answer = self._connection.getresponse()
        size, buffer = 0, bytearray(1 << 20)
        while count := answer.readinto(buffer):
            size += count
        seconds = time.monotonic() - start
        wanted = {"clip": 4096, "all": 8192 * 1024 * 2, "steps": 30 * 256 * 1408 * 4}[kind]
        if answer.status != 200 or size < wanted:
            raise RuntimeError(f"the server answered {answer.status} with {size} bytes: {bytes(buffer[:300])!r}")
        return seconds

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _npy(frames: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.random.default_rng(2).integers(0, 256, (frames, 3, 256, 256), dtype=np.uint8))
    return file.getvalue()


def _body(params: dict[str, Any], clip: bytes) -> bytes:
    fields = {"model_kwargs": json.dumps(params), "output_modalities": "tensor", "streaming": "true"}
    parts = [_part(f'name="{name}"', value.encode()) for name, value in fields.items()]
    return b"".join([*parts, _part('name="files"; filename="clip.npy"', clip), f"--{BOUNDARY}--\r\n".encode()])


def _part(names: str, data: bytes) -> bytes:
    return f"--{BOUNDARY}\r\nContent-Disposition: form-data; {names}\r\n\r\n".encode() + data + b"\r\n"


if __name__ == "__main__":
    main()
