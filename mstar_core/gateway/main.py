"""Main of the gateway's keeper: takes the lock, binds both sockets, runs the keeper, writes the outcome."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from mstar_core.admin.access import bind_admin
from mstar_core.errors import ExitCode, MstarError
from mstar_core.gateway.process.keeper import GatewayKeeper
from mstar_core.gateway.process.spec import GatewaySpec
from mstar_core.host.ports import bind_port
from mstar_core.host.private_files import write_private
from mstar_core.host.run_dir import RunDirectory
from mstar_core.process.logs import start_logging
from mstar_core.process.system import raise_descriptor_limit

LOG: Final = "gateway.log"
OUTCOME: Final = "outcome.json"

log = logging.getLogger("mstar.gateway")


def main(argv: list[str] | None = None) -> None:
    """Run `python -m mstar_core.gateway SPEC` and exit with the gateway's code.

    SPEC: the file that `mstarctl serve` wrote for this start; removed once read.
    """
    parser = argparse.ArgumentParser(prog="mstar_core.gateway")
    parser.add_argument("spec", type=Path)
    args = parser.parse_args(argv)
    spec = GatewaySpec.load(args.spec)
    args.spec.unlink(missing_ok=True)
    start_logging("keeper", spec.log_level)
    code, error = _kept(spec, RunDirectory(Path(spec.run_dir)))
    record: dict[str, Any] = {
        "name": spec.name,
        "model": "gateway",
        "host": spec.serve.host,
        "port": spec.serve.port,
        "config": spec.serve.path,
        "exit_code": int(code),
        "reason": "" if error is None else error.title,
        "ended_at": round(time.time(), 3),
        "cause": None
        if error is None
        else {"name": "gateway", "message": error.title, "detail": error.detail, "hint": error.hint},
    }
    (Path(spec.log_dir) / OUTCOME).write_text(json.dumps(record, indent=1))
    sys.exit(int(code))


def _kept(spec: GatewaySpec, run: RunDirectory) -> tuple[ExitCode, MstarError | None]:
    """Run the gateway. Returns its exit code, and the error if it could not start."""
    try:
        lock = run.acquire()
    except MstarError as error:
        return error.exit_code, error
    try:
        raise_descriptor_limit()
        run.clean()
        write_private(run.spec, spec.encode())
        with (
            bind_port(spec.serve.host, spec.serve.port) as listener,
            bind_admin(run.admin_socket) as admin,
            (Path(spec.log_dir) / LOG).open("ab") as log_file,
        ):
            listener.listen(1024)
            code = GatewayKeeper(spec, listener, admin, log_file).run()
        if code is not ExitCode.DONE:
            return code, MstarError("the gateway did not start", hint=f"its log: {spec.log_dir}/{LOG}")
        return code, None
    except MstarError as error:
        log.error("%s", error)
        return ExitCode.START_FAILED if error.exit_code is ExitCode.INTERNAL else error.exit_code, error
    finally:
        run.remove()
        os.close(lock)
