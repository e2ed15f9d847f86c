"""Benchmark of the Qwen3-Omni server: speech and text out of text, sound and images, under closed loops.

Run from the repository root on a machine with one or two GPUs:
`python bench/gpu_qwen3omni.py --config qwen3omni_single_gpu --out bench/results/gpu/qwen3omni.json`.
The weights are random numbers in the official shapes, made on the device; routing is therefore near uniform, the worst
case for the experts' bytes. Text goes on to its limit; speech ends after a fixed number of frames.
`--beside 8` also measures speech of 8 streams while a long video prompt is processed beside them.
`--first 32:4` sends requests right after ready, before anything is warm, and records the captures meanwhile.
`picture_form_to_text` and `picture_url_to_text` send the same image as an upload and as a data URL in a chat.
`--load-test omni-seedtts:16:160` runs a workload of `mstarctl bench` with so many clients and requests.
`--tiny --device cpu` uses the miniature, to test the benchmark itself.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import math
import random
import shutil
import sys
import tempfile
import time
import traceback
import wave
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench.families.omni_first import first_requests
from bench.families.omni_video import video_prompt
from bench.serving.client import Heard, ask, ask_encoded, request_parts
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import ROOT, Figures, head, write
from bench.serving.load import WORDS
from mstarctl.bench.measure.playback import silences

CONFIGS: Final = ROOT / "plugins" / "mstar-qwen3omni" / "src" / "mstar_qwen3omni" / "configs"
RATE: Final = 24000
FRAME_S: Final = 0.08
BUFFER_S: Final = 0.0
"""Sound that a listener buffers before playback."""

CHAT: Final = "/v1/chat/completions"
SEEDTTS_PARAMS: Final = {"ignore_eos": True, "max_output_tokens": 20, "talker_max_tokens": 42}
"""Lengths of the answers of a load test: about 15 words and 3.4 s of speech, as published for SeedTTS sentences.

Random weights never end by themselves.
"""

TINY_PARAMS: Final = {"ignore_eos": True, "max_output_tokens": 6, "talker_max_tokens": 8}
VIDEO_TOKENS: Final = 6144
ROUNDS: Final = 4
VIDEO_AT_S: Final = 0.3
"""Seconds after the first requests of speech at which the video is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A kind of request. words: of text; text_tokens: written; frames: spoken, 12.5 per second.

    is_chat: sent to the chat route, with its image as a data URL in JSON.
    """

    words: int
    text_tokens: int
    frames: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)
    is_chat: bool = False

    def encoded(self, port: int, number: int) -> tuple[bytes, bytes]:
        """Return head and body of request `number`."""
        if self.is_chat:
            return request_parts(port, self.chat(number), None, CHAT)
        return request_parts(port, self.body(number), self.files or None)

    def chat(self, number: int) -> dict[str, Any]:
        """Return request `number` for the chat route."""
        form = self.body(number)
        urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in self.files.values()]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        found = {
            "model": "qwen3_omni",
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": form["text"]}]}],
            **form["model_kwargs"],
        }
        if self.frames:
            found |= {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "pcm16"}}
        return found

    def body(self, number: int) -> dict[str, Any]:
        """Return the form of request `number`. Words and seed are its own, so that no prefix cache helps."""
        words = " ".join(random.Random(number).choices(WORDS, k=self.words))
        return {
            "text": words,
            "output_modalities": "text,audio" if self.frames else "text",
            "stream_events": "full",
            "model_kwargs": {
                "max_output_tokens": self.text_tokens,
                "talker_max_tokens": max(1, self.frames),
                "ignore_eos": True,
                "seed": number,
            },
        }


def workloads(*, is_tiny: bool) -> dict[str, Workload]:
    """Return the workloads by name: short prompts, 4.5 s of speech, a 3 s clip, images of 1024² and 768² pixels."""
    image, sound = png(96 if is_tiny else 1024), wav(1.0 if is_tiny else 3.0)
    picture = {"image.png": png(96 if is_tiny else 768)}
    frames, tokens = (12, 8) if is_tiny else (56, 24)
    long = 16 if is_tiny else 128
    return {
        "text_to_speech": Workload(words=16, text_tokens=tokens, frames=frames),
        "image_to_speech": Workload(words=8, text_tokens=tokens, frames=frames, files={"image.png": image}),
        "speech_to_speech": Workload(words=4, text_tokens=tokens, frames=frames, files={"sound.wav": sound}),
        "speech_to_text": Workload(words=4, text_tokens=long, files={"sound.wav": sound}),
        "image_to_text": Workload(words=8, text_tokens=long, files={"image.png": image}),
        "text_to_text": Workload(words=64, text_tokens=long),
        "picture_form_to_text": Workload(words=8, text_tokens=long, files=picture),
        "picture_url_to_text": Workload(words=8, text_tokens=long, files=picture, is_chat=True),
        "picture_url_to_speech": Workload(words=8, text_tokens=tokens, frames=frames, files=picture, is_chat=True),
    }


def png(side: int) -> bytes:
    """Return a noise image, which no compression makes small."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def wav(seconds: float, rate: int = 16000) -> bytes:
    """Return a mono clip of a rising tone."""
    count = round(seconds * rate)
    samples = (int(12000 * math.sin(6.283 * (200 + 300 * at / count) * at / rate)) for at in range(count))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(b"".join(sample.to_bytes(2, "little", signed=True) for sample in samples))
    return file.getvalue()


