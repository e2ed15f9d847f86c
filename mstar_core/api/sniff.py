"""What an upload is, from its first bytes. Name and content type only settle what the bytes leave open."""

from __future__ import annotations

from typing import Final

MATROSKA: Final = b"\x1aE\xdf\xa3"
MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "image"),
    (b"\xff\xd8\xff", "image"),
    (b"GIF8", "image"),
    (b"BM", "image"),
    (b"II*\x00", "image"),
    (b"MM\x00*", "image"),
    (b"fLaC", "audio"),
    (b"ID3", "audio"),
    (b"OggS", "audio"),
    *((bytes((0xFF, second)), "audio") for second in (0xE2, 0xE3, *range(0xF0, 0xF6), *range(0xF8, 0xFE))),
    (MATROSKA, "video"),
    (b"\x93NUMPY", "tensor"),
)
RIFF: Final = {b"WEBP": "image", b"WAVE": "audio", b"AVI ": "video"}
AUDIO_BRANDS: Final = (b"M4A ", b"M4B ")


def sniff(head: bytes, name: str = "", content_type: str = "") -> str | None:
    """The modality of a file that begins with `head` (16 bytes are enough); None: nothing we know."""
    if head[:4] == b"RIFF":
        return RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        is_audio = head[8:12] in AUDIO_BRANDS or content_type.startswith("audio/") or name.lower().endswith(".m4a")
        return "audio" if is_audio else "video"
    if head.startswith(b"OggS") and (content_type.startswith("video/") or name.lower().endswith(".ogv")):
        return "video"
    if head.startswith(MATROSKA) and content_type.startswith("audio/"):
        return "audio"  # as browsers record it
    for magic, modality in MAGIC:
        if head.startswith(magic):
            return modality
    if name.lower().endswith(".safetensors") and head[8:9] == b"{":
        return "tensor"
    return None
