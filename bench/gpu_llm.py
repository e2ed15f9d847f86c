"""Benchmark of the plain language model server: decode rate, time to first token, adapters and constrained answers.

Run from the repository root on a machine with a GPU: `python -m bench.gpu_llm --out bench/results/gpu/llm.json`. The
weights are random bfloat16 numbers in the shapes of Qwen3-8B, made on the device. Prompts are random ids, so no prefix
cache helps; every answer has its full length. The decode rate at N streams is that of the span in which all N decode:
from the last first token to the first last one. `--tiny --device cpu` uses `llm:tiny`, to test the benchmark itself.
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
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.serving.client import Heard, ask
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import Figures, head, write
from bench.serving.options import add_deployment_options

RECORDS: Final = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["red", "green", "blue"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}
"""Schema whose answers are longer than any limit here, so that constrained answers have their full length too."""

CONSTRAINTS: Final[dict[str, dict[str, Any]]] = {
    "regex": {"regex": "[a-z0-9 ]{3000}"},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "records", "schema": RECORDS}}},
}


@dataclass(slots=True)
class Measured:
    """Requests of one deployment and their figures. context: ids of each prompt; ids: of each answer."""

    port: int
    context: int
    ids: int
    vocab: int
    figures: Figures = field(default_factory=Figures)
    errors: Counter[str] = field(default_factory=Counter)
    next_number: int = 1

    def first_token(self, count: int) -> None:
        """Measure `count` requests of one id, one after the other."""

        async def all_of_them() -> list[Heard]:
            return [await self._ask(ids=1, extra={}) for _ in range(count)]

        heard = self._good(asyncio.run(all_of_them()))
        self.figures.add("first_token_1", [each.text_marks[0] - each.sent_s for each in heard if each.text_marks])

    def decode(self, label: str, streams: int, extras: list[dict[str, Any]], *, is_warm_up: bool = False) -> None:
        """Measure `streams` requests that begin together. extras: fields of requests, in turn."""

        async def together() -> list[Heard]:
            turns = (extras[number % len(extras)] for number in range(streams))
            return list(await asyncio.gather(*(self._ask(ids=self.ids, extra=extra) for extra in turns)))

        started = time.monotonic()
        heard = self._good(asyncio.run(together()))
        wall_s = time.monotonic() - started
        if is_warm_up or not heard:
            return
        name = f"{label}_{streams}"
        add = self.figures.add
        add(f"decode_ids_per_s_{name}", [steady_rate(heard)], "1/s")
        add(f"ids_per_s_{name}", [sum(map(tokens_of, heard)) / wall_s], "1/s")
        add(f"first_token_{name}", [each.text_marks[0] - each.sent_s for each in heard])
        add(f"ids_each_{name}", [tokens_of(each) for each in heard], "1")

    async def _ask(self, *, ids: int, extra: dict[str, Any]) -> Heard:
        number, self.next_number = self.next_number, self.next_number + 1
        prompt = random.Random(number).choices(range(self.vocab), k=self.context)
        own = {key: value for key, value in extra.items() if key != "model"}
        kwargs = {"prompt_token_ids": prompt, "max_output_tokens": ids, "seed": number, **own}
        if not own:
            kwargs["ignore_eos"] = True  # an answer with a grammar ends by the grammar alone
        body = {"text": "", "stream_events": "full", "model_kwargs": kwargs}
        return await ask(self.port, body | {key: value for key, value in extra.items() if key == "model"})

    def _good(self, heard: list[Heard]) -> list[Heard]:
        self.errors.update(each.code for each in heard if each.code)
        return [each for each in heard if not each.code and each.text_marks]


def tokens_of(heard: Heard) -> float:
    """Return the ids of an answer, by the server's count."""
    return float(heard.usage.get("completion_tokens") or len(heard.text_marks))


def steady_rate(heard: list[Heard]) -> float:
    """Return ids per second while all requests decode."""
    first, last = max(each.text_marks[0] for each in heard), min(each.text_marks[-1] for each in heard)
    inside = sum(
        tokens_of(each) / len(each.text_marks) * sum(first < mark <= last for mark in each.text_marks) for each in heard
    )
    return inside / (last - first) if last > first else 0.0


