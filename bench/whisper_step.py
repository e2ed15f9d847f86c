"""Host time of Whisper's decode step: launch and collection of captured steps of one sequence and of many.

Run from the repository root: `python -m bench.whisper_step [--rows 1 64] [--profile 1]`. Prints JSON: microseconds of
process CPU time per launch, which may hold several steps, as medians, and milliseconds from the first to the last.
Replays do nothing and sizes are small, so that only host work remains. `--at-once 1` launches every step alone.
`--device cuda` runs real graphs and FlashInfer at the decoder's official sizes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import bench.gpu_whisper as whisper_shape
from bench.launch_step import StillCache
from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache
from mstar_core.engine.cuda_graphs.ragged import DRAWN
from mstar_core.engine.device import prepare_device
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.weights.building import building
from mstar_core.worker.state.walks import resident_loops
from mstar_whisper.checkpoint.config import HEAD, read_config
from mstar_whisper.nodes.decoder import SpeechDecoder
from mstar_whisper.plugin import whisper
from mstar_whisper.program import MEMORY

SMALL: Final[dict[str, Any]] = {
    "d_model": 64,
    "num_mel_bins": 80,
    "encoder_layers": 1,
    "encoder_attention_heads": 1,
    "encoder_ffn_dim": 64,
    "decoder_layers": 1,
    "decoder_attention_heads": 1,
    "decoder_ffn_dim": 64,
}
PAGE: Final = 16
IDS: Final = 100


class WritingCache(StillCache):
    """Captures whose replays do nothing, and whose drawn ids are valid: an invalid one ends its loop."""

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """See StillCache."""
        graph, outputs = super().capture(step)
        outputs[DRAWN].fill_(1)
        return graph, outputs


class Decoding:
    """A decoder with running loops. Its engine is made once; each request writes `ids` ids."""

    def __init__(self, folder: Path, device: torch.device, slots: int, steps_at_once: int) -> None:
        config = read_config(folder)
        model = whisper(config)
        self.node = next(node for node in model.nodes if node.name == "decoder")
        is_cuda = device.type == "cuda"
        dtype = torch.bfloat16 if is_cuda else torch.float32
        with building(device, dtype):
            module = SpeechDecoder(config)
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=0.02)  # a draw from what the memory holds may be no id
        module.join()
        pages = slots * (config.states // PAGE + 40) + 8
        settings = KVSettings(
            device=device,
            dtype=dtype,
            num_pages=pages,
            page_size=PAGE,
            max_slots=2 * slots,
            max_seq_len=model.max_seq_len,
            vocab=config.vocab,
            token_budget=8192,
            attention="flashinfer" if is_cuda else "torch",
            lookahead=1,
            steps_at_once=steps_at_once,
            graphs=CaptureSizes(decode=tuple(sorted({1, slots}))),
            loop=resident_loops(model).get("decoder"),
        )
        cache = GraphCache(device) if is_cuda else WritingCache(device)
        self.engine = KVCacheEngine(self.node, module.eval().requires_grad_(False), settings, captures=cache)
        self.config = config
        self._states = torch.zeros(config.states, config.width, device=device, dtype=dtype)
        self._keys = 0
        self._handles = 0

    def begin(self, rows: int) -> list[Handle]:
        """Open requests, each with its memory and its loop."""
        handles = [self.remember() for _ in range(rows)]
        while (running := self.engine.launch()) is not None:
            self.engine.collect(running)
        for handle in handles:
            self.write(handle)
        return handles

    def remember(self) -> Handle:
        """Open a request, and submit the pass of its memory."""
        self._handles += 1
        handle = Handle(self._handles)
        self.engine.open(handle, SamplingParams(temperature=0.0), self.config.states + 128)
        self._submit(handle, {"states": self._states}, branch=MEMORY, sample=False)
        return handle

    def write(self, handle: Handle, count: int = IDS) -> None:
        """Submit the loop of a request, which draws a head and `count` ids."""
        ids = self.config.ids
        head = [next(iter(ids.languages.values())), ids.transcribe or 0, ids.no_times]
        marks = torch.tensor([-1 - len(head), 0, 0, 0, 0, *head][: 5 + HEAD])
        carry = {"token": "token", "marks": "marks"}
        loop = LoopSpec(max_iters=count + len(head), carry=carry, stop_port="token", is_read=False)
        self._submit(handle, {"token": torch.tensor([ids.start]), "marks": marks}, loop=loop)

    def _submit(self, handle: Handle, inputs: dict[str, torch.Tensor], **fields: Any) -> None:
        self._keys += 1
        self.engine.submit(Job(key=JobKey(self._keys), handle=handle, inputs=inputs, **fields))


def measure(here: Decoding, rows: int, profile: cProfile.Profile | None) -> tuple[list[float], list[float], float]:
    """Return seconds of CPU of each launch and collection of the loops of so many requests, and the seconds of all."""
    handles, launches, collections = here.begin(rows), list[float](), list[float]()
    flight: list[Any] = []
    began = time.monotonic()
    while True:
        if profile is not None:
            profile.enable()
        start = time.process_time()
        running = here.engine.launch()
        spent = time.process_time() - start
        if running is not None:
            flight.append(running)
            launches.append(spent)
        if not flight:
            break
        if running is None or len(flight) > 1:
            start = time.process_time()
            here.engine.collect(flight.pop(0))
            collections.append(time.process_time() - start)
        if profile is not None:
            profile.disable()
    wall_s = time.monotonic() - began
    for handle in handles:
        here.engine.close(handle)
    return launches, collections, wall_s


def closed_loop(here: Decoding, rows: int, clips: int, profile: cProfile.Profile | None) -> dict[str, float]:
    """Let so many requests run at any time, each from its memory to its last id, until `clips` have ended.

    The first ones write texts of different lengths, so that requests begin and end one by one from then on.
    """
    writing, flight, ended, begun, launches = set[Handle](), list[Any](), 0, rows, 0
    for _ in range(rows):
        here.remember()
    began, spent = time.monotonic(), time.process_time()
    if profile is not None:
        profile.enable()
    while ended < clips:
        running = here.engine.launch()
        if running is not None:
            launches += 1
            flight.append(running)
        if running is not None and len(flight) < 2:
            continue
        for done in here.engine.collect(flight.pop(0)).done:
            handle = done.job.handle
            if handle not in writing:
                writing.add(handle)
                here.write(handle, IDS if len(writing) + ended > rows else 1 + IDS * len(writing) // rows)
                continue
            here.engine.close(handle)
            writing.remove(handle)
            ended += 1
            if begun < clips:
                begun += 1
                here.remember()
    if profile is not None:
        profile.disable()
    while flight:
        here.engine.collect(flight.pop(0))
    per_clip = {"clip_ms": time.monotonic() - began, "clip_cpu_ms": time.process_time() - spent}
    return {name: round(1e3 * s / clips, 3) for name, s in per_clip.items()} | {"clip_launches": launches / clips}


def kernels_of(here: Decoding, rows: int) -> str:
    """Return the kernels of the loops of so many requests, by their time on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        measure(here, rows, None)
    return str(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90))


