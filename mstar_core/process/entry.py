"""First module of each child process: ties it to its supervisor, then runs the module of the child.

`python -m mstar_core.process.entry SUPERVISOR_PID MODULE ARGUMENT...`. The imports of a child take seconds. A
supervisor that is killed meanwhile must take its children along, so this module imports next to nothing.
"""

from __future__ import annotations

import gc
import runpy
import sys

from mstar_core.process.system import prepare_process


def main() -> None:
    """Prepare this process, and run the module as `python -m` does."""
    _, parent, module, *arguments = sys.argv
    prepare_process(int(parent))
    gc.disable()  # until `end_imports`: imports make little garbage, and collections took an eighth of a worker's
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
