"""Options that the benchmarks of a deployment share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_deployment_options(parser: argparse.ArgumentParser, port: int) -> None:
    """Add settings, device, miniature, port and report file. port: the default."""
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for `mstarctl up`; may be repeated")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the miniatures in place of the official shapes")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--out", type=Path, help="report file")
