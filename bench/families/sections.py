"""Sections of a measurement: one that fails says why and the others run; what is known is on disk after each."""

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
    """Owned by one run. report: what is written; each section puts its result there under its own name."""

    report: dict[str, Any]
    figures: Figures
    out: Path | None
    failed: list[str] = field(default_factory=list)

    def run(self, name: str, section: Callable[[], Any]) -> Any:
        """Run a section; None when it failed. Memory that it leaves to nobody is given back to the device."""
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
        """Write what is known."""
        self.report["metrics"] = self.figures.summary()
        if self.out is not None:
            write(self.report, self.figures.samples, self.out)
