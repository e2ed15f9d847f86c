"""BAGEL on one GPU with random weights in the official shapes: the whole server over HTTP.

Run from the repository root: `python -m bench.gpu_bagel [--out FILE]`. Writes JSON after each section and prints it:
memory by concurrent images, seconds of text to image at 1024 x 1024 (guided and not) and 512 x 512, of images and edits
with `step_cache`, time to the first token and rate of answers about images for one and for many clients, text while an
image is made, edits, and the lower bound of each denoising forward pass from this device's ceilings. A failing section
writes its traceback and the others run; the exit code is 1. `--limit 120` leaves out the sections that would start
later. `--tiny --device cpu` runs the same with the miniature.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.families.bagel_checkpoint import write_random
from bench.families.clock import ceilings
from bench.families.pictures import Clients, Heard, PictureRequest, picture
from bench.families.sections import Sections
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import Figures, head
from mstar_bagel.checkpoint.config import Language, Sizes
from mstar_bagel.graph import MARKERS
from mstar_core.engine.device import resolve_device

WORD: Final = "boat "

BESIDE_TEXTS: Final = 8
BESIDE_TRIES: Final = 8
BESIDE_PAUSES_S: Final = (0.0, 0.3)
"""Pauses between the texts beside an image: without one, text always waits."""

BESIDE_MOST_S: Final = 30.0
SAMPLE_S: Final = 0.2
"""Interval between two readings of the memory."""

SETTLE_S: Final = 0.5
"""Time in which the server's telemetry of ended requests arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of the workloads. large, small: sides of images; steps of the small one; seen: sides of input images.

    written: (prompt words, output ids) of answers. clients: of the concurrent ones. warm_points, memory_points and
    beside_points: flow times of images that warm up, occupy memory and run beside text. cached: values of `step_cache`.
    """

    large: int = 1024
    small: int = 512
    points: int = 50
    small_points: int = 21
    seen: tuple[int, ...] = (512, 980)
    written: tuple[tuple[int, int], ...] = ((16, 128), (128, 512))
    clients: int = 16
    images_at_once: tuple[int, ...] = (1, 4, 8)
    warm_points: int = 9
    memory_points: int = 4
    beside_points: int = 20
    cached: tuple[float, ...] = (0.3, 0.5)


TINY: Final = Scale(
    large=64,
    small=32,
    points=5,
    small_points=4,
    seen=(32, 64),
    written=((4, 6),),
    clients=3,
    images_at_once=(1, 2),
    warm_points=3,
    memory_points=3,
    beside_points=5,
)


def main() -> int:
    """Measure, write and print the report."""
    options = read_options()
    begun, figures, scratch = head(), Figures(), Path(tempfile.mkdtemp(prefix="mb-", dir="/tmp"))
    model = "bagel:tiny" if options.tiny else "bagel, official shapes, random weights"
    report: dict[str, Any] = {**begun, "model": model}
    sections = Sections(report, figures, options.out)
    try:
        weights = None if options.tiny else write_random(scratch / "weights", seed=1)
        _serve(options, sections, scratch, weights)
        sections.run("bounds", partial(bounds, options))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sections.save()
    print(json.dumps(report, indent=1), flush=True)
    return int(bool(sections.failed))


def _serve(options: argparse.Namespace, sections: Sections, scratch: Path, weights: Path | None) -> None:
    """Start the server and run every section, the most important ones first."""
    root = scratch / "run"
    root.mkdir()
    plan = Plan(
        model="bagel:tiny" if options.tiny else "bagel",
        device=options.device,
        port=options.port,
        root=root,
        weights=weights,
        settings=(f"max_concurrent_requests={options.scale.clients}", *options.set),
        config=options.config,
    )

    started = time.monotonic()

    def measure() -> dict[str, Any]:
        with Served(plan) as running:
            sections.figures.add("ready_s", [running.ready_s])
            load = Loads(running, options, sections)
            for name, section in load.sections():
                if time.monotonic() - started < options.limit:
                    sections.run(name, section)
                else:
                    sections.report.setdefault("left_out", []).append(name)
            return {"held": running.wait_clean(), "gpu_at_end": gpu_state(), "phases": running.snapshot()["deployment"]}

    sections.run("server", measure)


class Loads:
    """Sections of one running deployment."""

    def __init__(self, running: Served, options: argparse.Namespace, sections: Sections) -> None:
        self.running = running
        self.clients = Clients(running.plan.port)
        self.scale: Scale = options.scale
        self.repeats: int = options.repeats
        self.questions: int = options.questions or max(3, options.repeats)
        self.only: list[str] = options.only
        self.figures = sections.figures
        self._seed = 0

    def sections(self) -> list[tuple[str, Callable[[], Any]]]:
        """Return the sections by name."""
        scale = self.scale
        large, small = self._painting(scale.large, scale.points), self._painting(scale.small, scale.small_points)
        plain, edit = replace(large, params={**large.params, "cfg_text_scale": 1.0}), self._edit()
        found: list[tuple[str, Callable[[], Any]]] = [
            # Memory first: the caching allocator holds what earlier requests needed.
            *((f"memory_{count}", partial(self.memory, count, large)) for count in scale.images_at_once),
            (f"t2i_{scale.large}_guided", partial(self.alone, f"t2i_{scale.large}_guided", large)),
            (f"t2i_{scale.large}_plain", partial(self.alone, f"t2i_{scale.large}_plain", plain)),
            (f"t2i_{scale.small}", partial(self.alone, f"t2i_{scale.small}", small)),
        ]
        for kind, request in (("t2i", large), ("edit", edit)):
            for share in scale.cached:
                name = f"{kind}_{scale.large}_cached_{share}"
                cached = replace(request, params={**request.params, "step_cache": share})
                found.append((name, partial(self.alone, name, cached)))
        found += [(f"i2t_{side}_first", partial(self.first_token, side)) for side in scale.seen]
        found += [(f"i2t_{words}_{ids}", partial(self.answers, words, ids)) for words, ids in scale.written]
        found.append(("text_beside_image", partial(self.text_beside_image, _with(large, scale.beside_points))))
        found.append((f"edit_{scale.large}", partial(self.alone, f"edit_{scale.large}", edit)))
        return [(name, section) for name, section in found if name in self.only or not self.only]

    def alone(self, name: str, request: PictureRequest) -> dict[str, Any]:
        """Measure requests one after the other, after a short one that is not recorded."""
        self._ask(_with(request, self.scale.warm_points))
        self.figures.add(name, [self._ask(request).last_s for _ in range(self.repeats)])
        return {"params": request.params, "images": len(request.images)}

    def first_token(self, side: int) -> dict[str, Any]:
        """Measure the time to the first token of an answer about one image. Returns the waterfall of the last one."""
        found = [self._ask(self._question(side, 16, 2)) for _ in range(self.questions + 1)][1:]
        self.figures.add(f"i2t_{side}_ttft", [heard.first_s for heard in found])
        return {"trace": self.running.last_trace()}

    def answers(self, words: int, ids: int) -> dict[str, Any]:
        """Measure answers of a fixed length, for one client and for many at once.

        Returns a waterfall of each, and the milliseconds to the first tokens by the server's own clock.
        """
        side = self.scale.seen[0]
        traces: dict[str, Any] = {}
        for clients in (1, self.scale.clients):
            name = f"i2t_{words}_{ids}_clients_{clients}"
            for number in range(2):
                asked = [self._question(side, words, ids) for _ in range(clients)]  # makes their pictures
                start = time.perf_counter()
                heard = self._together(asked)
                span = time.perf_counter() - start
                if number:
                    self.figures.add(f"{name}_ttft", [each.first_s for each in heard])
                    self.figures.add(f"{name}_e2e", [each.last_s for each in heard])
                    self.figures.add(f"{name}_tokens_per_s", [clients * ids / span], "1/s")
                    time.sleep(SETTLE_S)
                    traces[f"trace_{clients}"] = self.running.last_trace()
                    traces[f"served_ttft_{clients}"] = self.running.first_tokens_ms(clients)
        return traces

    def memory(self, count: int, request: PictureRequest) -> dict[str, Any]:
        """Measure concurrent images of a few steps, the most GPU memory meanwhile, and the most pages in use."""
        before, ended = gpu_state(), threading.Event()
        memory, pages = [before.get("memory_bytes", 0.0)], [0.0]

        def watch() -> None:
            while not ended.wait(SAMPLE_S):
                memory.append(gpu_state().get("memory_bytes", 0.0))
                values = self.running.values()
                pages.append(sum(value for name, value in values.items() if name.endswith(".pages_used")))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            heard = self._together([_with(request, self.scale.memory_points)] * count)
        finally:
            ended.set()
            watcher.join()
        self.figures.add(f"images_at_once_{count}", [each.last_s for each in heard])
        self.figures.add(f"images_at_once_{count}_memory", [max(memory)], "bytes")
        return {
            "gpu_before": before,
            "gpu_after": gpu_state(),
            "memory_bytes_most": max(memory),
            "pages_most": max(pages),
            "resident_bytes": self.running.resident_bytes(),
        }

    def text_beside_image(self, request: PictureRequest) -> dict[str, Any]:
        """Measure texts while an image is made, and how much longer the image takes. At most a minute."""
        alone = self._ask(request).last_s
        quiet = [self._text() for _ in range(BESIDE_TEXTS)]
        trace = self.running.last_trace()
        found, spans = list[Heard](), list[float]()
        began = time.perf_counter()
        for pause_s in BESIDE_PAUSES_S:
            painter = threading.Thread(target=lambda: spans.append(self._ask(request).last_s))
            painter.start()
            while painter.is_alive():
                found.append(self._text())
                time.sleep(pause_s)
            painter.join()
            if time.perf_counter() - began > BESIDE_MOST_S:
                break
        self.figures.add("text_alone_ttft", [heard.first_s for heard in quiet])
        self.figures.add("text_beside_image_ttft", [heard.first_s for heard in found])
        self.figures.add("text_beside_image_e2e", [heard.last_s for heard in found])
        self.figures.add("image_alone_e2e", [alone])
        self.figures.add("image_beside_text_e2e", spans)
        first = sorted(heard.first_s for heard in found)
        return {
            "texts": len(found),
            "ttft_p50_s": first[len(first) // 2],
            "ttft_p99_s": first[len(first) * 99 // 100],
            "alone_ttft_s": sorted(heard.first_s for heard in quiet)[BESIDE_TEXTS // 2],
            "image_alone_s": alone,
            "image_beside_s": spans,
            "image_slowdown": [round(span / alone, 3) for span in spans],
            "pauses_s": BESIDE_PAUSES_S[: len(spans)],
            "trace_alone": trace,
        }

    def _text(self) -> Heard:
        """Ask for a short text. Random weights may draw ids without characters: the first line is asked for again."""
        for _ in range(BESIDE_TRIES):
            self._seed += 1
            params = {"max_output_tokens": 8, "ignore_eos": True, "temperature": 1.0}
            try:
                return self.clients.ask(PictureRequest(text=f"hello {self._seed}", params=params), self._seed)
            except RuntimeError as error:
                if "empty answer" not in str(error):
                    raise
        raise RuntimeError(f"{BESIDE_TRIES} empty answers in a row")

    def _painting(self, side: int, points: int) -> PictureRequest:
        params = {"width": side, "height": side, "num_timesteps": points}
        return PictureRequest(text="a small red boat on a quiet lake", paints=True, params=params)

    def _edit(self) -> PictureRequest:
        params = {"num_timesteps": self.scale.points}
        return PictureRequest(text="make it blue", images=(picture(self.scale.large),), paints=True, params=params)

    def _question(self, side: int, words: int, ids: int) -> PictureRequest:
        self._seed += 1
        params = {"max_output_tokens": ids, "ignore_eos": True}
        return PictureRequest(text=(WORD * words).strip(), images=(picture(side, self._seed),), params=params)

    def _ask(self, request: PictureRequest) -> Heard:
        self._seed += 1
        return self.clients.ask(request, self._seed)

    def _together(self, requests: list[PictureRequest]) -> list[Heard]:
        self._seed += len(requests)
        return self.clients.together(requests, self._seed)


def _with(request: PictureRequest, points: int) -> PictureRequest:
    """Return the request with at most this number of flow times."""
    return replace(request, params={**request.params, "num_timesteps": min(points, request.params["num_timesteps"])})


# -- lower bounds ------------------------------------------------------------------------------------------------------


def bounds(options: argparse.Namespace) -> dict[str, Any]:
    """Return operations and lower bounds of a denoising forward pass of one branch, from this device's ceilings."""
    size = {"size": 256, "copied_bytes": 1 << 20} if options.tiny else {}
    rates = ceilings(resolve_device(options.device), **size)
    sizes, scale = Sizes(), options.scale
    found: dict[str, Any] = {"ceilings": rates}
    for side in (scale.small, scale.large):
        tokens = (side // sizes.token_pixels) ** 2
        operations = forward_operations(sizes.language, tokens, 0)
        found[f"forward_{side}"] = {"operations": operations, "floor_s": operations / rates["product_per_s"]}
    return found


def forward_operations(sizes: Language, latents: int, cached: int) -> int:
    """Return multiplications and additions of one pass over latent tokens and markers, with cached tokens."""
    inner, shared = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    weights = sizes.width * (2 * inner + 2 * shared) + 3 * sizes.width * sizes.mlp
    tokens = latents + MARKERS
    attention = 4 * tokens * (tokens + cached) * inner
    return sizes.layers * (2 * tokens * weights + attention)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--questions", type=int, help="first tokens of each size; default: --repeats, at least 3")
    parser.add_argument("--only", nargs="*", default=[], metavar="SECTION", help="names of the sections to run")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the miniature in place of the official shapes")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the server, as `up --set` takes it"
    )
    parser.add_argument("--config", type=Path, help="deployment file; default: the model's own")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no section starts")
    parser.add_argument("--port", type=int, default=18126)
    parser.add_argument("--out", type=Path, help="report file; raw samples are written beside it")
    options = parser.parse_args()
    options.scale = TINY if options.tiny else Scale()
    return options


if __name__ == "__main__":
    sys.exit(main())
