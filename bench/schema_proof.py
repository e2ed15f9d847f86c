"""Schema proof: answers of a served random model, held to many JSON schemas, parse and obey them.

Run from the repository root: `python -m bench.schema_proof [--schemas 200] [--seeds 3] [--out FILE]`. It starts
`llm:tiny`, whose text is noise, and asks for an answer of each schema (`bench/families/schemas.py`) with each seed at
temperature 1, with a bias toward quotes and closing brackets so that most answers end. An answer that the limit cuts
off obeys nothing and is only counted. Returns 1 if a schema is refused or an answer that ended does not obey it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bench.families.schemas import Schema, fault, proof_schemas
from bench.serving.deployment import Plan, Served
from bench.serving.figures import head, write

CLOSING: Final = '"}]'
BIAS: Final = 3.0
LIMIT: Final = 600
"""Most ids of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One answer. outcome: `obeys`, `cut`, `refused` or `fault`; detail: of a refusal or fault."""

    schema: str
    seed: int
    outcome: str
    ids: int = 0
    detail: str = ""


def bias_of(client: httpx.Client) -> dict[str, float]:
    """Return the `logit_bias` of the served model toward the ends of texts, arrays and objects."""
    ids = [client.post("/tokenize", json={"prompt": letter, "add_special_tokens": False}).json() for letter in CLOSING]
    return {str(each["tokens"][-1]): BIAS for each in ids}


def prove(client: httpx.Client, bias: Mapping[str, float], name: str, schema: Schema, seed: int) -> Proof:
    """Ask for one answer and judge it."""
    answer = client.post(
        "/v1/chat/completions",
        json={
            "model": "llm",
            "messages": [{"role": "user", "content": "Write JSON."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}},
            "reasoning_effort": "none",
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": LIMIT,
            "logit_bias": dict(bias),
        },
    )
    if answer.status_code != httpx.codes.OK:
        return Proof(schema=name, seed=seed, outcome="refused", detail=answer.text[:500])
    body = answer.json()
    choice, ids = body["choices"][0], body["usage"]["completion_tokens"]
    if choice["finish_reason"] == "length":
        return Proof(schema=name, seed=seed, outcome="cut", ids=ids)
    text = choice["message"]["content"]
    found = fault(schema, text)
    detail = f"{found} in {text[:300]}" if found else ""
    return Proof(schema=name, seed=seed, outcome="fault" if found else "obeys", ids=ids, detail=detail)


def prove_all(url: str, schemas: Mapping[str, Schema], seeds: Sequence[int], clients: int = 4) -> list[Proof]:
    """Ask a server for an answer of each schema with each seed, `clients` at a time."""
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(clients) as threads:
        bias = bias_of(client)
        asked = [(name, schema, seed) for name, schema in schemas.items() for seed in seeds]
        return list(threads.map(lambda one: prove(client, bias, *one), asked))


def main() -> int:
    """Run the proof, print its counts and every answer that does not obey."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--port", type=int, default=18127)
    parser.add_argument("--out", type=Path, help="report file")
    options = parser.parse_args()
    scratch, begun = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp")), head()
    plan = Plan(model="llm:tiny", device="cpu", port=options.port, root=scratch)
    try:
        with Served(plan):
            started = time.monotonic()
            made = prove_all(f"http://127.0.0.1:{plan.port}", proof_schemas(options.schemas), range(options.seeds))
            took_s = time.monotonic() - started
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    counts = Counter(each.outcome for each in made)
    bad = [each for each in made if each.outcome in ("refused", "fault")]
    cut = Counter(each.schema for each in made if each.outcome == "cut")
    report: dict[str, Any] = {
        **begun,
        "model": plan.model,
        "schemas": options.schemas,
        "seeds": options.seeds,
        "answers": len(made),
        "outcomes": dict(counts),
        "ids": sum(each.ids for each in made),
        "took_s": round(took_s, 1),
        "always_cut": sorted(name for name, count in cut.items() if count == options.seeds),
        "bad": [f"{each.schema}, seed {each.seed}: {each.outcome}: {each.detail}" for each in bad],
    }
    if options.out:
        write(report, {}, options.out)
    print(
        json.dumps(
            {key: report[key] for key in ("answers", "outcomes", "ids", "took_s", "always_cut", "bad")}, indent=1
        )
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
