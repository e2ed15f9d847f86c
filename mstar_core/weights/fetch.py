"""Process that prepares the checkpoint before any worker starts: it finds, generates or downloads the weights.

It writes the folder's path to the run directory and exits, so that the workers of all ranks read one complete folder.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.config.files.load import VARIANTS
from mstar_core.errors import WeightsError
from mstar_core.host.cache_dir import cache_root
from mstar_core.host.private_files import write_private
from mstar_core.messages.names import weights_name
from mstar_core.plugin.loader import served_model
from mstar_core.plugin.spec import ModelSpec
from mstar_core.process.life import ChildLife, start_child
from mstar_core.process.sockets import ChildSockets
from mstar_core.targets import load_target
from mstar_core.weights.fingerprint import fingerprint

log = logging.getLogger(__name__)

NAME: Final = "weights"
RESULT: Final = "weights.folder"
FINGERPRINT: Final = "weights.fingerprint"
REPORT_S: Final = 0.1


def checkpoint_folder(spec: DeploymentSpec, model: ModelSpec, progress: Callable[[int, int, str], None]) -> Path:
    """Return the folder with the deployment's weights. Raises WeightsError with what is missing and what to try."""
    if spec.weights_source in VARIANTS:
        target = model.embedded(spec.weights_source)
        if target is None:
            raise WeightsError(f"{model.name} has no embedded checkpoint", hint="use --weights DIR", phase="weights")
        return Path(load_target(target)(cache_root(spec.cache_dir) / spec.weights_source / model.name))
    if model.resolve is None:
        if spec.folder is None:
            raise WeightsError(
                f"{model.name} needs a folder with its weights", hint="use --weights DIR", phase="weights"
            )
        return Path(spec.folder)
    folder = Path(spec.folder) if spec.folder else None
    cache = Path(spec.cache_dir) if spec.cache_dir else None
    return Path(load_target(model.resolve)(folder, cache, progress))


class _DownloadProgress:
    """Reports download progress to the supervisor, at most ten times a second."""

    def __init__(self, life: ChildLife) -> None:
        self._life = life
        self._next = 0.0

    def __call__(self, done: int, total: int, file: str) -> None:
        now = time.monotonic()
        if now >= self._next or done >= total:
            self._next = now + REPORT_S
            self._life.phase("fetch", done=done, total=total, detail=file)


def main(argv: list[str] | None = None) -> None:
    """Entry point: `python -m mstar_core.weights.fetch SPEC --incarnation N --supervisor ENDPOINT`."""
    arguments = start_child(NAME, argv)
    spec = arguments.spec
    arguments = arguments._replace(name=weights_name(spec.on_host))
    with ChildSockets(arguments) as sockets:
        life = sockets.life
        with life.guarded():
            life.phase("fetch")
            model = served_model(spec.plugin, spec.model)
            folder = checkpoint_folder(spec, model, _DownloadProgress(life))
            model.bound(folder, spec.model_kwargs)  # fails here for an unreadable checkpoint, before any worker starts
            run_dir = Path(spec.run_dir)
            if spec.hosts:
                write_private(run_dir / FINGERPRINT, fingerprint(folder).encode())
            write_private(run_dir / RESULT, os.fsencode(folder))
            log.info("weights are in %s", folder)
        sockets.close(linger_s=0.5)


if __name__ == "__main__":
    main()
