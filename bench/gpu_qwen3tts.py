"""Benchmark of the Qwen3-TTS server: first audio, underruns and rate of sound, in closed and open loops.

Run from the repository root on a machine with a GPU:
`python -m bench.gpu_qwen3tts --out bench/results/gpu/qwen3tts.json`.
The weights are random bfloat16 numbers in the shapes of 1.7B-CustomVoice, made on the device; every speech goes on to a
fixed number of frames. Targets on one H200: first audio of 15 ms at 1 stream; 25 ms (p95 35 ms) at 20 requests per
second in an open loop without gaps; 350 s of sound per second at 64 streams.
`--tiny --device cpu` uses the miniature, to test the benchmark itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from bench.serving.client import Heard, ask
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import Figures, head, write
from bench.serving.load import WORDS
from mstar_core.weights.random_fill import MARKER
from mstar_qwen3tts.checkpoint.config import CONFIG, CUSTOM, TTSConfig
from mstar_qwen3tts.sources.tiny_files import sizes, write_texts
from mstarctl.bench.measure.playback import silences

RATE: Final = 24000
SPOKEN: Final = 16
"""Words of a request."""


def random_checkpoint(folder: Path) -> Path:
    """Write a checkpoint folder of the official sizes without weight files: they are made on the device."""
    config = TTSConfig()
    talker, predictor, codec = config.talker, config.predictor, config.codec
    decoders = {
        name: {
            "hidden_size": each.width,
            "intermediate_size": each.mlp,
            "num_hidden_layers": each.layers,
            "num_attention_heads": each.heads,
            "num_key_value_heads": each.kv_heads,
            "head_dim": each.head_dim,
        }
        for name, each in (("talker", talker), ("predictor", predictor))
    }
    changes = {
        **decoders,
        "codebook": codec.codebook,
        "groups": config.groups,
        "text_width": config.text_width,
        "codec": {
            "codebook_dim": codec.inner,
            "latent_dim": codec.latent,
            "hidden_size": codec.width,
            "intermediate_size": codec.mlp,
            "num_hidden_layers": codec.layers,
            "num_attention_heads": codec.heads,
            "head_dim": codec.head_dim,
            "sliding_window": codec.window,
            "decoder_dim": codec.decoder,
        },
    }
    folder.mkdir(parents=True)
    write_texts(folder, CUSTOM, sizes() | changes)
    written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    written["talker_config"]["text_vocab_size"] = config.text_vocab
    (folder / CONFIG).write_text(json.dumps(written), encoding="utf-8")
    (folder / MARKER).write_text(json.dumps({"seed": 1}), encoding="utf-8")
    return folder


def body(number: int, frames: int) -> dict[str, Any]:
    """Return the form of request `number`, with words and a seed of its own."""
    return {
        "text": " ".join(random.Random(number).choices(WORDS, k=SPOKEN)),
        "output_modalities": "audio",
        "stream_events": "full",
        "model_kwargs": {"max_output_tokens": frames, "ignore_eos": True, "seed": number},
    }


class Measured:
    """Requests of one deployment and their figures."""

    def __init__(self, port: int, frames: int) -> None:
        self.figures, self.errors = Figures(), Counter[str]()
        self._port, self._frames, self._next = port, frames, 1

    def closed(self, streams: int, rounds: int, *, is_warm_up: bool = False) -> None:
        """Run `streams` clients that send `rounds` requests each, one after the other."""
        self._take(f"{streams}_streams", self._clients(streams, rounds), is_warm_up=is_warm_up)

    def open(self, per_s: float, seconds: float) -> None:
        """Send requests at random times, on average `per_s` a second, whatever the answers."""
        self._take(f"{per_s:g}_per_s", self._arriving(per_s, seconds), is_warm_up=False)

    async def _one(self, number: int) -> Heard:
        return await ask(self._port, body(number, self._frames))

    async def _clients(self, streams: int, rounds: int) -> list[Heard]:
        first, self._next = self._next, self._next + streams * rounds

        async def client(index: int) -> list[Heard]:
            return [await self._one(first + index * rounds + number) for number in range(rounds)]

        return [heard for group in await asyncio.gather(*map(client, range(streams))) for heard in group]

    async def _arriving(self, per_s: float, seconds: float) -> list[Heard]:
        chance, tasks = random.Random(1), []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            tasks.append(asyncio.create_task(self._one(self._next)))
            self._next += 1
            await asyncio.sleep(chance.expovariate(per_s))
        return list(await asyncio.gather(*tasks))

    def _take(self, label: str, load: Any, *, is_warm_up: bool) -> None:
        start = time.monotonic()
        heard = asyncio.run(load)
        wall_s = time.monotonic() - start
        self.errors.update(each.code for each in heard if each.code)
        spoken = [each for each in heard if each.marks and not each.code]
        if is_warm_up or not spoken:
            return
        add = self.figures.add
        add(f"first_audio_{label}", [each.marks[0] - each.sent_s for each in spoken])
        add(f"audio_s_per_s_{label}", [sum(sum(each.samples) for each in spoken) / RATE / wall_s], "1")
        dry = [silences(each.marks, [n / RATE for n in each.samples], 0.0) for each in spoken]
        add(f"underruns_{label}", [float(len(each)) for each in dry], "1")


def main() -> int:
    """Run the benchmark. Returns 1 if a request failed or a resource is still held."""
    options = read_options()
    scratch = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    plan = Plan(
        model="qwen3_tts:tiny" if options.tiny else "qwen3_tts",
        device=options.device,
        port=options.port,
        root=scratch,
        weights=None if options.tiny else random_checkpoint(scratch / "weights"),
        settings=(f"max_concurrent_requests={options.most}", *options.set),
    )
    made = Measured(plan.port, options.frames)
    report: dict[str, Any] = {**head(), "traces": {}}
    try:
        with Served(plan) as served:
            made.figures.add("ready_s", [served.ready_s])
            for streams in options.closed:
                made.closed(streams, 1, is_warm_up=True)
                served.wait_captured()
                made.closed(streams, options.rounds)
                report["traces"][f"{streams}_streams"] = served.last_trace()
            for per_s in options.open:
                made.open(per_s, options.seconds)
            report |= {"graphs": served.captures(), "gpu_at_end": gpu_state(), "held": served.wait_clean()}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report |= {"errors": dict(made.errors), "metrics": made.figures.summary()}
    if options.out:
        write(report, made.figures.samples, options.out)
    print(f"errors {report['errors']}, graphs {report['graphs']}")
    for name, values in report["metrics"].items():
        print(f"  {name:32} p50 {values['p50']:10.4g} {values['unit']}  (n {values['n']})")
    return 1 if report["errors"] or report["held"] else 0


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--closed", type=int, nargs="*", default=[1, 8, 64], help="streams of closed loops, in turn")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each stream")
    parser.add_argument("--open", type=float, nargs="*", default=[20.0], help="requests per second of open loops")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of an open loop")
    parser.add_argument("--frames", type=int, default=60, help="frames of a speech, 80 ms each")
    parser.add_argument("--most", type=int, default=160, help="requests at once")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for `mstarctl up`; may be repeated")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the miniature in place of the official shapes")
    parser.add_argument("--port", type=int, default=18125)
    parser.add_argument("--out", type=Path, help="report file; raw samples are written beside it")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
