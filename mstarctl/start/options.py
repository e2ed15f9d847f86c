"""Options of `mstarctl up`: one record that declares, holds and documents each of them.

`up` takes its signature from UpOptions, so an option is written once. An option that sets a configuration key names it
with `Sets`. Hidden options are refused by name.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from mstar_core.config.resolved import ApiConfig, TransportConfig
from mstar_core.config.scaling import MOST_RANKS
from mstarctl.complete import config_names, deployment_names, set_words, target_names
from mstarctl.output.durations import parse_duration
from mstarctl.start.hardware.adapters import named_folders
from mstarctl.start.target import Override, parse_set
from mstarctl.start.transports import check_protocol

API: Final = ApiConfig()
TRANSPORT: Final = TransportConfig()


def absolute(path: Path | str | None, flag: str = "") -> str | None:
    """Return an absolute path, for processes with another working directory."""
    return None if path is None else str(Path(path).expanduser().absolute())


def _plain(typed: Any, flag: str) -> Any:
    """Return the value that an option sets: text, the distinct items of a list; None for a switch that is off."""
    match typed:
        case Path():
            return str(typed)
        case list():
            return list(dict.fromkeys(typed)) or None
        case _:
            return None if typed is False else typed


def _switched_off(is_given: bool, flag: str) -> bool | None:
    return False if is_given else None


@dataclass(frozen=True, slots=True)
class Sets:
    """Configuration key that an option sets. convert: from the typed value and the flag to the key's value."""

    key: str
    convert: Callable[[Any, str], Any] = _plain


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
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="override a value of the file; repeatable",
            autocompletion=set_words,
        ),
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="DIR", help="read weights from here; nothing is downloaded"),
        Sets("weights"),
    ] = None
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="NAME=FOLDER", help="serve this LoRA adapter as model NAME; repeatable"),
        Sets("lora.adapters", named_folders),
    ] = None
    cache_dir: Annotated[
        Path | None,
        typer.Option("--cache-dir", metavar="DIR", help="where weights are cached and downloaded to"),
    ] = None
    device: Annotated[Device | None, typer.Option("--device", help="default: cuda if a GPU is found, else cpu")] = None
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="LIST",
            help="0,1: rank i gets the i-th; auto:2: choose the file for two GPUs; with --ray HOST:0,HOST:1",
        ),
    ] = None
    is_fitted: Annotated[
        bool,
        typer.Option(
            "--fit", help="choose the file for the GPUs, as auto:N does, if the model's own does not fit them"
        ),
    ] = False
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", metavar="N", min=1, max=MOST_RANKS, help="replicas of every node; default: the file's"
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="run ranks on the hosts of this Ray cluster: HOST:PORT, or auto for its own",
        ),
        Sets("ray.address"),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="share each device with others: 20GiB, 25% or auto; default: the whole device",
        ),
        Sets("memory_budget"),
    ] = None
    name: Annotated[
        str | None, typer.Option("--name", help="name of the deployment; default: the model's"), Sets("name")
    ] = None
    replace: Annotated[
        str | None,
        typer.Option(
            "--replace",
            metavar="NAME",
            help="take over name, address and requests of this running deployment once ready; it then ends",
            autocompletion=deployment_names,
        ),
    ] = None
    stop_first: Annotated[
        bool,
        typer.Option("--stop-first", help="with --replace: it ends first, and new connections wait for the start"),
    ] = False
    is_detached: Annotated[bool, typer.Option("-d", "--detach", help="leave it running and return")] = False
    is_waiting: Annotated[
        bool, typer.Option("--wait/--no-wait", help="with -d: return when it is ready, or at once")
    ] = True
    warm: Annotated[
        str | None,
        typer.Option("--warm", metavar="first|full", help="full: ready once all planned CUDA graphs are captured"),
        Sets("warm"),
    ] = None
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
    host: Annotated[
        str | None, typer.Option("--host", help=f"address of the api; default {API.host}"), Sets("api.host")
    ] = None
    port: Annotated[
        int | None, typer.Option("--port", help=f"port of the api; default {API.port}"), Sets("api.port")
    ] = None
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", help="require this key from clients; repeatable")
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", metavar="FILE", help="a file with one key per line"),
        Sets("api.api_key_file", absolute),
    ] = None
    metrics_key_file: Annotated[
        Path | None,
        typer.Option("--metrics-key-file", metavar="FILE", help="a file with keys that open /metrics alone"),
        Sets("api.metrics_key_file", absolute),
    ] = None
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout", metavar="TIME", help=f"longest life of a request, queue included; default {API.timeout_s:g}s"
        ),
        Sets("api.timeout_s", parse_duration),
    ] = None
    bind_when_ready: Annotated[
        bool,
        typer.Option("--bind-when-ready", help="listen only once the model is ready"),
        Sets("api.bind_when_ready"),
    ] = False
    no_console: Annotated[
        bool, typer.Option("--no-console", help="do not serve the web page at /"), Sets("api.console", _switched_off)
    ] = False
    aliases: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME", help="one more name for the model in requests, * for any; repeatable"),
        Sets("api.aliases"),
    ] = None
    strict_model: Annotated[
        bool,
        typer.Option("--strict-model", help="refuse requests that name another model"),
        Sets("api.strict_model"),
    ] = False
    protocol: Annotated[
        str | None,
        typer.Option(
            "--tensor-comm-protocol",
            help=f"SHM, TCP or RDMA: transport of tensors between ranks; default {TRANSPORT.protocol}",
        ),
        Sets("transport.protocol", check_protocol),
    ] = None
    mooncake_port: Annotated[
        int | None,
        typer.Option("--mooncake-port", min=1, max=65535, help=f"first port of TCP and RDMA; default {TRANSPORT.port}"),
        Sets("transport.port"),
    ] = None
    transfer_device: Annotated[
        str | None,
        typer.Option("--tcp-transfer-device", help="interface or address for TCP, adapters for RDMA"),
        Sets("transport.device"),
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
        Sets("api.remote_media"),
    ] = None
    cors_origins: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", metavar="ORIGIN", help="allow browser requests from this origin; repeatable"),
        Sets("api.cors_origins"),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="PEM certificate; the api then serves HTTPS only"),
        Sets("api.tls_cert", absolute),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="PEM key of the certificate"),
        Sets("api.tls_key", absolute),
    ] = None
    admin_group: Annotated[
        str | None,
        typer.Option(
            "--admin-group", metavar="GROUP", help="its members may read; needs a --socket-path-prefix of theirs"
        ),
    ] = None
    owner: Annotated[str, typer.Option("--owner", hidden=True)] = ""
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


def overrides(options: UpOptions) -> list[Override]:
    """Return the values that override the file's. --set comes first, so that a dedicated option wins.

    Raises UsageError for a value that cannot be read.
    """
    return [parse_set(text) for text in options.sets or ()] + list(_dedicated(options))


def _dedicated(options: UpOptions) -> Iterator[Override]:
    """Yield the values of the options that set a key."""
    for name, sets, flag in key_options():
        typed = getattr(options, name)
        value = None if typed is None else sets.convert(typed, flag)
        if value is not None:
            yield Override(key=sets.key, value=value, source=flag)


def key_options() -> Iterator[tuple[str, Sets, str]]:
    """Yield the field of each option that sets a key, with the key and the flag."""
    for name, hint in get_type_hints(UpOptions, include_extras=True).items():
        notes = get_args(hint)
        flags = (note.default for note in notes if isinstance(note, OptionInfo))  # typer takes it for a default first
        for sets, flag in zip((note for note in notes if isinstance(note, Sets)), flags, strict=False):
            yield name, sets, str(flag)
