"""Programs of requests that only read their prompt, so that its pages are cached before the whole prompt is known."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from mstar_core.plugin.program import Fork, ProgramGenerator, Receive


def reading_only(program: ProgramGenerator, generates: Callable[[str], bool]) -> ProgramGenerator:
    """Yield what a program yields, up to its first run that generates or its first wait for input. It draws nothing.

    generates: whether a walk has a loop.
    """
    try:
        wish = next(program)
        while True:
            if isinstance(wish, Receive):
                return
            if isinstance(wish, Fork):
                answer = yield wish
            else:
                runs = wish if isinstance(wish, list) else [wish]
                kept = list(takewhile(lambda run: not generates(run.walk), runs))
                if len(kept) < len(runs):
                    if kept:
                        yield kept
                    return
                answer = yield wish
            wish = program.send(answer)
    except StopIteration:
        return
    finally:
        program.close()
