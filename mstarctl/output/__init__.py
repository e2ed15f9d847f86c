"""Output of commands: data on stdout in the format of -o, narration and errors on stderr."""

from __future__ import annotations

from mstarctl.output.options import FORMATS, GlobalOptions
from mstarctl.output.printer import Printer
from mstarctl.output.table import Column, render_table
from mstarctl.output.units import age_text, duration_text, size_text

__all__ = ["FORMATS", "Column", "GlobalOptions", "Printer", "age_text", "duration_text", "render_table", "size_text"]