@dataclass(slots=True)
class Measured:
    """Requests of one deployment and their figures."""

    port: int
    figures: Figures = field(default_factory=Figures)
    errors: Counter[str] = field(default_factory=Counter)
    next_number: int = 1

    def closed(self, name: str, work: Workload, streams: int, rounds: int, *, is_warm_up: bool = False) -> None:
        """Run `streams` clients that send `rounds` requests each, one after the other."""
        heard = asyncio.run(self._clients(work, streams, rounds))
        wall_s = max(each.ended_s for each in heard) - min(each.sent_s for each in heard)
        self.errors.update(each.code for each in heard if each.code)
        good = [each for each in heard if not each.code]
        if is_warm_up or not good:
            return
        label = f"{name}_{streams}"
        add = self.figures.add
        add(f"requests_per_s_{label}", [len(good) / wall_s], "1/s")
        add(f"request_{label}", [each.ended_s - each.sent_s for each in good])
        add(f"first_text_{label}", [each.text_marks[0] - each.sent_s for each in good if each.text_marks])
        add(f"text_tokens_per_s_{label}", [sum(_tokens(each) for each in good) / wall_s], "1/s")
        if work.frames:
            self._note_sound(label, good, wall_s)

    def _note_sound(self, label: str, heard: list[Heard], wall_s: float) -> None:
        spoken = [each for each in heard if each.marks]
        self.errors["no_sound"] += len(heard) - len(spoken)
        if not self.errors["no_sound"]:
            del self.errors["no_sound"]
        seconds = [sum(each.samples) / RATE for each in spoken]
        spans = [each.ended_s - each.sent_s for each in spoken]
        add = self.figures.add
        add(f"first_audio_{label}", [each.marks[0] - each.sent_s for each in spoken])
        add(f"audio_s_per_s_{label}", [sum(seconds) / wall_s], "1")
        add(f"realtime_factor_{label}", [span / length for span, length in zip(spans, seconds, strict=True)], "1")
        dry = [silences(each.marks, [n / RATE for n in each.samples], BUFFER_S) for each in spoken]
        add(f"underruns_{label}", [float(len(each)) for each in dry], "1")

    def beside(self, work: Workload, streams: int, *, is_tiny: bool) -> None:
        """Measure speech alone, then with a long video prompt beside it: underruns and pauses between texts."""
        video = video_prompt(64 if is_tiny else VIDEO_TOKENS, is_tiny=is_tiny)
        for round_number, (name, prompts) in enumerate((("warm_up", 1), ("alone", 0), ("beside_video", 2))):
            heard, seen = asyncio.run(
                self._with_videos(
                    work,
                    streams,
                    [
                        (video.files, video.body(work.text_tokens, 1000 * round_number + number))
                        for number in range(prompts)
                    ],
                )
            )
            self.errors.update(each.code for each in (*heard, *seen) if each.code)
            if name == "warm_up":
                continue
            gaps = [later - earlier for each in heard for earlier, later in pairwise(each.text_marks)]
            dry = [silences(each.marks, [n / RATE for n in each.samples], BUFFER_S) for each in heard if each.marks]
            add = self.figures.add
            add(f"underruns_{name}_{streams}", [float(len(each)) for each in dry], "1")
            add(f"pause_between_texts_{name}_{streams}", gaps)
            add(f"first_audio_{name}_{streams}", [each.marks[0] - each.sent_s for each in heard if each.marks])
            if seen:
                firsts = [each.text_marks[0] - each.sent_s for each in seen if each.text_marks]
                add(f"first_text_of_video_{streams}", firsts)

    async def _with_videos(
        self, work: Workload, streams: int, videos: list[tuple[dict[str, bytes], dict[str, Any]]]
    ) -> tuple[list[Heard], list[Heard]]:
        async def sent() -> list[Heard]:
            await asyncio.sleep(VIDEO_AT_S)
            return [await ask(self.port, body, files=files) for files, body in videos]

        spoken, seen = await asyncio.gather(self._clients(work, streams, ROUNDS), sent())
        return spoken, seen

    async def _clients(self, work: Workload, streams: int, rounds: int) -> list[Heard]:
        first, self.next_number = self.next_number, self.next_number + streams * rounds
        parts = [work.encoded(self.port, number) for number in range(first, self.next_number)]

        async def one(client: int) -> list[Heard]:
            mine = parts[client * rounds : (client + 1) * rounds]
            return [await ask_encoded(self.port, each) for each in mine]

        return [heard for group in await asyncio.gather(*map(one, range(streams))) for heard in group]


