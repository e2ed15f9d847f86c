"""List of specialisations of Triton kernels, one JSON object per line: recorded by a worker, compiled without a GPU.

A worker whose environment names a file in `MSTAR_KERNEL_LIST` records there each kernel that it compiles or loads.
`scripts/triton_kernels.py` compiles the list for a target that this machine does not have.
"""

from __future__ import annotations

import importlib
import json
from typing import Any, Final

VARIABLE: Final = "MSTAR_KERNEL_LIST"
"""Environment variable that names the file to record to."""

OPTIONS: Final = (
    "num_warps",
    "num_ctas",
    "num_stages",
    "maxnreg",
    "launch_pdl",
    "launch_cooperative_grid",
    "enable_fp_fusion",
)
"""Options that a launch can set; the others are Triton's defaults for the architecture."""


def described(src: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON form of a specialisation. src: Triton's ASTSource; metadata: of the compiled kernel.

    hash: key of the compiled kernel in Triton's cache, where the kernel was compiled.
    """
    return {
        "kernel": _place(src.fn),
        "signature": dict(src.signature),
        "constants": [[list(path), _plain(value)] for path, value in sorted(src.constants.items())],
        "attrs": [[list(path), value] for path, value in src.attrs.items()],
        "options": {name: metadata[name] for name in OPTIONS if metadata.get(name) is not None},
        "arch": getattr(metadata.get("target"), "arch", None),
        "hash": metadata.get("hash"),
    }


def line_of(src: Any, metadata: dict[str, Any]) -> str:
    """Return the line of a specialisation."""
    return json.dumps(described(src, metadata), sort_keys=True, default=str)


def source_of(entry: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return Triton's source of a recorded specialisation, and its options. Raises ValueError for one that is stale."""
    fn = _kernel(entry["kernel"])
    constants = {_path(path): _value(value) for path, value in entry["constants"]}
    if entry["signature"].keys() != set(fn.arg_names):
        raise ValueError(f"{entry['kernel']} has other arguments now: {', '.join(fn.arg_names)}")
    signature = {name: _path(entry["signature"][name]) for name in fn.arg_names}
    attrs = {_path(path): value for path, value in entry["attrs"]}
    kind = _ast_source(fn)
    options = {name: entry["options"][name] for name in OPTIONS if entry["options"].get(name) is not None}
    return kind(fn, signature, constants, attrs), options


def _ast_source(fn: Any) -> Any:
    if fn.is_gluon():
        return importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    return importlib.import_module("triton.compiler").ASTSource


def _place(fn: Any) -> str:
    return f"{fn.__module__}:{fn.__qualname__}"


def _kernel(place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{place} is gone: {error}") from error


def _plain(value: Any) -> Any:
    """Return the JSON form of a constant."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return {"tuple": [_plain(each) for each in value]}
    if hasattr(value, "cache_key") and hasattr(value, "fn"):
        return {"kernel": _place(value)}
    if type(value).__name__ == "constexpr":
        return {"constexpr": _plain(value.value)}
    if type(value).__name__ == "dtype":
        return {"dtype": str(value)}
    return {"layout": type(value).__name__, "fields": {n: _plain(v) for n, v in vars(value).items()}}


def _value(form: Any) -> Any:
    """Return the constant of a JSON form."""
    if not isinstance(form, dict):
        return form
    if "tuple" in form:
        return tuple(_value(each) for each in form["tuple"])
    if "kernel" in form:
        return _kernel(form["kernel"])
    if "constexpr" in form:
        return importlib.import_module("triton.language").constexpr(_value(form["constexpr"]))
    if "dtype" in form:
        return importlib.import_module("triton.language").dtype(form["dtype"])
    made = getattr(importlib.import_module("triton.experimental.gluon.language"), form["layout"])
    return made(**{name: _list(_value(value)) for name, value in form["fields"].items()})


def _list(value: Any) -> Any:
    return [_list(each) for each in value] if isinstance(value, tuple) else value


def _path(value: Any) -> Any:
    return tuple(_path(each) for each in value) if isinstance(value, list) else value
