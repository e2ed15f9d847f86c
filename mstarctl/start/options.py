"""Options of `mstarctl up`: one record that declares, holds and documents each of them.

`up` takes its signature from UpOptions, so an option is written once. Hidden options are refused by name.
"""

from __future__ import annotations

import enum
import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, get_type_hints

import typer

from mstarctl.complete import config_names, target_names


class Device(enum.StrEnum):
    """Kind of device that ranks compute on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options of one `up`, as typed. None: not given, so the file's value or the default applies."""

    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL[:tiny|:mini]|FILE",
            help="a model (:tiny has random weights, :mini is a trained miniature), or a deployment file",
            autocompletion=target_names,
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option("--config", help="a deployment file; with MODEL, both must agree", autocompletion=config_names),
    ] = None
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="override a value of the file; repeatable"),
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="DIR", help="read weights from here; nothing is downloaded"),
    ] = None
    cache_dir: Annotated[
        Path | None,
        typer.Option("--cache-dir", metavar="DIR", help="where weights are cached and downloaded to"),
    ] = None
    device: Annotated[Device | None, typer.Option("--device", help="default: cuda if a GPU is found, else cpu")] = None
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="LIST", help="0,1: rank i gets the i-th; auto:2: choose the file for two GPUs"),
    ] = None
    name: Annotated[str | None, typer.Option("--name", help="name of the deployment; default: the model's")] = None
    is_detached: Annotated[bool, typer.Option("-d", "--detach", help="leave it running and return")] = False
    is_waiting: Annotated[
        bool, typer.Option("--wait/--no-wait", help="with -d: return when it is ready, or at once")
    ] = True
    is_dry: Annotated[bool, typer.Option("--dry-run", help="plan and check only; start nothing")] = False
    stall: Annotated[
        str, typer.Option("--stall", metavar="TIME", help="a start fails after so long without progress")
    ] = "120s"
    log_level: Annotated[str, typer.Option("--log-level", help="DEBUG, INFO, WARNING or ERROR, for all processes")] = (
        "INFO"
    )
    run_root: Annotated[
        Path | None,
        typer.Option(
            "--socket-path-prefix",
            metavar="DIR",
            help="parent of the run directory; other commands then need MSTAR_RUNTIME_DIR",
        ),
    ] = None
    host: Annotated[str | None, typer.Option("--host", help="address of the api; default 127.0.0.1")] = None
    port: Annotated[int | None, typer.Option("--port", help="port of the api; default 8000")] = None
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", help="require this key from clients; repeatable")
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="a file with one key per line")
    ] = None
    metrics_key_file: Annotated[
        Path | None,
        typer.Option("--metrics-key-file", metavar="FILE", help="a file with keys that open /metrics alone"),
    ] = None
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="longest life of a request, queue included; default 600s"),
    ] = None
    bind_when_ready: Annotated[bool, typer.Option("--bind-when-ready", help="listen only once the model is ready")] = (
        False
    )
    no_console: Annotated[bool, typer.Option("--no-console", help="do not serve the web page at /")] = False
    strict_model: Annotated[bool, typer.Option("--strict-model", help="refuse requests that name another model")] = (
        False
    )
    protocol: Annotated[
        str | None,
        typer.Option(
            "--tensor-comm-protocol", help="SHM, TCP or RDMA: transport of tensors between ranks; default SHM"
        ),
    ] = None
    mooncake_port: Annotated[
        int | None, typer.Option("--mooncake-port", min=1, max=65535, help="first port of TCP and RDMA; default 8080")
    ] = None
    transfer_device: Annotated[
        str | None, typer.Option("--tcp-transfer-device", help="interface or address for TCP, adapters for RDMA")
    ] = None
    upload_dir: Annotated[
        Path | None,
        typer.Option("--upload-dir", metavar="DIR", help="store request media in this directory"),
    ] = None
    nvtx: Annotated[bool, typer.Option("--enable-nvtx", help="mark GPU steps for Nsight Systems")] = False
    log_stats: Annotated[
        bool, typer.Option("--log-stats", help="one JSON line per finished request, in stats.ndjson beside the logs")
    ] = False
    stats_file: Annotated[
        Path | None, typer.Option("--log-stats-file", metavar="FILE", help="the same into this file")
    ] = None
    remote_media: Annotated[
        list[str] | None,
        typer.Option("--allow-remote-media", metavar="HOST", help="fetch request media from this host; repeatable"),
    ] = None
    cors_origins: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", metavar="ORIGIN", help="allow browser requests from this origin; repeatable"),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="PEM certificate; the api then serves HTTPS only")
    ] = None
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="PEM key of the certificate")] = None
    admin_group: Annotated[
        str | None,
        typer.Option(
            "--admin-group", metavar="GROUP", help="its members may read; needs a --socket-path-prefix of theirs"
        ),
    ] = None
    rust_frontend: Annotated[bool, typer.Option("--rust-frontend", hidden=True)] = False
    rust_frontend_bin: Annotated[str | None, typer.Option("--rust-frontend-bin", hidden=True)] = None


def up_signature() -> inspect.Signature:
    """Return the signature of the `up` command: the context, then each field of UpOptions as a keyword."""
    hints = get_type_hints(UpOptions, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    options = [
        inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in fields(UpOptions)
    ]
    return inspect.Signature([context, *options])
