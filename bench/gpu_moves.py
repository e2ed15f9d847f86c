"""Move of a KV cache between two GPU processes of one host: time of each part, bytes, and copies by kind.

Run from the repository root: `python -m bench.gpu_moves [--tokens 512,4096] [--pairs 0:1] [--out FILE]`. The
cache has the form of Qwen3-Omni's Thinker (48 layers, 4 KV heads of 128, bfloat16, pages of 16 tokens) or of Orpheus.
The source gathers its pages into staging tensors and lends them by CUDA IPC; the target maps them, copies, and scatters
into its pages. With one GPU both processes share it. Copies are counted by torch's profiler in both processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from mstar_core.engine.device_state.page_store import PageStore
from mstar_core.messages.tensors import CudaTensor
from mstar_core.worker.peer_memory.memory import CudaMemory
from mstar_core.worker.peer_memory.transport import PeerMemory

PAGE = 16
REPEATS = 8
FORMS = {"thinker": (48, 4, 128), "orpheus": (28, 8, 128)}


@dataclass(slots=True, kw_only=True)
class Move:
    """Median times of one cache in milliseconds, and bytes copied between memories in one move, by kind."""

    form: str
    tokens: int
    devices: tuple[int, int]
    megabytes: float = 0.0
    gather_ms: float = 0.0
    send_ms: float = 0.0
    message_ms: float = 0.0
    read_ms: float = 0.0
    scatter_ms: float = 0.0
    total_ms: float = 0.0
    read_gb_s: float = 0.0
    first_total_ms: float = 0.0
    copies_of_source: dict[str, int] | None = None
    copies_of_target: dict[str, int] | None = None


def pools(form: str, tokens: int, device: torch.device) -> tuple[list[torch.Tensor], list[int]]:
    """Return pools with twice the pages of a cache, and the pages of the cache: every other one, backwards."""
    layers, heads, dim = FORMS[form]
    count = -(-tokens // PAGE)
    made = [torch.randn(2 * count, 2, PAGE, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(layers)]
    return made, list(range(2 * count - 1, -1, -2))


def copies(profile: torch.profiler.profile) -> dict[str, int]:
    """Return the bytes of copies between memories by kind. Page numbers are uploaded: a few KiB from host to device."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            found[event["name"]] += int(event.get("args", {}).get("bytes", 0))
    return dict(found)


def source(form: str, tokens: int, device_index: int, pipe: Connection) -> None:
    """Gather and lend the cache as often as the target asks."""
    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    made, pages = pools(form, tokens, device)
    store = PageStore(made)
    memory = PeerMemory("worker-0", 1, CudaMemory(device), ["worker-1"], most_bytes=16 << 30)
    profile: torch.profiler.profile | None = None
    while (command := pipe.recv()) != "stop":
        if command == "profile":
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profile.start()
        began = time.monotonic()
        groups = store.gather(pages)
        torch.cuda.synchronize()
        gathered = time.monotonic()
        outgoing = [memory.send(group, "worker-1") for group in groups]
        while not all(each.is_done for each in outgoing):
            pass
        sent = time.monotonic()
        refs = [msgspec.msgpack.encode(each.ref) for each in outgoing]
        pipe.send((began, gathered, sent, refs, float(made[0][pages[0]].float().sum())))
        for slot, generation in pipe.recv():
            memory.release(slot, generation)
    seen = {}
    if profile is not None:
        torch.cuda.synchronize()
        profile.stop()
        seen = copies(profile)
    pipe.send(seen)
    memory.close()


def measure(form: str, tokens: int, devices: tuple[int, int]) -> Move:
    """Move one cache REPEATS times."""
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=source, args=(form, tokens, devices[0], there))
    process.start()
    device = torch.device("cuda", devices[1])
    torch.cuda.set_device(device)
    made, pages = pools(form, tokens, device)
    store = PageStore(made)
    memory = PeerMemory("worker-1", 1, CudaMemory(device), ["worker-0"])
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    rows: list[list[float]] = []
    found = Move(form=form, tokens=tokens, devices=devices)
    for number in range(REPEATS + 1):
        is_last = number == REPEATS
        if is_last:
            profile.start()
        pipe.send("profile" if is_last else "go")
        began, gathered, sent, data, total = pipe.recv()
        refs = [msgspec.msgpack.decode(each, type=CudaTensor) for each in data]
        came = time.monotonic()
        for ref in refs:
            memory.begin(ref)
        while not all(memory.is_ready(ref) for ref in refs):
            pass
        read = time.monotonic()
        groups = [memory.take(ref) for ref in refs]
        store.keep(number, groups)
        store.restore(number, pages)
        store.drop([number])
        torch.cuda.synchronize()
        ended = time.monotonic()
        assert float(made[0][pages[0]].float().sum()) == total
        pipe.send([(ref.slot, ref.generation) for ref in refs])
        parts = (gathered - began, sent - gathered, came - sent, read - came, ended - read, ended - began)
        found.megabytes = sum(ref.size_bytes for ref in refs) / 1e6
        if number == 0:
            found.first_total_ms = parts[-1] * 1e3
        elif not is_last:
            rows.append([part * 1e3 for part in parts])
    torch.cuda.synchronize()
    profile.stop()
    found.copies_of_target = copies(profile)
    pipe.send("stop")
    found.copies_of_source = pipe.recv()
    process.join()
    names = ("gather_ms", "send_ms", "message_ms", "read_ms", "scatter_ms", "total_ms")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        setattr(found, name, round(statistics.median(column), 3))
    found.read_gb_s = round(found.megabytes / 1e3 / (found.read_ms / 1e3), 1)
    memory.close()
    return found


def main() -> None:
    """Measure every size, between two GPUs if there are two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="512,4096")
    parser.add_argument(
        "--pairs", default="", help="devices of source and target, `0:0,0:1`; by default these if there are two"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    named = options.pairs or ("0:0,0:1" if torch.cuda.device_count() > 1 else "0:0")
    pairs = [(int(source), int(target)) for source, _, target in (each.partition(":") for each in named.split(","))]
    made = []
    for devices in pairs:
        for form in FORMS:
            for tokens in map(int, options.tokens.split(",")):
                made.append(measure(form, tokens, devices))
                print(json.dumps(asdict(made[-1])), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(each) for each in made], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
