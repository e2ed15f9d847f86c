"""`plan` and `up` of mstarctl with fake children: `python -m tests.fakes.fleet_up up MODEL -d --name N --port P`.

The budget and devices of a model are in its name: `a-900-0` takes 900 MiB of cpu:0, `b-500-01` of both devices.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

from mstar_core.errors import MstarError
from mstar_core.host.gpu_locks import MemoryClaim
from mstar_core.host.run_dir import RunDirectory
from mstarctl.output.errors import render_error
from tests.fakes.one_rank import one_rank_spec

MIB = 1 << 20
TOTAL = 2048 * MIB


def claims_of(model: str) -> dict[str, MemoryClaim]:
    """Return the claims of a model by key."""
    _, size, devices = model.split("-")
    return {
        f"cpu-{each}": MemoryClaim(device=f"cpu:{each}", need_bytes=int(size) * MIB, total_bytes=TOTAL)
        for each in devices
    }


def plan(model: str) -> dict[str, Any]:
    """Return the item that `mstarctl plan` prints."""
    memory = [
        {"device": c.device, "key": key, "takes_bytes": c.need_bytes, "total_bytes": c.total_bytes}
        for key, c in claims_of(model).items()
    ]
    return {"name": model, "memory": memory}


def up(model: str, name: str, port: int, owner: str) -> None:
    """Start a deployment and wait until it is ready."""
    from mstarctl.start.launch import launch, wait_ready  # `plan` needs none of it

    claims = claims_of(model)
    gpus = {claim.device: key for key, claim in claims.items()}
    spec = one_rank_spec(name, port, gpus=gpus, claims=claims, owner=owner)
    started = launch(spec, RunDirectory.of(name), "tests.fakes.supervisor")
    wait_ready(started, lambda snapshot: None)


def main() -> None:
    """Run one command."""
    verb, model, *words = sys.argv[1:]
    options = dict(itertools.pairwise(words))
    try:
        if verb == "plan":
            print(json.dumps({"items": [plan(model)]}))
        else:
            up(model, options["--name"], int(options["--port"]), options["--owner"])
    except MstarError as error:
        print(render_error(error), file=sys.stderr)
        sys.exit(int(error.exit_code))


if __name__ == "__main__":
    main()
