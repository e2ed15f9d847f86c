"""CPU time of requests with an image before they reach a worker: preparation in the pool, and ways to send one.

Run from the repository root: `python -m bench.image_requests [--requests 40] [--clients 4]`. Prints JSON. `prepare`:
jobs of a pool process of BAGEL in official sizes, in this process, by side of the image: milliseconds of CPU time.
`ways`: the miniature of Qwen3-Omni over HTTP, one image of 768 x 768 as a form of `/generate` and as a data URL in a
chat, and both without an image: milliseconds of CPU time per request of the api, the pool and this client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.families.bagel_checkpoint import write_random
from bench.families.pictures import picture
from bench.gpu_qwen3omni import Workload, png
from bench.serving.client import ask_encoded
from bench.serving.deployment import Plan, Served
from bench.serving.figures import head
from mstar_bagel.params import Params
from mstar_bagel.processor import Processor
from mstar_core.api.preprocess.child import answer
from mstar_core.plugin import parse_params
from mstar_core.plugin.processor import MediaPart, PromptRequest

SIDES: Final = (512, 980)
ROUNDS: Final = 6
IDS: Final = 4
PORT: Final = 18177


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="of each kind and round")
    parser.add_argument("--clients", type=int, default=4, help="requests at once")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mi-", dir="/tmp") as scratch:
        prepared = preparations(write_random(Path(scratch) / "bagel", seed=1), options.requests)
        root = Path(scratch) / "run"
        root.mkdir()
        found = ways(root, options.requests, options.clients)
    print(json.dumps({**head(), "prepare": prepared, "ways": found}, indent=1))


def preparations(folder: Path, count: int) -> dict[str, dict[str, float]]:
    """Return the CPU time of jobs by side of the image. folder: of a checkpoint of BAGEL."""
    processor, found = Processor(folder, {}), {}
    processor.warm_up()
    for side in SIDES:
        call = ("prompt", (question(picture(side)),))
        spent = []
        for _ in range(count):
            before = time.process_time()
            is_done, value = answer(processor, call)
            spent.append(1e3 * (time.process_time() - before))
            if not is_done:
                raise value
        found[str(side)] = {"best_ms": round(min(spent), 2), "median_ms": round(statistics.median(spent), 2)}
    return found


def question(image: bytes) -> PromptRequest:
    """Return a question about an image."""
    media, params = [MediaPart(modality="image", data=image)], parse_params(Params, {}).params
    order: Any = [("image", 0), ("text", 0)]
    outputs = frozenset({"text"})
    return PromptRequest(
        text="boat", texts=["boat"], media=media, order=order, params=params, outputs=outputs, max_seq_len=8192
    )


def ways(root: Path, count: int, clients: int) -> dict[str, dict[str, float]]:
    """Return medians of all rounds but the first, by kind of request. The kinds take turns."""
    files = {"image.png": png(768)}
    kinds = {
        "form": Workload(words=8, text_tokens=IDS, files=files),
        "data_url": Workload(words=8, text_tokens=IDS, files=files, is_chat=True),
        "generate": Workload(words=8, text_tokens=IDS),
        "chat": Workload(words=8, text_tokens=IDS, is_chat=True),
    }
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    number = 1
    with Served(Plan(model="qwen3_omni:tiny", device="cpu", port=PORT, root=root)) as served:
        for _ in range(ROUNDS):
            for kind, work in kinds.items():
                parts = [work.encoded(PORT, number + index) for index in range(count)]
                number += count
                rounds[kind].append(_spent(served, parts, clients))
    return {
        kind: {name: round(statistics.median(each[name] for each in found[1:]), 2) for name in found[0]}
        for kind, found in rounds.items()
    }


def _spent(served: Served, parts: list[tuple[bytes, bytes]], clients: int) -> dict[str, float]:
    before, own = served.cpu_s(), time.process_time()
    asyncio.run(_sent(parts, clients))
    own, after = time.process_time() - own, served.cpu_s()
    spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in ("api", "api children")}
    per_request = {"api_ms": spent["api"], "pool_ms": spent["api children"], "client_ms": own}
    return {name: 1e3 * seconds / len(parts) for name, seconds in per_request.items()}


async def _sent(parts: list[tuple[bytes, bytes]], clients: int) -> None:
    async def one(client: int) -> None:
        for each in parts[client::clients]:
            heard = await ask_encoded(PORT, each)
            if heard.code:
                raise RuntimeError(heard.code)

    await asyncio.gather(*map(one, range(clients)))


if __name__ == "__main__":
    main()
