"""Image reader and writer. The header is checked before pixels are decoded. PNG, JPEG, WebP, BMP, TIFF, GIF."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import MstarError, PluginError
from mstar_core.plugin.media.limits import MediaLimits, too_large, undecodable

if TYPE_CHECKING:
    from PIL import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
CHANNELS: Final = 3
PNG_LEVEL: Final = 1
"""Compression level. Level 6 takes four times as long and saves a few percent."""

QUALITY: Final = 90


def image_size(data: bytes, limits: MediaLimits) -> tuple[int, int]:
    """Return width and height in pixels from the header. Raises TooLarge, BadMedia."""
    with _opened(data, limits) as image:
        width, height = image.size
        return int(width), int(height)


def read_image(data: bytes, limits: MediaLimits) -> Image.Image:
    """Return the first frame as RGB, rotated by its EXIF tag, on white. Raises TooLarge, BadMedia."""
    from PIL import Image, ImageOps

    with _opened(data, limits) as image:
        try:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            upright: Image.Image = image
            if upright.mode.startswith("I;16"):
                upright = upright.point(lambda value: value / 256).convert("L")  # conversion alone cuts them off at 255
            if upright.has_transparency_data:
                solid = upright.convert("RGBA")
                white = Image.new("RGBA", solid.size, "white")
                return Image.alpha_composite(white, solid).convert("RGB")
            return upright if upright.mode == "RGB" else upright.convert("RGB")  # a conversion copies
        except Exception as error:  # a damaged file fails in any way
            raise undecodable("image", error) from error


def encode_image(image: Image.Image, form: str = "png") -> bytes:
    """Encode an image as `png`, `jpeg` or `webp`."""
    file = io.BytesIO()
    match form:
        case "png":
            image.save(file, "PNG", compress_level=PNG_LEVEL)
        case "jpeg" | "webp":
            image.convert("RGB").save(file, form.upper(), quality=QUALITY)
        case _:
            raise PluginError(f"image format {form!r} is not supported", hint="png, jpeg or webp")
    return file.getvalue()


def _opened(data: bytes, limits: MediaLimits) -> Any:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the limits below are ours, and lower
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_size(*image.size, limits)
        return image
    except MstarError:
        raise
    except Image.DecompressionBombError as error:
        raise too_large("the image has over 178956970 pixels", f"{limits.image_pixels}") from error
    except Exception as error:
        raise undecodable("image", error) from error


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if max(width, height) > limits.image_side:
        raise too_large(f"the image is {width} x {height} pixels", f"{limits.image_side} a side")
    if width * height > limits.image_pixels:
        raise too_large(f"the image has {width * height} pixels", f"{limits.image_pixels}")
