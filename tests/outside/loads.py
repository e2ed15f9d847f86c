"""Load tests that others wrote, each beside `mstarctl bench` with the same prompts, lengths and clients."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.outside.environment import ROOT, python_environment
from tests.outside.outcomes import Outcome
from tests.outside.servers import tiny_folder

GUIDELLM, AIPERF = "0.8.1", "0.13.0"
REQUESTS: Final = 40
CLIENTS: Final = 2
TOKENS: Final = 64
TOLERANCE: Final = 0.1
"""Largest difference from `mstarctl bench`, which runs before and after: its two runs span what is accepted."""

LIMIT_S: Final = 600
TOPICS: Final = (
    "the sea",
    "a red house",
    "two friends",
    "the city at night",
    "a long road",
    "snow",
    "old books",
    "bread",
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one load test. requests: successful ones; rate: tokens per second; the others: medians in ms."""

    requests: float
    tokens: float
    rate: float
    latency_ms: float
    token_ms: float
    first_ms: float


Measure = Callable[[str, str, Path, Path], Figures]
"""Measures a server: its address, the model's name, the folder of its tokenizer, and a folder for results."""


def compared(measure: Measure) -> Callable[[str, str], list[Outcome]]:
    """Return a suite that runs a load test between two runs of `mstarctl bench` against the same server."""

    def run(url: str, name: str) -> list[Outcome]:
        tokenizer = tiny_folder()
        with tempfile.TemporaryDirectory() as scratch:
            folders = [Path(scratch) / part for part in ("warm", "before", "other", "after")]
            for folder in folders:
                folder.mkdir()
            bench(url, name, tokenizer, folders[0])  # the first requests of a deployment are slower
            before = bench(url, name, tokenizer, folders[1])
            other = measure(url, name, tokenizer, folders[2])
            after = bench(url, name, tokenizer, folders[3])
        return outcomes(before, other, after)

    return run


def outcomes(before: Figures, other: Figures, after: Figures) -> list[Outcome]:
    """Return an outcome for each figure."""
    found = []
    for field, title in (
        ("requests", "successful requests"),
        ("tokens", "tokens of an answer"),
        ("rate", "tokens per second"),
        ("latency_ms", "latency in ms"),
        ("token_ms", "time of a token in ms"),
        ("first_ms", "time to the first token in ms"),
    ):
        own, theirs = (getattr(before, field), getattr(after, field)), getattr(other, field)
        is_equal = min(own) * (1 - TOLERANCE) <= theirs <= max(own) * (1 + TOLERANCE)
        message = f"{theirs:.1f}; mstarctl bench: {own[0]:.1f} before and {own[1]:.1f} after"
        found.append(Outcome(title, "passed" if is_equal else "failed", message))
    return found


def prompts() -> list[str]:
    """Return the prompts, each another text of about the same length."""
    return [f"Number {number}: tell me about {TOPICS[number % len(TOPICS)]}." for number in range(REQUESTS)]


def bench(url: str, name: str, tokenizer: Path, folder: Path) -> Figures:
    """Measure with `mstarctl bench` over the same route as the others."""
    params = {"max_output_tokens": TOKENS, "ignore_eos": True}
    workload = folder / "prompts.jsonl"
    workload.write_text("".join(json.dumps({"text": text, "params": params}) + "\n" for text in prompts()))
    options = ("--protocol", "openai", "--workload", str(workload), "--concurrency", str(CLIENTS))
    length = ("--requests", str(REQUESTS), "--warmup", "4", "--allow-few", "--plain", "-o", "json")
    command = [sys.executable, "-m", "mstarctl", "bench", "run", "--url", url, *options, *length]
    facts = json.loads(_run([*command, "--out", str(folder / "result")], ROOT))
    metrics: Mapping[str, Any] = facts["metrics"]
    return Figures(
        requests=metrics["latency"]["n"],
        tokens=metrics["tokens"]["p50"],
        rate=metrics["text_rate"]["value"],
        latency_ms=metrics["latency"]["p50"],
        token_ms=metrics["tpot"]["p50"],
        first_ms=metrics["ttft"]["p50"],
    )


def guidellm(url: str, name: str, tokenizer: Path, folder: Path) -> Figures:
    """Measure with `guidellm run`."""
    environment = python_environment("guidellm", (f"guidellm=={GUIDELLM}",))
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text, "output_tokens_count": TOKENS}) + "\n" for text in prompts()))
    options = {
        "--backend": f"kind=openai_http,target={url},model={name}",
        "--profile": f"kind=concurrent,streams={CLIENTS}",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--tokenizer": f"kind=huggingface_auto,model={tokenizer}",
        "--data": f"kind=json_file,path={data}",
        "--output": f"kind=json,path={folder / 'result.json'}",
    }
    command = [environment.program("guidellm"), "run", "--disable-console"]
    _run([*command, *(part for option in options.items() for part in option)], folder)
    (result,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    metrics = result["metrics"]

    def median(field: str) -> float:
        return float(metrics[field]["successful"]["median"])

    return Figures(
        requests=metrics["request_totals"]["successful"],
        tokens=median("output_token_count"),
        rate=metrics["output_tokens_per_second"]["successful"]["mean"],
        latency_ms=median("request_latency") * 1000,
        token_ms=median("inter_token_latency_ms"),
        first_ms=median("time_to_first_token_ms"),
    )


def aiperf(url: str, name: str, tokenizer: Path, folder: Path) -> Figures:
    """Measure with `aiperf profile`."""
    environment = python_environment("aiperf", (f"aiperf=={AIPERF}",))
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"text": text, "output_length": TOKENS}) + "\n" for text in prompts()))
    options = {
        "--model": name,
        "--url": url,
        "--endpoint-type": "chat",
        "--input-file": str(data),
        "--custom-dataset-type": "single_turn",
        "--extra-inputs": "ignore_eos:true",
        "--tokenizer": str(tokenizer),
        "--concurrency": str(CLIENTS),
        "--request-count": str(REQUESTS),
        "--warmup-request-count": "4",
        "--artifact-dir": str(folder),
        "--ui": "none",
    }
    command = [environment.program("aiperf"), "profile", "--streaming", "--use-server-token-count"]
    _run([*command, *(part for option in options.items() for part in option)], folder)
    result = json.loads((folder / "profile_export_aiperf.json").read_text())
    return Figures(
        requests=result["request_count"]["avg"],
        tokens=result["output_sequence_length"]["p50"],
        rate=result["output_token_throughput"]["avg"],
        latency_ms=result["request_latency"]["p50"],
        token_ms=result["inter_token_latency"]["p50"],
        first_ms=result["time_to_first_token"]["p50"],
    )


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout
