"""Fuzz the api's parsers of untrusted bytes, guided by coverage (atheris). Run by `make fuzz`, not by CI.

Runs one target until --cpu-seconds of CPU time are used. A target allows only the errors that clients may see. Any
other exception or crash is a finding, and libFuzzer saves its input in --artifacts. Findings become tests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
Target = Callable[[bytes], None]
LIMIT_BYTES: Final = 1 << 20


@contextmanager
def refusals() -> Iterator[None]:
    """Ignore errors that are sent to clients as a 4xx."""
    from mstar_core.errors import MstarError

    try:
        yield
    except MstarError as error:
        if error.status >= 500:
            raise


def multipart(data: bytes) -> None:
    """Check that any bytes are parts of the body, or an error of the client."""
    from mstar_core.api.http.multipart import parts_of

    with refusals():
        for _, part in parts_of(data, b"b"):
            if b"\r\n--b" in bytes(part) or bytes(part) not in data:
                raise AssertionError(repr(bytes(part)))


def headers(data: bytes) -> None:
    """Parse a part header, a content type, a trace parent and an id."""
    from mstar_core.api.http.multipart import boundary_of, parse_part_header
    from mstar_core.api.requests.registry import check_request_id, trace_id_of, unescaped

    text = data.decode(errors="surrogateescape")
    trace_id_of(text)
    unescaped(text)
    for read in (parse_part_header, lambda _: boundary_of(text), lambda _: check_request_id(text)):
        with refusals():
            read(data)


def strict_json(data: bytes) -> None:
    """Parse JSON, which must be read as the standard library reads it, or refused."""
    from mstar_core.api.http.strict_json import parse_json

    with refusals():
        found = parse_json(data)
        if found != json.loads(data):
            raise AssertionError(repr(found))
        json.dumps(found, allow_nan=False).encode()


def bodies(data: bytes) -> None:
    """Parse a JSON body for each route: fields, messages, parameters."""
    from mstar_core.api.http.strict_json import parse_object
    from mstar_core.api.parse.messages import collected
    from mstar_core.api.routes.fields import typed
    from mstar_core.api.schema import ChatRequest, ImageRequest, SpeechRequest, TranscriptionRequest
    from mstar_core.plugin.params import parse_params
    from tests.fakes.omni_model import SPEC, Params

    with refusals():
        body = parse_object(data)
        for kind in (ImageRequest, SpeechRequest, TranscriptionRequest, ChatRequest):
            with refusals():
                made, rest = typed(body, kind)
                if isinstance(made, ChatRequest):
                    collected(made.messages, SPEC)
                parse_params(Params, rest)


def urls(data: bytes) -> None:
    """Check media URLs: only the allowed host passes."""
    import asyncio

    from mstar_core.api.parse.media import Fetcher, data_of_url

    text = data.decode(errors="replace")
    with refusals():
        if text[:5].lower() == "data:":
            asyncio.run(data_of_url("x", text))
        else:
            url = Fetcher(("media.example",), 10).check(text, "x")
            if url.host.rstrip(".") != "media.example" or url.userinfo or url.port not in (None, 80, 443):
                raise AssertionError(repr(url))


def media(data: bytes) -> None:
    """Read a file of any type, as a pool process does."""
    from mstar_core.api.parse.media import sniff
    from mstar_core.api.preprocess.media_check import check_media
    from mstar_core.plugin.media import MediaLimits, VideoFile, read_image, read_sound
    from mstar_core.plugin.processor import MediaPart

    limits = MediaLimits(
        image_pixels=1 << 16,
        image_side=1 << 10,
        audio_s=5,
        video_s=5,
        video_width=256,
        video_height=256,
        decoded_bytes=LIMIT_BYTES,
    )
    kind = sniff(data)
    if kind not in ("image", "audio", "video"):
        return
    with refusals():
        check_media([MediaPart(modality=kind, data=data)], limits)
        if kind == "image":
            read_image(data, limits)
        elif kind == "audio":
            read_sound(data, 16_000, limits)
        else:
            with VideoFile(data, limits) as video:
                list(video.frames([0, 1]))


TARGETS: Final[dict[str, Target]] = {
    "multipart": multipart,
    "headers": headers,
    "json": strict_json,
    "bodies": bodies,
    "urls": urls,
    "media": media,
}


def seeds(name: str) -> list[bytes]:
    """Return the initial corpus."""
    from tests.fakes import media as files

    part = b'--b\r\nContent-Disposition: form-data; name="a"; filename="x"\r\nContent-Type: a/b\r\n\r\nhi\r\n--b--\r\n'
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "n": 1, "stream": True}
    texts = [json.dumps(chat).encode(), b'{"input": "x", "voice": {"id": "a"}}', b'{"prompt": "x", "size": "16x16"}']
    match name:
        case "multipart":
            return [b"\x03" + part, b"\x00" + part * 2]
        case "headers":
            return [part[5:90], b'multipart/form-data; boundary="b"', b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"]
        case "urls":
            return [b"data:image/png;base64,aGk=", b"https://media.example/a?b#c", b"http://media.example:80/%41"]
        case "media":
            images = [files.image(8, 6, form) for form in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP")]
            coded = [("flac", "flac"), ("mp3", "libmp3lame"), ("ogg", "libopus"), ("ipod", "aac"), ("adts", "aac")]
            sounds = [files.wav(0.05), *(files.coded(form, codec, 0.1) for form, codec in coded)]
            return [*images, *sounds, *(files.video(32, 16, 2, form=form) for form in ("mp4", "matroska", "avi"))]
        case _:
            return [*texts, b'[1, -2.5e3, null, true, "\\u00e9"]']


def main() -> int:
    """Return 2 without atheris, 0 after the time is used; libFuzzer exits with another status at a finding."""
    parser = argparse.ArgumentParser(description="fuzz one target, guided by coverage")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--cpu-seconds", type=float, default=180.0, help="processor time to use")
    parser.add_argument("--artifacts", type=Path, default=ROOT / "build" / "fuzz", help="where findings are left")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    try:
        import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]  # not a dependency
    except ImportError:
        print("make fuzz needs atheris: pip install atheris", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["mstar_core.api", "mstar_core.plugin", "PIL"]):
        TARGETS[arguments.target](b"{}")
        begun = seeds(arguments.target)
    arguments.artifacts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(begun):
            Path(folder, str(number)).write_bytes(seed)
        left = f"-artifact_prefix={arguments.artifacts}/{arguments.target}-"
        options = ["-max_len=4096", "-timeout=60", "-rss_limit_mb=4096", "-verbosity=0", left]
        atheris.Setup([sys.argv[0], *options, folder], counted(arguments.target, arguments.cpu_seconds))
        atheris.Fuzz()
    return 0


def counted(name: str, cpu_s: float) -> Target:
    """Return a target that exits after its CPU time and reports the number of executions."""
    run, runs = TARGETS[name], 0

    def one(data: bytes) -> None:
        nonlocal runs
        run(data)
        runs += 1
        if runs % 64 == 0 and time.process_time() > cpu_s:
            print(f"{name}: {runs} executions, {time.process_time():.0f} s of CPU time, no findings", flush=True)
            os._exit(0)  # libFuzzer would report a regular exit as a finding

    return one


if __name__ == "__main__":
    sys.exit(main())