def _tokens(heard: Heard) -> float:
    found = heard.usage.get("completion_tokens_details", {}).get("text_tokens") or heard.usage.get("completion_tokens")
    return float(found or len(heard.text_marks))


def main() -> int:
    """Run the benchmark. Returns 1 if a request failed or a resource is still held."""
    options = read_options()
    scratch = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    report: dict[str, Any] = {**head(), "errors": {}, "held": {}}
    samples: dict[str, list[float]] = {}
    if options.commit:
        report["commit"] = options.commit
    try:
        for config in options.config:
            one, figures = measured(options, scratch / config, config, partly(options, report, config))
            prefix = f"{config}." if len(options.config) > 1 else ""
            report.setdefault("deployments", {})[config] = {**one, "metrics": figures.summary()}
            report["errors"] |= {f"{prefix}{code}": count for code, count in one["errors"].items()}
            report["held"] |= {f"{prefix}{name}": value for name, value in one["held"].items()}
            samples |= {f"{prefix}{name}": values for name, values in figures.samples.items()}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.out:
        write(report, samples, options.out)
    for config, one in report.get("deployments", {}).items():
        print(f"{config}: ready {one['ready_s']} s, errors {one['errors']}")
        for name, values in one["metrics"].items():
            print(f"  {name:44} {values['p50']:10.4g} {values['unit']}  (min {values['min']:.4g}, n {values['n']})")
    return 1 if report["errors"] or report["held"] else 0


