"""Readers of uploaded media, bounded in pixels, seconds, frames and bytes. Used by processors and by the api's pool.

Nothing heavy is imported before a reader is called. Other routines of a model may read media in other ways; the limits
are held by `check_media` before any processor sees a file.
"""

from __future__ import annotations

from mstar_core.plugin.media.check import check_media
from mstar_core.plugin.media.images import encode_image, read_image
from mstar_core.plugin.media.limits import MediaLimits
from mstar_core.plugin.media.sounds import read_sound
from mstar_core.plugin.media.videos import VideoFile

__all__ = ["MediaLimits", "VideoFile", "check_media", "encode_image", "read_image", "read_sound"]
