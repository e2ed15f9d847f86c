"""Report of the measurements under bench/ beside the stored baseline. It is not a gate.

Run by `make bench`. Each bench/NAME.py prints one JSON object; numbers in it, nested or not, are compared with those of
bench/baseline/NAME.json. --save stores this run as the new baseline.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
BASELINE = BENCH / "baseline"


def main() -> int:
    """Run the measurements. Returns 1 if one did not run; figures never decide."""
    known = sorted(path.stem for path in BENCH.glob("*.py"))
    parser = argparse.ArgumentParser(description="run the measurements and show them beside the stored ones")
    parser.add_argument("names", nargs="*", help=f"measurements to run; default: all ({', '.join(known)})")
    parser.add_argument("--save", action="store_true", help="store this run as the new baseline")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        parser.error(f"no measurement {', '.join(unknown)}; there are {', '.join(known)}")
    failed = [name for name in arguments.names or known if not report(name, arguments.save)]
    if failed:
        print(f"did not run: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def report(name: str, is_saving: bool) -> bool:
    """Run one measurement and print its table. Returns False if it failed; its message is then on stderr."""
    print(f"{name}", flush=True)
    result = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py")], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode != 0:
        return False
    stored = BASELINE / f"{name}.json"
    before = dict(numbers(json.loads(stored.read_text(encoding="utf-8")))) if stored.is_file() else {}
    for key, value in numbers(json.loads(result.stdout)):
        print(f"  {key:<52} {value:>14,.6g} {change(value, before.get(key)):>10}")
    if is_saving:
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(result.stdout, encoding="utf-8")
    return True


def numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number in a JSON value, with its dotted path."""
    match value:
        case bool() | None | str():
            return
        case int() | float():
            yield key, float(value)
        case dict():
            for name, part in value.items():
                yield from numbers(part, f"{key}.{name}" if key else name)
        case list():
            for index, part in enumerate(value):
                yield from numbers(part, f"{key}[{index}]")


def change(now: float, before: float | None) -> str:
    """Format the relative change from the stored value."""
    return "" if not before else f"{(now - before) / abs(before):+.0%}"


if __name__ == "__main__":
    sys.exit(main())
