"""Benchmark of the Whisper server: clips of 30 s to 100 ids each, alone and from many clients.

Run on a machine with a GPU: `python -m bench.gpu_whisper --out bench/results/gpu/whisper.json`.
The weights are random bfloat16 numbers in the shapes of large-v3-turbo, made on the device. Every text has its full
length and is decoded once, without timestamps. `--tiny --device cpu` uses `whisper:tiny`, to test the benchmark itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from bench.serving.client import Heard, ask
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import Figures, head, write
from bench.serving.options import add_deployment_options
from mstar_core.weights.random_fill import MARKER
from mstar_core.workloads.media import recording

IDS: Final = 100
SECONDS, TINY_SECONDS = 30.0, 0.9
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 51866,
    "d_model": 1280,
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_layers": 4,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "decoder_start_token_id": 50258,
    "bos_token_id": 50257,
    "eos_token_id": 50257,
    "pad_token_id": 50257,
}
GENERATION: Final[dict[str, Any]] = {
    "decoder_start_token_id": 50258,
    "eos_token_id": 50257,
    "no_timestamps_token_id": 50364,
    "max_initial_timestamp_index": 50,
    "begin_suppress_tokens": [220, 50257],
    "suppress_tokens": [50358, 50359, 50360, 50361, 50362],
    "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261},
    "task_to_id": {"transcribe": 50360, "translate": 50359},
}


def write_random(folder: Path, seed: int) -> Path:
    """Write a folder of large-v3-turbo's sizes, whose weights are made on the device, and return it."""
    from mstar_whisper.sources.tiny import write_tiny

    folder.mkdir(parents=True)
    tiny = write_tiny(folder.parent / "tiny")
    write_tokenizer(folder)
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8")) | SIZES
    files = {"config.json": config, "generation_config.json": GENERATION, MARKER: {"seed": seed}}
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields) + "\n", encoding="utf-8")
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a text for each id before the end, so that texts of random ids are long."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(SIZES["eos_token_id"] - len(letters))]
    vocab = {token: number for number, token in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = (f"<|{number}|>" for number in range(len(vocab), SIZES["vocab_size"]))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


class Clients:
    """Requests of one deployment. Each clip is a melody of its own, so that no encoder output is known already."""

    def __init__(self, port: int, seconds: float, ids: int) -> None:
        self.figures, self.errors = Figures(), Counter[str]()
        self._port, self._seconds, self._ids, self._sent = port, seconds, ids, 0

    def _sounds(self, count: int) -> list[bytes]:
        """Return new clips. Made before the clock starts, because one takes as long as the server's work on it."""
        first, self._sent = self._sent, self._sent + count
        return [recording(random.Random(first + number), self._seconds) for number in range(count)]

    async def _one(self, sound: bytes) -> Heard:
        fields = {"fallback": False, "language": "en", "ignore_eos": True, "max_output_tokens": self._ids}
        body = {"model_kwargs": json.dumps(fields), "output_modalities": "text"}
        heard = await ask(self._port, body, files={"speech.wav": sound})
        if heard.code:
            self.errors[heard.code] += 1
        return heard

    def alone(self, count: int, label: str = "clip_1") -> None:
        """Send requests one after the other."""
        sounds = self._sounds(count)

        async def send() -> list[Heard]:
            return [await self._one(sound) for sound in sounds]

        heard = asyncio.run(send())
        self.figures.add(label, [each.ended_s - each.sent_s for each in heard if not each.code])

    def together(self, clients: int, clips: int) -> None:
        """Let clients send `clips` requests between them, each its next one as soon as it has an answer."""
        left = self._sounds(clips)

        async def client() -> list[float]:
            took = []
            while left:
                heard = await self._one(left.pop())
                took.append(heard.ended_s - heard.sent_s)
            return took

        async def send() -> list[list[float]]:
            return await asyncio.gather(*(client() for _ in range(clients)))

        started = time.monotonic()
        took = asyncio.run(send())
        wall_s = time.monotonic() - started
        self.figures.add(f"clip_{clients}", [each for of_client in took for each in of_client])
        self.figures.add(f"clips_per_s_{clients}", [clips / wall_s], "1/s")


def measure(options: argparse.Namespace, root: Path, report: dict[str, Any]) -> None:
    """Start the deployment, measure and stop it. report: filled meanwhile."""
    most = max(options.clients)
    plan = Plan(
        model="whisper:tiny" if options.tiny else "whisper",
        device=options.device,
        port=options.port,
        root=root,
        weights=None if options.tiny else write_random(root / "weights", seed=1),
        settings=(f"max_concurrent_requests={most}", *options.set),
    )
    made = Clients(plan.port, TINY_SECONDS if options.tiny else SECONDS, options.ids)
    report |= {"model": plan.model, "settings": list(plan.settings), "device": plan.device}
    with Served(plan) as served:
        made.figures.add("ready_s", [served.ready_s])
        made.together(most, 2 * most)
        served.wait_captured(limit_s=60)
        made.figures.samples.clear()
        made.alone(options.first)
        for clients in options.clients:
            made.together(clients, options.rounds * clients)
        report |= {"graphs": served.captures(), "gpu_at_end": gpu_state(), "held": served.wait_clean()}
    report |= {"errors": dict(made.errors), "metrics": made.figures.summary()}
    if options.out:
        write(report, dict(made.figures.samples), options.out)


def main() -> int:
    """Run the benchmark. Returns 1 if a request failed or a resource is still held."""
    options = read_options()
    scratch = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    report: dict[str, Any] = {**head(), "held": {}, "errors": {}, "metrics": {}}
    if options.commit:
        report["commit"] = options.commit
    try:
        measure(options, scratch, report)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps({key: report[key] for key in ("errors", "held")}))
    for name, values in report["metrics"].items():
        print(f"  {name:32} {values['p50']:10.4g} {values['unit']}  (min {values['min']:.4g}, n {values['n']})")
    return 1 if report["errors"] or report["held"] else 0


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_deployment_options(parser, port=18136)
    parser.add_argument("--commit", default="", help="commit that the report names")
    parser.add_argument("--ids", type=int, default=IDS, help="ids of each text")
    parser.add_argument("--first", type=int, default=20, help="requests of one client")
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[16, 64])
    parser.add_argument("--rounds", type=int, default=8, help="requests of each client of a load")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