def main() -> int:
    """Run the benchmark. Returns 1 if a request failed or a resource is still held."""
    options = read_options()
    scratch = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    begun = head()
    try:
        facts, figures = measured(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report = {**begun, **facts, "metrics": figures.summary()}
    if options.commit:
        report["commit"] = options.commit
    if options.out:
        write(report, dict(figures.samples), options.out)
    print(json.dumps({key: report[key] for key in ("ready_s", "errors", "held")}))
    for name, values in report["metrics"].items():
        print(f"  {name:44} {values['p50']:10.4g} {values['unit']}  (min {values['min']:.4g}, n {values['n']})")
    return 1 if report["errors"] or report["held"] else 0


def measured(options: argparse.Namespace, root: Path) -> tuple[dict[str, Any], Figures]:
    """Start the deployment, run every section and stop it. Returns its facts and figures."""
    from bench.families.llm_checkpoint import write_adapter, write_random

    adapters = {f"adapter{number}": root / f"adapter{number}" for number in range(options.adapters)}
    for number, folder in enumerate(adapters.values()):
        write_adapter(folder, seed=number)
    streams = options.streams
    plan = Plan(
        model="llm:tiny" if options.tiny else "llm",
        device=options.device,
        port=options.port,
        root=root,
        weights=None if options.tiny else write_random(root / "weights", seed=1),
        settings=(f"max_concurrent_requests={max(streams)}", *options.set),
    )
    vocab = 256 if options.tiny else 151_000
    made = Measured(plan.port, context=options.context, ids=options.ids, vocab=vocab)
    facts: dict[str, Any] = {"model": plan.model, "settings": list(plan.settings), "device": plan.device}
    plain: list[dict[str, Any]] = [{}]
    loads = [("plain", size, plain) for size in streams]
    loads += [(name, max(streams), [CONSTRAINTS[name]]) for name in options.constraints]
    try:
        with Served(plan) as served:
            made.figures.add("ready_s", [served.ready_s])
            facts |= {"ready_s": round(served.ready_s, 2), "phases": served.snapshot()["deployment"]["phases_s"]}
            made.decode("warm_up", 1, plain, is_warm_up=True)
            served.wait_captured()
            made.first_token(options.first)
            run_loads(served, made, loads, options.repeats)
            if adapters:
                for name, folder in adapters.items():
                    loaded = served.mstarctl("lora", "load", f"{name}={folder}")
                    if loaded.returncode:
                        raise RuntimeError(loaded.stderr)
                chosen: list[dict[str, Any]] = [{"model": name} for name in adapters]
                run_loads(served, made, [(f"adapters_{len(adapters)}", max(streams), chosen)], options.repeats)
            facts |= {"graphs": served.captures(), "gpu_at_end": gpu_state(), "held": served.wait_clean()}
    except Exception as error:  # noqa: BLE001 isolation boundary: what was measured before it is reported
        traceback.print_exc()
        made.errors["deployment"] += 1
        facts["error"] = str(error)[-3000:]
    return {"ready_s": None, "held": {}, **facts, "errors": dict(made.errors)}, made.figures


def run_loads(served: Served, made: Measured, loads: list[tuple[str, int, list[dict[str, Any]]]], repeats: int) -> None:
    """Warm up every load, wait for its captures, and measure it. A failure ends its load alone."""
    for label, streams, extras in loads:
        try:
            made.decode(label, streams, extras, is_warm_up=True)
            served.wait_captured()
            for _ in range(repeats):
                made.decode(label, streams, extras)
        except Exception:  # noqa: BLE001 isolation boundary: one load
            traceback.print_exc()
            made.errors[f"load_{label}"] += 1


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_deployment_options(parser, port=18126)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1000, help="ids of each prompt")
    parser.add_argument("--ids", type=int, default=512, help="ids of each answer")
    parser.add_argument("--first", type=int, default=20, help="requests that measure the first token")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters of rank 16 in one batch")
    parser.add_argument("--constraints", nargs="*", default=[], choices=[*CONSTRAINTS])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--commit", help="commit of the source, for a tree without history")
    options = parser.parse_args()
    if options.adapters:
        options.set = [*options.set, f"lora.max_adapters={options.adapters}"]
    return options


if __name__ == "__main__":
    sys.exit(main())
