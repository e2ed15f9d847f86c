"""Options of a run from the words of a command line, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import UsageError, did_you_mean
from mstarctl.bench.client.protocols import PROTOCOLS
from mstarctl.bench.load.arrivals import Arrivals
from mstarctl.bench.load.datasets import dataset_workload
from mstarctl.bench.load.plan import WARM_UP_REQUESTS, Load
from mstarctl.bench.load.workloads import Workload, with_params, workload_of
from mstarctl.bench.measure.load_metrics import Measures
from mstarctl.bench.measure.terms import parse_terms
from mstarctl.bench.measure.tokens import TokenCounter, token_counter
from mstarctl.bench.run import RunOptions
from mstarctl.bench.target import BenchTarget, offered_workloads
from mstarctl.call.ask import parse_params
from mstarctl.output.durations import parse_duration

DEFAULT_SPAN_S: Final = 30.0
WARM_UP_S: Final = 10.0
"""Without --warmup, the warm-up sends no request after this time, so that slow models are measured soon."""

RESULTS: Final = "bench-results"


def checked(words: Mapping[str, Any]) -> None:
    """Check what needs no server: terms, durations, and that the options fit together. Raises UsageError."""
    parse_terms(words["slo"] or "", "--slo", is_goal=True)
    parse_terms(words["asserts"] or "", "--assert", is_goal=False)
    parse_params(words.get("params") or ())
    if words["protocol"] not in PROTOCOLS:
        raise UsageError(f"--protocol is {words['protocol']!r}", hint=did_you_mean(words["protocol"], PROTOCOLS))
    load_of(words)


def load_of(words: Mapping[str, Any], **changes: Any) -> Load:
    """Return the load of the words. Raises UsageError if none or several are given."""
    loads = [name for name in ("rate", "concurrency", "trace") if words[name] is not None]
    if len(loads) != 1 and not changes:
        raise UsageError(
            "give one load" if not loads else f"--{loads[0]} and --{loads[1]} exclude each other",
            hint="--rate 4 (open), --concurrency 8 (closed), or --trace FILE",
        )
    span_s = None if words["duration"] is None else parse_duration(words["duration"], "--duration")
    if span_s is None and words["requests"] is None and words["trace"] is None:
        span_s = DEFAULT_SPAN_S
    if span_s is not None and words["requests"] is not None:
        raise UsageError("--requests and --duration exclude each other", hint="omit one of them")
    cancels = _cancels(words["cancel_rate"])
    warm_up, warm_up_s = (WARM_UP_REQUESTS, WARM_UP_S) if words["warmup"] is None else (words["warmup"], 0.0)
    load = Load(
        rate=_rate(words["rate"]),
        arrivals=words["arrivals"],
        concurrency=_clients(words["concurrency"]),
        is_trace=words["trace"] is not None,
        speed=words["speed"],
        requests=words["requests"],
        span_s=span_s,
        warm_up=warm_up,
        warm_up_s=warm_up_s,
        ramp_s=_seconds(words, "ramp"),
        think_s=_seconds(words, "think"),
        period_s=_seconds(words, "period"),
        seed=words["seed"],
        cancel_share=cancels[0],
        cancel_after_s=cancels[1],
    )
    load = replace(load, **changes)
    if load.rate is not None:
        Arrivals.parse(load.arrivals, load.rate)
    if load.concurrency is None and (load.period_s or load.think_s):
        raise UsageError("--think and --period need --concurrency", hint="add --concurrency 1")
    if load.concurrency is not None and load.ramp_s:
        raise UsageError("--ramp needs --rate", hint="omit --ramp")
    if load.is_trace and load.speed <= 0:
        raise UsageError(f"--speed is {load.speed:g}", hint="it must be above 0")
    if load.period_s and load.span_s is None:
        raise UsageError("--period needs --duration", hint="--duration 30s")
    return load


def _rate(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UsageError(
            f"--rate is {text!r}", hint="requests per second, such as 4; `bench sweep` takes lists"
        ) from None


def _clients(text: str | None) -> int | None:
    try:
        clients = None if text is None else int(text)
    except ValueError:
        raise UsageError(f"--concurrency is {text!r}", hint="a number of clients; `bench sweep` takes lists") from None
    if clients is not None and clients < 1:
        raise UsageError(f"--concurrency is {clients}", hint="at least 1")
    return clients


def _seconds(words: Mapping[str, Any], name: str) -> float:
    return 0.0 if words[name] is None else parse_duration(words[name], f"--{name}")


def _cancels(text: str | None) -> tuple[float, float]:
    """Parse `5%:1s`: this share of requests disconnects after this time."""
    if text is None:
        return 0.0, 0.0
    share, colon, after = text.partition(":")
    try:
        fraction = float(share.rstrip("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        fraction = -1.0
    if not colon or not 0 < fraction <= 1:
        raise UsageError(f"--cancel-rate is {text!r}", hint="--cancel-rate 5%:1s")
    return fraction, parse_duration(after, "--cancel-rate")


def workload_for(words: Mapping[str, Any], target: BenchTarget) -> Workload:
    """Return the workload of the words for a target. Raises NotFound with the nearest name, ConfigError."""
    if words["trace"] is not None:
        name = str(words["trace"])
        return workload_of(name if name.endswith((".jsonl", ".ndjson")) else f"{name}.jsonl", ())
    offered = offered_workloads(target.card, target.model)
    if words.get("dataset") is not None:
        if words["workload"] is not None:
            raise UsageError("--workload and --dataset exclude each other", hint="omit one of them")
        return dataset_workload(words["dataset"], offered, _counter(words))
    name = words["workload"] or offered[0].name
    return workload_of(name, offered)


def _counter(words: Mapping[str, Any]) -> TokenCounter | None:
    return token_counter(Path(words["tokenizer"])) if words.get("tokenizer") else None


def run_options(words: Mapping[str, Any], target: BenchTarget, *, out: Path | None = None, **load: Any) -> RunOptions:
    """Return the options of one run. load: fields that replace those of the words. Raises UsageError, NotFound."""
    if target.is_adapter and words["protocol"] == "generate":
        raise UsageError(f"{target.card.name} is an adapter, which /generate does not choose", hint="--protocol openai")
    drawn = load_of(words, **load)
    workload = with_params(workload_for(words, target), parse_params(words.get("params") or ()))
    processes = min(words["processes"], drawn.concurrency or words["processes"])
    return RunOptions(
        load=drawn,
        workload=workload,
        out=out or out_of(words, target, workload),
        slo=words["slo"] or "",
        measures=Measures(
            is_late=drawn.is_open or drawn.period_s > 0,
            deadline_s=_seconds(words, "deadline"),
            buffer_s=_seconds(words, "play_buffer") if words.get("play_buffer") else 0.0,
        ),
        goals=tuple(parse_terms(words["slo"] or "", "--slo", is_goal=True)),
        asserts=tuple(parse_terms(words["asserts"] or "", "--assert", is_goal=False)),
        allows_few=words["allow_few"],
        timeout_s=_seconds(words, "timeout"),
        grace_s=_seconds(words, "grace"),
        processes=processes,
        protocol=words["protocol"],
        is_checked=words["check"],
        max_in_flight=words["max_in_flight"],
        label=words["label"] or "",
        fails_fast=words["fail_fast"],
        keeps_outputs=words["keep_outputs"],
        expects_restarts=words["expect_restarts"],
        count_tokens=_counter(words),
    )


def out_of(words: Mapping[str, Any], target: BenchTarget, workload: Workload) -> Path:
    """Return --out, or a new folder below `bench-results`."""
    if words["out"] is not None:
        return Path(words["out"])
    when = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    parts = [target.name or "server", workload.name.removesuffix(".jsonl"), words["label"] or "", when]
    return Path(RESULTS) / "-".join(part for part in parts if part).replace("/", "_")
