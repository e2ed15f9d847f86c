"""Common parts of alternating measurements of source trees (`trees`): command line, medians by figure, report file."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Final

from bench.serving.figures import ROOT, head, median, summary
from bench.serving.trees import Tree

RESULTS: Final = ROOT / "bench" / "results" / "api"

Windows = list[dict[str, Any]]
"""Results of each window, with the name of its tree."""


def parser_of(text: str | None, requests: int) -> argparse.ArgumentParser:
    """Return the parser of the command line. requests: default number per window."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another source tree, measured in turn with this one")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--requests", type=int, default=requests, help="requests of a window; each round has one per tree"
    )
    parser.add_argument("--save", metavar="NAME", help=f"also write it to {RESULTS.relative_to(ROOT)}/NAME.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


def measured(options: argparse.Namespace, script: str, kinds: list[str]) -> tuple[dict[str, Windows], dict[str, Any]]:
    """Measure windows by kind with alternating trees. Return them with the head of a report."""
    load = os.getloadavg()[0]
    folders = (("before", options.against), ("now", ROOT))
    trees = [Tree(name, folder, script) for name, folder in folders if folder is not None]
    windows = {kind: [tree.window(kind) for _ in range(options.rounds) for tree in trees] for kind in kinds}
    for tree in trees:
        tree.close()
    report = {
        **head(),
        "before": options.against.name if options.against else None,
        "load_before_and_after": [round(load, 2), round(os.getloadavg()[0], 2)],
    }
    return windows, report


def by_figure(windows: Windows) -> dict[str, dict[str, Any]]:
    """Return each tree's figures over its windows, in milliseconds."""
    found: dict[str, dict[str, Any]] = {}
    for tree in dict.fromkeys(window["tree"] for window in windows):
        mine = [window for window in windows if window["tree"] == tree]
        found[tree] = {name: summary([each[name] for each in mine], "ms") for name in mine[0] if name != "tree"}
    return found


def ratios(windows: Windows) -> dict[str, float]:
    """Return the ratio of this tree to the other, as the median over adjacent windows."""
    before, now = ([found for found in windows if found["tree"] == name] for name in ("before", "now"))
    names = [name for name in now[0] if name != "tree"] if before else []
    pairs = {name: sorted(b[name] / a[name] for a, b in zip(before, now, strict=True)) for name in names}
    return {name: round(median(values), 3) for name, values in pairs.items()}


def keep(report: dict[str, Any], name: str | None) -> None:
    """Print a report, and write it if it has a name."""
    print(json.dumps(report, indent=1))
    if name:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
