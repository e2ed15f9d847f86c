"""Benchmark of the plain language model server: decode rate, time to first token, adapters and constrained answers.

Run from the repository root on a machine with a GPU: `python -m bench.gpu_llm --out bench/results/gpu/llm.json`. The
weights are random bfloat16 numbers in the shapes of Qwen3-8B, made on the device. Prompts are random ids, so no prefix
cache helps; every answer has its full length. The decode rate at N streams is that of the span in which all N decode:
from the last first token to the first last one. `--constraints` and `--adapters` also give their rate as a share of the
plain one. Each section has `--section-s` seconds; requests that run longer are disconnected, the rate is that of what
came, and the section is marked as cut. Results are written after each section, so a run that is ended keeps them.
`--tiny --device cpu` uses `llm:tiny`, to test the benchmark itself.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.serving.client import LEFT, Heard, ask
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import Figures, head, median, write
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


WARM_UP_IDS: Final = 32
"""Ids of answers that only make a load's steps run once."""


@dataclass(slots=True)
class Measured:
    """Requests of one deployment and their figures. context: ids of each prompt; ids: of each answer.

    due: when the section ends, in monotonic seconds. is_cut: requests of the section were disconnected at that time.
    """

    port: int
    context: int
    ids: int
    vocab: int
    figures: Figures = field(default_factory=Figures)
    errors: Counter[str] = field(default_factory=Counter)
    next_number: int = 1
    due: float = 0.0
    is_cut: bool = False

    @property
    def left_s(self) -> float:
        """Seconds that are left of the section."""
        return max(0.0, self.due - time.monotonic())

    def first_token(self, count: int) -> None:
        """Measure `count` requests of one id, one after the other."""

        async def all_of_them() -> list[Heard]:
            return [await self._ask(ids=1, extra={}) for _ in range(count)]

        heard = self._good(asyncio.run(all_of_them()))
        self.figures.add("first_token_1", [each.text_marks[0] - each.sent_s for each in heard if each.text_marks])

    def warm_up(self, streams: int, extras: list[dict[str, Any]]) -> None:
        """Send `streams` short requests together."""
        asyncio.run(self._together(streams, extras, min(self.ids, WARM_UP_IDS)))

    def decode(self, label: str, streams: int, extras: list[dict[str, Any]]) -> None:
        """Measure `streams` requests that begin together. extras: fields of requests, in turn."""
        started = time.monotonic()
        heard = self._good(asyncio.run(self._together(streams, extras, self.ids)))
        wall_s = time.monotonic() - started
        if not heard:
            return
        name = f"{label}_{streams}"
        add = self.figures.add
        add(f"decode_ids_per_s_{name}", [steady_rate(heard)], "1/s")
        add(f"ids_per_s_{name}", [sum(map(tokens_of, heard)) / wall_s], "1/s")
        add(f"first_token_{name}", [each.text_marks[0] - each.sent_s for each in heard])
        add(f"ids_each_{name}", [tokens_of(each) for each in heard], "1")

    def share(self, label: str, streams: int) -> None:
        """Note the median rate of a load as a share of the plain one's."""
        rates = [
            sorted(self.figures.samples.get(f"decode_ids_per_s_{name}_{streams}", [])) for name in (label, "plain")
        ]
        if all(rates) and median(rates[1]):
            self.figures.add(f"share_of_plain_{label}_{streams}", [median(rates[0]) / median(rates[1])], "1")

    async def _together(self, streams: int, extras: list[dict[str, Any]], ids: int) -> list[Heard]:
        turns = (extras[number % len(extras)] for number in range(streams))
        return list(await asyncio.gather(*(self._ask(ids=ids, extra=extra) for extra in turns)))

    async def _ask(self, *, ids: int, extra: dict[str, Any]) -> Heard:
        number, self.next_number = self.next_number, self.next_number + 1
        prompt = random.Random(number).choices(range(self.vocab), k=self.context)
        body: dict[str, Any] = {"text": "", "stream_events": "full", **extra}
        kwargs = {"prompt_token_ids": prompt, "max_output_tokens": ids, "seed": number}
        if extra.keys() <= {"model"}:
            kwargs["ignore_eos"] = True  # an answer with a grammar ends by the grammar alone
        return await ask(self.port, body | {"model_kwargs": kwargs}, leave_after_s=self.left_s)

    def _good(self, heard: list[Heard]) -> list[Heard]:
        self.is_cut = self.is_cut or any(each.code == LEFT for each in heard)
        self.errors.update(each.code for each in heard if each.code not in ("", LEFT))
        return [each for each in heard if each.code in ("", LEFT) and each.text_marks]


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
    report: dict[str, Any] = {**head(), "ready_s": None, "held": {}, "errors": {}, "sections": {}}
    if options.commit:
        report["commit"] = options.commit
    try:
        measure(options, scratch, report)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps({key: report[key] for key in ("ready_s", "errors", "held")}))
    for name, values in report["metrics"].items():
        print(f"  {name:44} {values['p50']:10.4g} {values['unit']}  (min {values['min']:.4g}, n {values['n']})")
    return 1 if report["errors"] or report["held"] else 0


