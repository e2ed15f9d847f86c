"""Output formats that both processors share."""

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
    """Refuse parameters that have no effect on output modality `video`. Raises RequestError naming the field.

    outputs: requested modalities. With `video`, latents are sent as bare float32, as an earlier system did.
    """
    if EARLIER not in outputs:
        return
    is_set = {
        "return": params.returns is not None,
        "output_format": params.output_format != "raw",
        "output_dtype": params.output_dtype != "float32",
    }
    field = next((name for name, is_given in is_set.items() if is_given), None)
    if field is not None:
        raise RequestError(f"{field} has no effect on video", hint="request tensor instead of video", field=field)


def missing_media(field: str) -> RequestError:
    """Return the error for a request without files."""
    return RequestError(
        "no media was uploaded",
        hint="upload a video, an image, or a tensor of pixels",
        field=field,
        code="missing_field",
    )


def sent_as_video(output: npt.NDArray[Any]) -> tuple[bytes, dict[str, Any]]:
    """Return latents as bare little-endian float32, with their shape."""
    values = np.ascontiguousarray(output, dtype="<f4")
    return values.tobytes(), {"shape": list(values.shape), "dtype": "float32"}
