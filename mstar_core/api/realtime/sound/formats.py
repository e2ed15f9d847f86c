"""Formats of realtime sound: PCM16 at 24 kHz, and the two laws of telephony (ITU-T G.711) at 8 kHz."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from mstar_core.errors import RequestError

Law = Literal["", "mu", "a"]
Pcm = npt.NDArray[np.int16]

PCM_RATE: Final = 24_000
PHONE_RATE: Final = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundFormat:
    """Encoding of mono sound. rate: samples per second. law: empty for PCM16 little endian."""

    rate: int = PCM_RATE
    law: Law = ""

    def decode(self, data: bytes, field: str) -> Pcm:
        """Return the samples [n] of encoded sound. Raises RequestError for half a sample."""
        if self.law:
            return _levels(self.law)[np.frombuffer(data, np.uint8)]
        if len(data) % 2:
            raise RequestError(
                f"{field} has {len(data)} bytes, but a sample of PCM16 has 2", hint="send whole samples", field=field
            )
        return np.frombuffer(data, "<i2").astype(np.int16, copy=False)

    def encode(self, samples: Pcm) -> bytes:
        """Return samples [n] in this format."""
        if self.law:
            return _codes(self.law)[samples.view(np.uint16)].tobytes()
        return samples.astype("<i2", copy=False).tobytes()


@cache
def _levels(law: Law) -> Pcm:
    """Return the sample of each of the 256 codes. Source: ITU-T G.711, tables 1 and 2, scaled to 16 bits."""
    code = np.arange(256)
    bits = code ^ (0xFF if law == "mu" else 0x55)
    exponent, mantissa = bits >> 4 & 7, bits & 15
    if law == "mu":
        size = ((mantissa << 3) + 132 << exponent) - 132
        return np.where(bits & 128, -size, size).astype(np.int16)
    size = np.where(exponent == 0, (mantissa << 4) + 8, (mantissa << 4) + 264 << np.maximum(exponent - 1, 0))
    return np.where(bits & 128, size, -size).astype(np.int16)


@cache
def _codes(law: Law) -> npt.NDArray[np.uint8]:
    """Return the code whose sample is nearest, for each bit pattern of an int16; of two zeros the positive one."""
    levels = _levels(law).astype(np.int32)
    order = np.lexsort((-np.arange(256), levels))
    borders = (levels[order][1:] + levels[order][:-1]) / 2
    samples = np.arange(65_536, dtype=np.uint16).view(np.int16)
    return order[np.searchsorted(borders, samples)].astype(np.uint8)