def partly(options: argparse.Namespace, report: dict[str, Any], config: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that writes what one deployment has measured so far, in case the run is cut."""

    def write_facts(facts: dict[str, Any]) -> None:
        if options.out:
            report.setdefault("deployments", {})[config] = facts
            write(report, {}, options.out)

    return write_facts


def measured(
    options: argparse.Namespace, root: Path, config: str, keep: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], Figures]:
    """Start one deployment, run every workload and stop it. Returns its facts and figures.

    keep: called with the facts after each section.
    """
    root.mkdir(parents=True)
    chosen = workloads(is_tiny=options.tiny)
    loads = [*options.closed, *options.first, *(pair for _, closed in options.workloads for pair in closed)]
    most = max([streams for streams, _ in loads] + [clients for _, clients, _ in options.load_test])
    settings = (f"max_concurrent_requests={most}", f"max_seq_len={options.max_seq_len}", *options.set)
    plan = Plan(
        model="qwen3_omni:tiny" if options.tiny else "qwen3_omni",
        device=options.device,
        port=options.port,
        root=root,
        weights=None if options.tiny else random_checkpoint(root / "weights"),
        settings=settings,
        config=None if options.tiny else CONFIGS / f"{config}.yaml",
    )
    made = Measured(plan.port)
    facts: dict[str, Any] = {"config": config, "settings": list(settings), "device": plan.device, "sections": {}}
    try:
        with Served(plan) as served:
            began = served.snapshot()
            made.figures.add("ready_s", [served.ready_s])
            facts |= {
                "ready_s": round(served.ready_s, 2),
                "phases": began["deployment"]["phases_s"],
                "placement": began["ranks"],
            }
            if options.first:
                work = chosen["picture_url_to_speech"]
                facts["first"] = first_requests(served, work, made.port, options.first, made.errors)
                facts["log"] = capture_lines(root)
                keep(facts)
            for name, closed in options.workloads:
                run_workload(served, made, name, chosen[name], closed or options.closed, facts["sections"])
                keep({**facts, "metrics": made.figures.summary()})
            for name, clients, requests in options.load_test:
                facts.setdefault("load_tests", {})[f"{name}_{clients}"] = load_test(
                    options, served, name, clients, requests
                )
                keep({**facts, "metrics": made.figures.summary()})
            if options.beside:
                made.beside(chosen["text_to_speech"], options.beside, is_tiny=options.tiny)
            facts |= {
                "graphs": served.captures(),
                "mem": served.resident_bytes(),
                "gpu_at_end": gpu_state(),
                "held": served.wait_clean(),
                "values": {n: value for n, value in served.values().items() if "graph" in n or "kernels" in n},
            }
    except Exception as error:  # noqa: BLE001 isolation boundary: one deployment; the others are still measured
        traceback.print_exc()
        made.errors["deployment"] += 1
        facts["error"] = str(error)[-3000:]
    return {"ready_s": None, "held": {}, **facts, "errors": dict(made.errors)}, made.figures


def capture_lines(root: Path) -> list[str]:
    """Return the lines of the workers' logs about kernels and captures, of the start and of the first requests."""
    from bench.gpu_ready import log_lines  # it imports this module

    return [line[:200] for line in log_lines(root)]


def load_test(options: argparse.Namespace, served: Served, name: str, clients: int, requests: int) -> dict[str, Any]:
    """Run a workload of `mstarctl bench` with answers of fixed lengths. Returns its metrics and statuses."""
    params = TINY_PARAMS if options.tiny else SEEDTTS_PARAMS
    words = [word for key, value in params.items() for word in ("--param", f"{key}={json.dumps(value)}")]
    load = ["--workload", name, "--concurrency", str(clients), "--requests", str(requests), "--warmup", str(clients)]
    found = served.load_test(*load, *words, "--plain")
    return {key: found.get(key) for key in ("exit", "statuses", "metrics", "notes", "warnings", "client", "load")}


def run_workload(
    served: Served, made: Measured, name: str, work: Workload, closed: list[tuple[int, int]], sections: dict[str, Any]
) -> None:
    """Warm up and measure one workload at every number of streams. A failure ends this workload alone."""
    try:
        for streams, rounds in closed:
            made.closed(name, work, streams, 1, is_warm_up=True)
            served.wait_captured()
            before, counted, start = served.cpu_s(), served.values(), time.monotonic()
            made.closed(name, work, streams, rounds)
            after = served.cpu_s()
            sections[f"{name}_{streams}"] = {
                "wall_s": round(time.monotonic() - start, 3),
                "cpu_s": {process: round(after[process] - before.get(process, 0.0), 3) for process in after},
                "graphs": _graphs(served.values(), counted),
                "trace": served.last_trace(),
            }
    except Exception:  # noqa: BLE001 isolation boundary: one workload
        traceback.print_exc()
        made.errors[f"section_{name}"] += 1


def _graphs(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return the hits and misses of CUDA graphs between two readings."""
    kinds = (".graph_hits", ".graph_misses", ".graphs_captured", ".prefill_hits", ".prefill_misses", ".prefill_tokens")
    changed = {name: value - before.get(name, 0.0) for name, value in after.items() if name.endswith(kinds)}
    return {name: value for name, value in changed.items() if value}


def random_checkpoint(folder: Path) -> Path:
    """Write a checkpoint folder of the official sizes without weight files: they are made on the device."""
    from bench.families.omni_checkpoint import write_random

    return write_random(folder, seed=1)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", default=["qwen3omni_single_gpu"], help="deployment files, in turn")
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["text_to_speech"],
        metavar="NAME[@STREAMS:REQUESTS,…]",
        help="by default --closed",
    )
    parser.add_argument("--closed", type=pairs, default="1:8,8:3,16:2,32:2", help="STREAMS:REQUESTS of each stream")
    parser.add_argument("--beside", type=int, default=0, metavar="STREAMS", help="speech beside a long video prompt")
    parser.add_argument("--first", type=pairs, default="", help="STREAMS:REQUESTS of each, sent right after ready")
    parser.add_argument(
        "--load-test", type=load_tests, default="", metavar="NAME:CLIENTS:REQUESTS,…", help="of `mstarctl bench run`"
    )
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for `mstarctl up`; may be repeated")
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the miniature in place of the official shapes")
    parser.add_argument("--port", type=int, default=18124)
    parser.add_argument("--commit", help="commit of the source, for a tree without history")
    parser.add_argument("--out", type=Path, help="report file; raw samples are written beside it")
    options = parser.parse_args()
    options.workloads = [chosen_workload(parser, word) for word in options.workloads]
    if options.tiny:
        options.config, options.max_seq_len = options.config[:1], min(options.max_seq_len, 2048)
    return options


def chosen_workload(parser: argparse.ArgumentParser, word: str) -> tuple[str, list[tuple[int, int]]]:
    """Parse `text_to_speech@1:2,8:2` as a name and pairs, which are empty without `@`."""
    name, _, loads = word.partition("@")
    if name not in (known := workloads(is_tiny=True)):
        parser.error(f"workload {name!r}: choose from {', '.join(known)}")
    return name, pairs(loads)


def pairs(text: str) -> list[tuple[int, int]]:
    """Parse `1:20,8:4` as pairs of numbers."""
    found = [part.partition(":") for part in text.split(",") if part]
    return [(int(size), int(amount)) for size, _, amount in found]


def load_tests(text: str) -> list[tuple[str, int, int]]:
    """Parse `omni-seedtts:16:160` as name, clients and requests."""
    found = [part.split(":") for part in text.split(",") if part]
    return [(name, int(clients), int(requests)) for name, clients, requests in found]


if __name__ == "__main__":
    sys.exit(main())
