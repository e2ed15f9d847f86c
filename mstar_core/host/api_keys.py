"""Files of API keys, one per line, and of TURN secrets. Read by `up`, and again by the supervisor on a reload."""

from __future__ import annotations

from pathlib import Path

import msgspec

from mstar_core.config.resolved import ApiConfig, IceServer
from mstar_core.errors import ConfigError


def read_keys(path: str | Path, option: str) -> tuple[str, ...]:
    """Return the keys of a file. Raises ConfigError if it is unreadable or empty. option: named in the error."""
    key = option.removeprefix("--").replace("-", "_")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read", str(error), key=key) from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{option} {path} contains no key", hint="write one key per line", key=key)
    return keys


def with_keys(api: ApiConfig) -> ApiConfig:
    """Return the configuration with the keys and secrets that its files contain now. Raises ConfigError.

    Keys of the command line stay; those that came from the file before are replaced.
    """
    typed = api.api_keys[: len(api.api_keys) - api.keys_in_file]
    kept = read_keys(api.api_key_file, "--api-key-file") if api.api_key_file is not None else ()
    metrics = read_keys(api.metrics_key_file, "--metrics-key-file") if api.metrics_key_file is not None else ()
    secrets = tuple(_ice_secret(server, index) for index, server in enumerate(api.realtime_ice_servers))
    return msgspec.structs.replace(
        api, api_keys=(*typed, *kept), keys_in_file=len(kept), metrics_keys=metrics, ice_secrets=secrets
    )


def _ice_secret(server: IceServer, index: int) -> str:
    """Return the secret of a TURN server from its file, empty for a server without one. Raises ConfigError."""
    path, word = server.credential_file, "credential_file"
    if path is None:
        path, word = server.secret_file, "secret_file"
    if path is None:
        return ""
    key = f"api.realtime_ice_servers.{index}.{word}"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{word} {path} cannot be read", str(error), key=key) from error
    if len(lines) != 1 or not lines[0].strip():
        raise ConfigError(f"{word} {path} must contain one line", hint="write the secret alone into it", key=key)
    return lines[0].strip()
