"""All GPU checks in one call: tests, sanitizer, benchmarks of parts, server. Writes a log and a result per step.

Run from the repository root on a machine with a GPU: `python bench/gpu_all.py OUT [STEP ...]`. Steps run in the given
order, each within its limit; a failed step does not stop the others. The checkpoint is written once, outside of OUT.
`--tree FOLDER` adds the steps of another tree of sources, such as a branch: its kernel tests, its decode step, and the
whole server in turn with this tree's. Prints one line per step. The exit code is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TAIL: Final = 1500
"""Characters of a failed step's log that are printed."""

SERVER: Final = ("bench/gpu_server.py", "--folder", "{weights}", "--open", "", "--burst", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One program. words: its arguments after the interpreter; {out}, {weights} and {tree} are replaced.

    limit_s: time limit. is_other: run the program of the other tree.
    """

    words: Sequence[str]
    limit_s: float
    is_other: bool = False

    def run(self, name: str, out: Path, weights: Path, tree: Path = ROOT) -> tuple[bool, float]:
        """Run the program with its output in OUT/NAME.log. Return whether it succeeded, and its seconds."""
        started, home = time.monotonic(), tree if self.is_other else ROOT
        words = [word.format(out=out / f"{name}.json", weights=weights, tree=tree) for word in self.words]
        with (out / f"{name}.log").open("wb") as log:
            try:
                done = subprocess.run(
                    [sys.executable, *words],
                    cwd=home,
                    env=environment(home),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=self.limit_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                log.write(f"\nended after {self.limit_s:g} s\n".encode())
                return False, time.monotonic() - started
        return done.returncode == 0, time.monotonic() - started


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of a program of this tree, whose sources come first on the path."""
    paths = [tree, *sorted(tree.glob("plugins/*/src")), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def steps() -> dict[str, Step]:
    """Return every step by name, in the default order."""
    loads = ("--closed", "1:20,8:4,32:3,64:3", "--open", "32:30", "--burst", "32:3")
    compared = ("--closed", "1:6,32:2,64:2", "--out", "{out}", "--compare")
    crowded = ("--closed", "32:2,64:3", "--open", "32:20", "--burst", "32:2", "--out", "{out}", "--compare")
    return {
        "tests": Step(words=("scripts/gpu_tests.py", "--limit", "390"), limit_s=400),
        "server": Step(words=(*SERVER[:3], *loads, "--out", "{out}"), limit_s=300),
        "fp8": Step(words=(*SERVER, *compared, "quantization=fp8"), limit_s=200),
        "head": Step(words=(*SERVER, *compared, "model_kwargs.restrict_vocabulary=true"), limit_s=200),
        "budget": Step(words=(*SERVER[:3], *crowded, "token_budget=512"), limit_s=240),
        "storm": Step(
            words=(*SERVER, "--closed", "", "--storm", "10000:64", "--storm-ids", "40", "--out", "{out}"), limit_s=240
        ),
        "sanitize": Step(words=("scripts/sanitize.py", "--limit", "320"), limit_s=330),
        "linear": Step(words=("bench/gpu_linear.py", "--out", "{out}"), limit_s=150),
        "talker": Step(words=("bench/gpu_talker.py", "--out", "{out}"), limit_s=200),
        "moe": Step(words=("bench/gpu_moe.py", "--out", "{out}"), limit_s=120),
        "draw": Step(words=("bench/gpu_draw.py", "--out", "{out}"), limit_s=100),
        "prefill": Step(words=("bench/gpu_prefill.py", "--out", "{out}"), limit_s=150),
        "codec": Step(words=("bench/gpu_codec.py", "--out", "{out}"), limit_s=150),
        "encoders": Step(words=("-m", "bench.gpu_encoders", "--out", "{out}"), limit_s=240),
        "vjepa2": Step(words=("-m", "bench.gpu_vjepa2", "--out", "{out}"), limit_s=240),
        "vjepa2_server": Step(words=("-m", "bench.gpu_vjepa2", "--part", "server", "--out", "{out}"), limit_s=400),
        "pi05": Step(words=("-m", "bench.gpu_pi05", "--part", "engines", "--out", "{out}"), limit_s=240),
        "pi05_server": Step(words=("-m", "bench.gpu_pi05", "--part", "server", "--out", "{out}"), limit_s=400),
        "bagel": Step(words=("-m", "bench.gpu_bagel", "--out", "{out}"), limit_s=590),
        "qwen3omni": Step(words=("-m", "bench.gpu_qwen3omni", "--out", "{out}"), limit_s=590),
        "start": Step(words=("-m", "bench.gpu_start", "--out", "{out}"), limit_s=240),
    }


def tree_steps() -> dict[str, Step]:
    """Return the steps of another tree; comparisons alternate between the trees."""
    tests = ("tests/gpu", "-k", "kernels or decode or advance or nucleus or engine or prefill")
    step = ("bench/gpu_orpheus.py", "--steps", "200", "--out", "{out}")
    loads = ("--closed", "1:8,32:2,64:3", "--compare-tree", "{tree}", "--out", "{out}")
    return {
        "tree_tests": Step(
            words=("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *tests), limit_s=240, is_other=True
        ),
        "own_step": Step(words=step, limit_s=120),
        "tree_step": Step(words=step, limit_s=120, is_other=True),
        "tree_server": Step(words=(*SERVER, *loads), limit_s=240),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected steps."""
    known = {**steps(), **tree_steps()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("step", nargs="*", choices=[*known, []], help="default: all, in this order")
    parser.add_argument("--tree", type=Path, help="folder with the sources of another tree")
    parser.add_argument("--weights", type=Path, help="folder of the server steps' checkpoint; written if missing")
    options = parser.parse_args(arguments)
    chosen = options.step or [*steps(), *(tree_steps() if options.tree else ())]
    if options.tree is None and (lacking := [name for name in chosen if name in tree_steps()]):
        parser.error(f"{', '.join(lacking)}: name the other tree with --tree")
    options.out.mkdir(parents=True, exist_ok=True)
    weights = options.weights or Path(tempfile.gettempdir()) / "mstar-gpu-weights" / "orpheus"
    tree = options.tree.resolve() if options.tree else ROOT
    failed = False
    for name in chosen:
        is_good, seconds = known[name].run(name, options.out.resolve(), weights, tree)
        failed |= not is_good
        print(f"{'ok    ' if is_good else 'FAILED'} {name:11} {seconds:6.1f} s", flush=True)
        if not is_good:
            print((options.out / f"{name}.log").read_text(errors="replace")[-TAIL:], flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
