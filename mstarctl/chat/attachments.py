"""Files that go with a message of `mstarctl chat`: `/image FILE`, and `@FILE` within a message."""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ConfigError, UsageError
from mstarctl.call.ask import read_bytes

MEDIA: Final = ("image", "audio", "video")
SOUND: Final = {".wav": "wav", ".mp3": "mp3", ".flac": "flac", ".ogg": "ogg", ".m4a": "m4a"}
MENTION: Final = re.compile(r"""(?:(?<=\s)|^)@(?:"([^"]+)"|'([^']+)'|(\S+))""")
ENDINGS: Final = ".,;:!?)"
"""Characters after `@FILE` that belong to the sentence."""


def part_of(kind: str, path: Path, inputs: Sequence[str]) -> dict[str, Any]:
    """Read a file as a part of a message. inputs: modalities of the model. Raises UsageError, ConfigError."""
    if kind not in inputs:
        raise UsageError(f"the model does not accept {kind} input", hint=f"it accepts {', '.join(inputs)}")
    data = base64.b64encode(read_bytes(path, kind)).decode()
    if kind == "audio":
        form = SOUND.get(path.suffix.lower(), "wav")
        return {"type": "input_audio", "input_audio": {"data": data, "format": form}}
    content_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    name = f"{kind}_url"
    return {"type": name, name: {"url": f"data:{content_type};base64,{data}"}}


def text_part(path: Path) -> dict[str, Any]:
    """Read a text file as a part of a message, below its name. Raises ConfigError for other content."""
    try:
        text = read_bytes(path, "text").decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "attach an image, a sound, a video or UTF-8 text"
        raise ConfigError(f"{path} is neither a medium nor text", str(error), hint, file=str(path)) from error
    return {"type": "text", "text": f"{path.name}:\n{text}\n"}


def kind_of(path: Path) -> str:
    """Return `image`, `audio` or `video` by the ending of a file, empty for other files."""
    kind = (mimetypes.guess_type(path.name)[0] or "").partition("/")[0]
    return kind if kind in MEDIA else ""


def mentioned(text: str, inputs: Sequence[str]) -> list[dict[str, Any]]:
    """Return the parts of the files that a message mentions as `@FILE` or `@"a file"`; its text stays as it is.

    Other words that begin with `@` are text. Raises UsageError for the path of a file that does
    not exist.
    """
    found = []
    for match in MENTION.finditer(text):
        quoted = match[1] or match[2]
        path = _existing(quoted or match[3])
        if path is not None:
            kind = kind_of(path)
            found.append(part_of(kind, path, inputs) if kind else text_part(path))
        elif quoted or "/" in match[3] or kind_of(Path(match[3])):
            raise UsageError(f"{match[0]} is not a file", hint="check the path, or write the word without @")
    return found


def _existing(word: str) -> Path | None:
    for name in (word, word.rstrip(ENDINGS)):
        path = Path(name).expanduser()
        if name and path.is_file():
            return path
    return None
