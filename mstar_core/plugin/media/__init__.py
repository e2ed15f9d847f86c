"""Readers of uploaded media with limits on pixels, seconds, frames and bytes. Used by processors and the api's pool.

Decoders are imported when a reader is called. A processor may read media in other ways: the api enforces the
limits before any processor receives a file.
"""

from __future__ import annotations

from mstar_core.plugin.media.images import encode_image, read_image
from mstar_core.plugin.media.limits import MediaLimits
from mstar_core.plugin.media.sounds import read_sound
from mstar_core.plugin.media.videos import VideoFile

__all__ = ["MediaLimits", "VideoFile", "encode_image", "read_image", "read_sound"]
