"""Sections of a benchmark. A failing section reports its error and the others run; results are saved after each."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.serving.figures import Figures, write


@dataclass(slots=True)
class Sections:
    """Sections of one run. report: the written results, by section name."""

    report: dict[str, Any]
    figures: Figures
    out: Path | None
    failed: list[str] = field(default_factory=list)

    def run(self, name: str, section: Callable[[], Any]) -> Any:
        """Run a section and return its result, or None if it failed. Unreferenced device memory is released."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        start, made, error = time.monotonic(), None, ""
        try:
            made = section()
        except Exception:  # noqa: BLE001 the isolation boundary of a section
            error = traceback.format_exc()
            self.failed.append(name)
            print(error, file=sys.stderr, flush=True)
        done: dict[str, Any] = {"took_s": round(time.monotonic() - start, 2)}
        done |= {"error": error} if error else {"result": made} if made is not None else {}
        self.report.setdefault("sections", {})[name] = done
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.save()
        return made

    def save(self) -> None:
        """Write the report."""
        self.report["metrics"] = self.figures.summary()
        if self.out is not None:
            write(self.report, self.figures.samples, self.out)
