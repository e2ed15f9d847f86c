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
    """Refuse what has no effect on latents sent as video. Raises RequestError naming the field.

    outputs: modalities asked for. Who asks for latents as video gets what an earlier system sent: bare float32.
    """
    if EARLIER not in outputs:
        return
    asked = {
        "return": params.returns is not None,
        "output_format": params.output_format != "raw",
        "output_dtype": params.output_dtype != "float32",
    }
    field = next((name for name, is_asked in asked.items() if is_asked), None)
    if field is not None:
        raise RequestError(f"{field} has no effect on video", hint="ask for tensor in place of video", field=field)


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
