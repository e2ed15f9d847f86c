"""Command lines of trainings: what every stage and every export takes."""

from __future__ import annotations

import argparse
from pathlib import Path


def stage_options(about: str | None, *, seconds: float, batch: int, rate: float) -> argparse.ArgumentParser:
    """Return the parser of a stage with the given defaults. rate: the learning rate."""
    parser = _parser(about)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--steps", type=int, help="end by steps instead")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--rate", type=float, default=rate)
    parser.add_argument("--report", type=int, default=20, help="steps between lines of the log")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def export_options(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of an export, whose arguments are OUT, the folder of the training, and the new FOLDER."""
    parser = _parser(about)
    parser.add_argument("folder", type=Path)
    return parser


def _parser(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    return parser
