"""Time to parse a JSON body with an image as a data URL and to decode it, beside the way of the standard library.

Run from the repository root: `python -m bench.api_json_media [--megabytes 0.1 2.4] [--repeats 50] [--save NAME]`.
Prints one JSON object: medians in milliseconds of CPU time of one thread, both ways in turn, and their ratio. The other
way is json.loads with the same checks, and base64.b64decode without white space.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.serving.figures import head
from bench.serving.in_turn import keep
from mstar_core.api.http import strict_json
from mstar_core.api.parse.media import data_of_url


def body_of(size: int) -> bytes:
    """Return a chat request whose image has `size` bytes."""
    url = f"data:image/png;base64,{base64.b64encode(random.Random(1).randbytes(size)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return json.dumps({"model": "qwen3_omni", "messages": [{"role": "user", "content": parts}]}).encode()


def url_in(body: dict[str, Any]) -> str:
    """Return the data URL of a request."""
    url: str = body["messages"][0]["content"][0]["image_url"]["url"]
    return url


def ours(body: bytes) -> bytes:
    """Return the image as the api reads it."""
    reading = data_of_url("image", url_in(strict_json.parse_object(body)))
    try:
        reading.send(None)
    except StopIteration as end:
        data: bytes = end.value[1]
        return data
    raise RuntimeError("the image was decoded on a thread, which is not measured here")


def plain(body: bytes) -> bytes:
    """Return the image as the standard library reads it."""
    url = url_in(strict_json.parse_json(body.decode()))
    return base64.b64decode("".join(url.partition(",")[2].split()), validate=True)


def milliseconds(read: Callable[[bytes], bytes], body: bytes) -> float:
    """Return the CPU time of one reading."""
    before = time.process_time()
    read(body)
    return 1e3 * (time.process_time() - before)


def main() -> None:
    """Measure, print, and save with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.1, 1.0, 2.4, 6.0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--save", help="name of a file under bench/results/api")
    options = parser.parse_args()
    rows = []
    for megabytes in options.megabytes:
        body = body_of(int(megabytes * 1e6))
        assert ours(body) == plain(body)
        pairs = [(milliseconds(ours, body), milliseconds(plain, body)) for _ in range(options.repeats)]
        mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append(
            {
                "image_mb": megabytes,
                "ms": round(mine, 3),
                "standard_ms": round(other, 3),
                "ratio": round(other / mine, 1),
            }
        )
    keep({**head(), "rows": rows}, options.save)


if __name__ == "__main__":
    main()
