"""The options of `up`, one name each: every one of the original servers' and ours. Hidden ones are refused by name."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class Device(enum.StrEnum):
    """Where ranks compute."""

    CPU = "cpu"
    CUDA = "cuda"


Target = Annotated[
    str | None, typer.Argument(metavar="MODEL[:tiny]|FILE", help="a model, its embedded default checkpoint, or a file")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="a deployment file; with MODEL, both must agree")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="put a value over the file's; may be repeated"),
]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", metavar="DIR", help="read weights from here; nothing is downloaded"),
]
CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", metavar="DIR", help="where weights are cached and downloaded to"),
]
DeviceOption = Annotated[Device | None, typer.Option("--device", help="default: cuda when a GPU is found, else cpu")]
Gpus = Annotated[
    str | None,
    typer.Option("--gpus", metavar="LIST", help="0,1 or auto:2; rank i gets the i-th"),
]
NameOption = Annotated[str | None, typer.Option("--name", help="name of the deployment; default: the model's")]
IsDetached = Annotated[bool, typer.Option("-d", "--detach", help="leave it running and return")]
IsWaiting = Annotated[bool, typer.Option("--wait/--no-wait", help="with -d: return when it is ready, or at once")]
IsDry = Annotated[bool, typer.Option("--dry-run", help="plan and check only; start nothing")]
Stall = Annotated[str, typer.Option("--stall", metavar="TIME", help="no progress for so long is a failed start")]
LogLevel = Annotated[str, typer.Option("--log-level", help="DEBUG, INFO, WARNING or ERROR, for all processes")]
RunRoot = Annotated[
    Path | None,
    typer.Option(
        "--socket-path-prefix",
        metavar="DIR",
        help="folder of the run directory; other commands then need MSTAR_RUNTIME_DIR",
    ),
]
Host = Annotated[str | None, typer.Option("--host", help="address of the api; default 0.0.0.0")]
Port = Annotated[int | None, typer.Option("--port", help="port of the api; default 8000")]
ApiKey = Annotated[list[str] | None, typer.Option("--api-key", help="ask clients for this key; may be repeated")]
ApiKeyFile = Annotated[Path | None, typer.Option("--api-key-file", metavar="FILE", help="a file with one key a line")]
Timeout = Annotated[
    str | None,
    typer.Option("--timeout", metavar="TIME", help="how long a request may live, queue included; default 600s"),
]
BindWhenReady = Annotated[bool, typer.Option("--bind-when-ready", help="listen only once the model is ready")]
StrictModel = Annotated[bool, typer.Option("--strict-model", help="refuse requests that name another model")]
Protocol = Annotated[
    str,
    typer.Option("--tensor-comm-protocol", help="SHM; TCP and RDMA are refused: all ranks are on this host"),
]
MooncakePort = Annotated[
    int | None, typer.Option("--mooncake-port", min=1, max=65535, help="of TCP and RDMA; without effect with SHM")
]
TransferDevice = Annotated[
    str | None, typer.Option("--tcp-transfer-device", help="of TCP and RDMA; without effect with SHM")
]
UploadDir = Annotated[
    Path | None,
    typer.Option("--upload-dir", metavar="DIR", help="spool media of requests below this folder"),
]
Nvtx = Annotated[bool, typer.Option("--enable-nvtx", help="mark steps on GPUs for Nsight Systems")]
LogStats = Annotated[
    bool, typer.Option("--log-stats", help="one JSON line per finished request, in stats.ndjson beside the logs")
]
LogStatsFile = Annotated[Path | None, typer.Option("--log-stats-file", metavar="FILE", help="the same into this file")]
RemoteMedia = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-remote-media", metavar="HOST", help="fetch media of requests from this host; may be repeated"
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option("--cors-origin", metavar="ORIGIN", help="let browsers call from this origin; may be repeated"),
]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="PEM certificate: HTTPS alone")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="PEM key of the certificate")]
AdminGroup = Annotated[
    str | None,
    typer.Option("--admin-group", metavar="GROUP", help="its members may read; needs a --socket-path-prefix of theirs"),
]
RustFrontend = Annotated[bool, typer.Option("--rust-frontend", hidden=True)]
RustFrontendBin = Annotated[str | None, typer.Option("--rust-frontend-bin", hidden=True)]
