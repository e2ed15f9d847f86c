"""Cases of a driver program: each prints one JSON line, and none stops the others."""

import asyncio
import inspect
import json
import traceback


def run(cases):
    """Run functions, plain or async, and print the verdict of each by its name."""
    for case in cases:
        try:
            result = case()
            if inspect.isawaitable(result):
                asyncio.run(_waited(result))
            verdict, message = "passed", ""
        except Exception as error:  # noqa: BLE001  isolation boundary: one case
            verdict, message = "failed", f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc()
        print(json.dumps({"test": case.__name__, "verdict": verdict, "message": message}), flush=True)


async def _waited(result):
    await asyncio.wait_for(result, 120)
