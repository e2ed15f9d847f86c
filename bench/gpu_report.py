"""Markdown tables of the reports of `bench/gpu_server.py`. Usage: `python bench/gpu_report.py FILE...`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.serving.tables import tables


def main() -> None:
    """Print the tables of each file under its name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        print(f"## {path.name}\n\n{tables(json.loads(path.read_text()))}\n")


if __name__ == "__main__":
    main()