@dataclass(slots=True)
class Run:
    """Sections of one run. report: what is written to `out` after each."""

    report: dict[str, Any]
    made: Measured
    section_s: float
    out: Path | None

    def section(self, name: str, work: Callable[[], None]) -> None:
        """Run a section, within its time, and write the results so far. A failure ends the section alone."""
        started, self.made.is_cut, facts = time.monotonic(), False, dict[str, Any]()
        self.made.due = started + self.section_s
        try:
            work()
        except Exception as error:  # noqa: BLE001 isolation boundary: one section
            traceback.print_exc()
            self.made.errors[f"section_{name}"] += 1
            facts["error"] = str(error)[-3000:]
        if self.made.is_cut:
            facts["cut"] = True
            print(f"{name}: cut after {self.section_s:g} s", file=sys.stderr, flush=True)
        self.report["sections"][name] = {"took_s": round(time.monotonic() - started, 2), **facts}
        self.save()

    def save(self) -> None:
        """Write the results so far."""
        self.report |= {"errors": dict(self.made.errors), "metrics": self.made.figures.summary()}
        if self.out:
            write(self.report, dict(self.made.figures.samples), self.out)


def measure(options: argparse.Namespace, root: Path, report: dict[str, Any]) -> None:
    """Start the deployment, run every section and stop it. report: filled meanwhile."""
    from bench.families.llm_checkpoint import write_adapter, write_random

    adapters = {f"adapter{number}": root / f"adapter{number}" for number in range(options.adapters)}
    for number, folder in enumerate(adapters.values()):
        write_adapter(folder, seed=number)
    streams, most = options.streams, max(options.streams)
    plan = Plan(
        model="llm:tiny" if options.tiny else "llm",
        device=options.device,
        port=options.port,
        root=root,
        weights=None if options.tiny else write_random(root / "weights", seed=1),
        settings=(f"max_concurrent_requests={most}", *options.set),
    )
    vocab = 256 if options.tiny else 151_000
    made = Measured(plan.port, context=options.context, ids=options.ids, vocab=vocab)
    run = Run(report, made, options.section_s, options.out)
    report |= {"model": plan.model, "settings": list(plan.settings), "device": plan.device}
    loads = [(name, [CONSTRAINTS[name]]) for name in options.constraints]
    chosen: list[dict[str, Any]] = [{"model": name} for name in adapters]
    try:
        with Served(plan) as served:
            made.figures.add("ready_s", [served.ready_s])
            report |= {"ready_s": round(served.ready_s, 2), "phases": served.snapshot()["deployment"]["phases_s"]}
            run.section("first_token", lambda: first_tokens(served, made, options.first))
            for size in streams:
                load_section(run, served, ("plain", size, [{}]), options.repeats)
            for name, extras in loads:
                load_section(run, served, (name, most, extras), options.repeats)
            if adapters:
                run.section("load_adapters", lambda: load_adapters(served, made, adapters))
                if "error" not in report["sections"]["load_adapters"]:
                    load_section(run, served, (f"adapters_{len(adapters)}", most, chosen), options.repeats)
            report |= {"graphs": served.captures(), "gpu_at_end": gpu_state(), "held": served.wait_clean()}
    except Exception as error:  # noqa: BLE001 isolation boundary: what was measured before it is reported
        traceback.print_exc()
        made.errors["deployment"] += 1
        report["error"] = str(error)[-3000:]
    run.save()


def first_tokens(served: Served, made: Measured, count: int) -> None:
    """Warm the deployment up and measure the time to the first token of one request."""
    made.warm_up(1, [{}])
    served.wait_captured(limit_s=made.left_s)
    made.first_token(count)


def load_section(run: Run, served: Served, load: tuple[str, int, list[dict[str, Any]]], repeats: int) -> None:
    """Measure a load: warm up, wait for its captures, and decode. load: its label, streams, and fields of requests."""
    label, streams, extras = load
    made = run.made

    def work() -> None:
        made.warm_up(streams, extras)
        served.wait_captured(limit_s=made.left_s)
        for _ in range(repeats):
            if made.left_s:
                made.decode(label, streams, extras)
            else:
                made.is_cut = True
        if label != "plain":
            made.share(label, streams)

    run.section(f"{label}_{streams}", work)


def load_adapters(served: Served, made: Measured, adapters: dict[str, Path]) -> None:
    """Load adapters by name. Raises RuntimeError if one is refused, TimeoutExpired beyond the section's time."""
    for name, folder in adapters.items():
        loaded = served.mstarctl("lora", "load", f"{name}={folder}", limit_s=max(1.0, made.left_s))
        if loaded.returncode:
            raise RuntimeError(loaded.stderr)


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
    parser.add_argument("--section-s", type=float, default=60.0, help="longest time of a section")
    parser.add_argument("--commit", help="commit of the source, for a tree without history")
    options = parser.parse_args()
    if options.adapters:
        options.set = [*options.set, f"lora.max_adapters={options.adapters}"]
    return options


if __name__ == "__main__":
    sys.exit(main())
