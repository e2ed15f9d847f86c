"""Host time of constrained sequences in a decode step: masks, ids taken, and the device's wait between two steps.

Run from the repository root: `python -m bench.constrained_step [--streams 64] [--steps 60] [--out FILE]`. The
vocabulary has as many ids as Qwen3's; its tokens are the most common pieces of words of Python's standard library. An
engine on the CPU with fixed-shape steps stands for a GPU: its module does nothing and notes when its layers are
entered. Per grammar:

- `masks`, `take`: wall time of the masks of all streams, and of letting matchers take their ids; `masks_cpu`: CPU time
  of the masks in all threads, which a host with more cores divides.
- `device_waits`: from the arrival of a step's ids until the layers of the next step are launched. A GPU idles for so
  long in each step. Masks that are computed before that launch are part of it. `device_waits_cpu`: CPU time of all
  threads in that span, which other load on the machine does not lengthen.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from bench.engine_step import SPEC
from bench.families.words import common_pieces
from bench.gpu_llm import CONSTRAINTS, RECORDS
from bench.serving.figures import Figures, head, write
from mstar_core.constraints.answers import of_answer
from mstar_core.constraints.content import ContentForm, JsonText, WrittenText
from mstar_core.constraints.matcher import Grammars
from mstar_core.constraints.vocabulary import TokenTable
from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.kv_view import KVView
from mstar_core.plugin.chat.format import ChatFormat

VOCAB: Final = 151_936
WORDS: Final = 151_643
"""Ids that are text; the next one ends an answer."""

FORMS: Final[dict[str, ContentForm]] = {
    "schema": JsonText(schema=RECORDS),
    "regex": WrittenText(form="regex", text=CONSTRAINTS["regex"]["regex"]),
    "object": JsonText(schema={"type": "object"}),
}


class Still(nn.Module):
    """A module that computes nothing. entered: wall and CPU seconds at which its layers were entered last."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = (0.0, 0.0)
        self._scores = -torch.log(torch.arange(1, VOCAB + 1, dtype=torch.float32))
        self._draws = 0

    def forward(self, *, kv: KVView, positions: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        self.entered = now()
        return {"hidden": tokens}

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits by which common ids are likely, of another order in each step and sequence."""
        self._draws += 1
        rows = [torch.roll(self._scores, 977 * self._draws + 6133 * row) for row in range(len(hidden))]
        return torch.stack(rows)


def now() -> tuple[float, float]:
    """Return wall and CPU seconds."""
    return time.perf_counter(), time.process_time()


def vocabulary() -> TokenTable:
    """Return the pieces of words that are most common in the standard library, with and without a space before them."""
    chosen = [piece.encode() for piece in common_pieces()]
    singles = [bytes([value]) for value in range(256)]
    known = frozenset(singles)
    tokens = [*singles, *(text for text in chosen if text not in known)][:WORDS]
    tokens += [f"filler{number}".encode() for number in range(WORDS - len(tokens))]
    return TokenTable([*tokens, b"<|end|>"], special=[WORDS], ends=[WORDS])


def measure_parts(grammars: Grammars, form: ContentForm, streams: int, steps: int, figures: Figures, name: str) -> None:
    """Measure masks and taken ids of so many streams, apart from an engine."""
    constraint = of_answer(ChatFormat(), content=form)
    compiled = [grammars.compile(constraint) for _ in range(streams)]
    matchers = [grammar.matcher() for grammar in compiled]
    generator = np.random.default_rng(0)
    spent: dict[str, list[float]] = {"masks": [], "masks_cpu": [], "take": []}
    for _ in range(steps):
        started, cpu = time.perf_counter(), time.process_time()
        masks = grammars.masks(matchers)
        spent["masks"].append(time.perf_counter() - started)
        spent["masks_cpu"].append(time.process_time() - cpu)
        ids = [_drawn(mask, generator) for mask in masks]
        started = time.perf_counter()
        failed = grammars.advance(matchers, ids)
        spent["take"].append(time.perf_counter() - started)
        assert not failed, "an id of the mask is taken"
        matchers = [
            grammar.matcher() if drawn == WORDS else matcher
            for grammar, matcher, drawn in zip(compiled, matchers, ids, strict=True)
        ]
    for part, values in spent.items():
        figures.add(f"{name}_{part}", [1e6 * value for value in values], "us")


def _drawn(mask: np.ndarray, generator: np.random.Generator) -> int:
    """Return an allowed id; common ids are likelier."""
    allowed = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]
    return int(allowed[min(int(generator.zipf(1.2)) - 1, len(allowed) - 1)])


def measure_steps(grammars: Grammars, form: ContentForm, streams: int, steps: int, figures: Figures, name: str) -> None:
    """Measure the time from the arrival of each step's ids until the next layers are launched."""
    module, length = Still(), 2 * steps + 16
    settings = KVSettings(
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_pages=streams * (length // 16 + 2),
        page_size=16,
        max_slots=streams,
        max_seq_len=length + 32,
        vocab=VOCAB,
        token_budget=4096,
        lookahead=1,
        prefix_cache=False,
        graphs=CaptureSizes(decode=(streams,)),
        grammars=grammars,
    )
    engine = KVCacheEngine(SPEC, module, settings)
    constraint = of_answer(ChatFormat(), content=form)
    grammars.compile(constraint).matcher()
    for handle in range(streams):
        engine.open(Handle(handle), SamplingParams(constraint=constraint, temperature=0.0), length)
        engine.submit(Job(key=JobKey(2 * handle), handle=Handle(handle), inputs={"tokens": torch.tensor([1, 2, 3])}))
        loop = LoopSpec(max_iters=length, carry={"token": "token"}, stop_port="token", stop_ids=(VOCAB + 1,))
        engine.submit(Job(key=JobKey(2 * handle + 1), handle=Handle(handle), loop=loop))
    measured = 0
    while measured < steps:
        running = engine.launch()
        assert running is not None
        wall, cpu = now()
        result = engine.collect(running)
        if result.loop is None or len(result.loop.keys) < streams:
            engine.idle()  # the masking step is captured before it is measured
            continue
        running = engine.launch()
        assert running is not None
        figures.add(f"{name}_device_waits", [1e6 * (module.entered[0] - wall)], "us")
        figures.add(f"{name}_device_waits_cpu", [1e6 * (module.entered[1] - cpu)], "us")
        measured += 1
        engine.collect(running)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=[*FORMS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begun, figures, table = head(), Figures(), vocabulary()
    grammars = Grammars(lambda: table, VOCAB)
    grammars.prepare()
    for name in options.forms:
        measure_parts(grammars, FORMS[name], options.streams, options.steps, figures, name)
        measure_steps(grammars, FORMS[name], options.streams, options.steps // 2, figures, name)
    report: dict[str, Any] = {
        **begun,
        "streams": options.streams,
        "cores": os.cpu_count(),
        "metrics": figures.summary(),
    }
    if options.out:
        write(report, dict(figures.samples), options.out)
    print(json.dumps(report["metrics"], indent=1))


if __name__ == "__main__":
    main()