def main() -> None:
    """Measure and print the figures."""
    options = read_options()
    device = torch.empty(0, device=options.device).device
    prepare_device(device)
    if device.type == "cpu":
        whisper_shape.SIZES.update(SMALL)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        weights = whisper_shape.write_random(Path(folder) / "weights", seed=1)
        here = Decoding(weights, device, max(options.rows), options.at_once)
        report = {}
        for rows in options.rows:
            measure(here, rows, None)
            launches, collections, walls = list[float](), list[float](), list[float]()
            profile = cProfile.Profile() if options.profile == rows else None
            for _ in range(options.repeats):
                launched, collected, wall_s = measure(here, rows, profile)
                launches, collections, walls = launches + launched, collections + collected, [*walls, wall_s]
            figures: dict[str, float] = {
                "launch_us": round(1e6 * statistics.median(launches), 1),
                "collect_us": round(1e6 * statistics.median(collections), 1),
                "launches": len(launches),
                "loop_ms": round(1e3 * statistics.median(walls), 2),
            }
            report[rows] = figures
            if options.clips:
                closed_loop(here, rows, 2 * rows, None)
                report[rows] |= closed_loop(here, rows, options.clips, profile)
            if options.kernels:
                print(kernels_of(here, rows))
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    print(json.dumps(report))


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64], help="requests at once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--clips", type=int, default=0, help="requests that begin and end one by one, from a closed loop"
    )
    parser.add_argument("--kernels", action="store_true", help="print the kernels of each number of rows, on a GPU")
    parser.add_argument("--at-once", type=int, default=8, help="most decode steps of one launch")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="print where the time of it goes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
