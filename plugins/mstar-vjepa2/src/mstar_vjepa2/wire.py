"""What both processors say about the form of an answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from mstar_core.errors import RequestError
from mstar_vjepa2.program import EARLIER

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_vjepa2.params import Common


def check_wire(params: Common, outputs: Collection[str]) -> None:
    """Refuse forms of tensors that are declared but not sent by this version. Raises RequestError naming the field.

    outputs: modalities asked for. Who asks for latents as video gets what an earlier system sent, no choice of ours.
    """
    if EARLIER in outputs and params.returns is not None:
        raise RequestError("return has no effect on video", hint="ask for tensor in place of video", field="return")
    offered = {"output_format": ("raw", params.output_format), "output_dtype": ("float32", params.output_dtype)}
    for field, (sent, wanted) in offered.items():
        if wanted != sent:
            raise RequestError(
                f"{field} {wanted} is not sent by this version",
                hint=f"send {field} {sent}, or leave it out; shape and dtype stand in the metadata",
                field=field,
                value=wanted,
                allowed=sent,
            )


def missing_media(field: str) -> RequestError:
    """The error of a request without any file."""
    return RequestError(
        "there is nothing to look at",
        hint="upload a video, an image, or a tensor of pixels",
        field=field,
        code="missing_field",
    )


def sent_as_video(output: npt.NDArray[Any]) -> tuple[bytes, dict[str, Any]]:
    """Latents under the name that an earlier system gave them: bare float32, little endian."""
    values = np.ascontiguousarray(output, dtype="<f4")
    return values.tobytes(), {"shape": list(values.shape), "dtype": "float32"}
