"""Host time of the captured steps of a request: cameras, prefixes and flows of Pi0.5, contexts and rollouts of 2-AC.

Run from the repository root: `python -m bench.launch_step [--rows 1 8] [--repeats 60]`. Prints JSON, a line per step:
host microseconds from the submission of its jobs until its launch returns, started on an idle device, and of its
collection, as medians and quartiles. Replays do nothing and sizes are small, so that only host work remains. A second
run on torch's `meta` device counts device calls per step: launches beside the replays, and those that copy from host
memory. `--device cuda --official` runs real graphs on a GPU; `replay_us` is the host time of their launches.
`--profile STEP` prints where the time of one kind of step goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.families.policy import Acting, Observation, Place, observation, random_modules
from bench.families.world import Rolling, Trial, random_nodes, trial
from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.device import prepare_device
from mstar_core.engine.runner import NodeRunner
from mstar_core.graph.declare.nodes import STEP, Attend, from_param
from mstar_core.weights.building import building
from mstar_core.worker.arrays import to_tensor
from mstar_pi05.checkpoint.config import IMAGE, Sizes, Tower, Vision
from mstar_pi05.nodes.policy import Policy
from mstar_pi05.nodes.siglip import Cameras
from mstar_vjepa2.checkpoint.config import RELEASED_AC, ActionConfig, VitConfig, encoder_of
from mstar_vjepa2.graph import NORMALIZE
from mstar_vjepa2.nodes.ac_predictor import ActionPredictor
from mstar_vjepa2.nodes.encoder import FrameEncoder

_TOWER = Tower(width=64, layers=2, mlp=64, heads=2, kv_heads=1, head_dim=64)
SMALL = Sizes(vocab=512, horizon=50, vision=Vision(width=64, layers=1, heads=2, mlp=64), language=_TOWER, expert=_TOWER)
SMALL_AC = ActionConfig(
    encoder=encoder_of(64, 1, 2, 64, crop=256, clip_frames=8),
    predictor=VitConfig(width=64, layers=2, heads=2, inner=64),
    uses_extrinsics=False,
    most_frames=37,
)
FRAMES, CONTEXT, HORIZON = 37, 8, 8
READ = Attend(mask="full", write=False)


class Still:
    """A fake graph whose replay does nothing."""

    def replay(self) -> None: ...


class StillCache(GraphCache):
    """Capture that runs the step once for its outputs and returns fake graphs."""

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        return Still(), step()


class Counting(TorchDispatchMode):
    """Counter of a step's device calls: launches, and those that copy from host memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.uploads = 0
        self._device = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name, given = func.overloadpacket.__name__, [each for each in args if isinstance(each, torch.Tensor)]
        if not isinstance(made, torch.Tensor) or made.device.type != self._device:
            return made
        own = made.untyped_storage()._cdata
        if name.endswith("_") or all(each.untyped_storage()._cdata != own for each in given):
            self.launches[name] += name not in ("empty", "empty_like", "new_empty")
            self.uploads += any(each.device.type == "cpu" for each in given)
        return made


@dataclass(slots=True)
class Clock:
    """Measure steps by name. counts: count their device calls instead. profiled: the one step to profile."""

    device: torch.device
    counts: bool = False
    profiled: str = ""
    spent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    replays: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    asked: dict[str, Counting] = field(default_factory=dict)
    profile: cProfile.Profile = field(default_factory=cProfile.Profile)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time the host work of a step, started on an idle device."""
        if self.counts:
            with Counting(self.device) as self.asked[name]:
                yield
            return
        with timed_replays() if self.device.type == "cuda" else nullcontext([0.0]) as replays:
            if name == self.profiled:
                self.profile.enable()
            start = time.perf_counter()
            yield
            self.spent[name].append(time.perf_counter() - start)
            self.profile.disable()
        self.replays[name].append(sum(replays))

    def run(self, what: str, runner: NodeRunner, submit: Callable[[], None], take: Callable[[Any], None]) -> None:
        """Run one step: submit its jobs, launch and collect."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        with self.step(f"{what}, launch"):
            submit()
            running = runner.launch()
        assert running is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        with self.step(f"{what}, collect"):
            take(runner.collect(running))

    def figures(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return median and quartiles of each step in microseconds, by name."""
        for name, samples in self.spent.items():
            low, middle, high = (round(1e6 * value, 1) for value in statistics.quantiles(samples, n=4))
            replay = round(1e6 * statistics.median(self.replays[name]), 1)
            yield name, {"us": middle, "quartiles_us": [low, high], "replay_us": replay}


@contextmanager
def timed_replays() -> Iterator[list[float]]:
    """Record the host seconds of each graph launch."""
    plain, found = torch.cuda.CUDAGraph.replay, list[float]()

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        start = time.perf_counter()
        plain(graph)
        found.append(time.perf_counter() - start)

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.replay = plain  # type: ignore[method-assign]


# -- Pi0.5 -----------------------------------------------------------------------------------------------------------


def policy_steps(options: argparse.Namespace, clock: Clock) -> None:
    """Measure cameras, prefixes and flows of several concurrent requests."""
    here = _acting(options, clock.device)
    for rows in options.rows:
        seen = [observation(here.sizes, 3, 60, seed=number) for number in range(rows)]
        for _ in range(2):
            _act(here, seen, Clock(clock.device))
            here.driver.capture()
        for _ in range(1 if clock.counts else options.repeats):
            _act(here, seen, clock)


def _acting(options: argparse.Namespace, device: torch.device) -> Acting:
    sizes, dtype = Sizes() if options.official else SMALL, torch.bfloat16
    place = Place(
        device=device, dtype=dtype, vision="bfloat16", attention=options.attention, requests=max(options.rows)
    )
    if device.type == "cuda":
        return Acting(sizes, random_modules(sizes, place), place)
    with building(device, dtype):
        policy, cameras = Policy(sizes), Cameras(sizes)
    policy.settle(20)
    modules: dict[str, nn.Module] = {"LLM": policy.eval(), "vit_encoder": cameras.eval()}
    return Acting(sizes, modules, place, lambda: StillCache(device))


def _act(here: Acting, seen: list[Observation], clock: Clock) -> None:
    """Run one request each, step by step. Images have the layout of shared memory."""
    driver, count = here.driver, len(seen)
    language, tower = driver.runners["LLM"], driver.runners["vit_encoder"]
    places, arrays = here.sizes.vision.tokens, [each.images.numpy() for each in seen]
    prefixes = [torch.cat([torch.full((len(each.images) * places,), IMAGE), each.ids]) for each in seen]
    handles, flows = [driver.open(len(prefix)) for prefix in prefixes], [_flow(each) for each in seen]
    keys: list[int] = []

    def look() -> None:
        for handle, array, prefix in zip(handles, arrays, prefixes, strict=True):
            inputs = {"images": to_tensor(array, "uint8"), "tokens": prefix}
            keys.append(driver.submit("vit_encoder", handle, inputs, outputs=("features",)))

    def read() -> None:
        for handle, prefix, key in zip(handles, prefixes, keys, strict=True):
            inputs = {"tokens": prefix, "embeds": driver.done[key].outputs["features"]}
            driver.submit("LLM", handle, inputs, attend=Attend(mask="full"), outputs=())

    def flow() -> None:
        for handle, (inputs, loop) in zip(handles, flows, strict=True):
            driver.submit("LLM", handle, inputs, loop=loop, outputs=("robot_actions",), attend=READ)

    with torch.inference_mode():
        clock.run(f"cameras of {count}", tower, look, driver.take)
        clock.run(f"prefixes of {count}", language, read, driver.take)
        clock.run(f"flows of {count}", language, flow, driver.take)
    _close(here, handles)


def _flow(seen: Observation) -> tuple[dict[str, Tensor], LoopSpec]:
    shape = seen.noise.shape
    inputs = {
        "actions": seen.noise,
        "scale": torch.ones(shape),
        "offset": torch.zeros(shape),
        from_param("num_steps"): torch.tensor(seen.steps),
    }
    return inputs, LoopSpec(max_iters=seen.steps, carry={"actions": "actions"}, fused=True)


# -- V-JEPA 2-AC -----------------------------------------------------------------------------------------------------


def world_steps(options: argparse.Namespace, clock: Clock) -> None:
    """Measure the context pass and the rollout after it."""
    here = _rolling(options, clock.device)
    wanted = trial(here.facts, CONTEXT, 1, HORIZON)
    wanted = replace(wanted, clip=wanted.clip.to(clock.device))
    for _ in range(2):
        _imagine(here, wanted, Clock(clock.device))
        here.driver.capture()
    for _ in range(1 if clock.counts else options.repeats):
        _imagine(here, wanted, clock)


def _rolling(options: argparse.Namespace, device: torch.device) -> Rolling:
    facts = replace(RELEASED_AC, most_frames=FRAMES) if options.official else SMALL_AC
    place = Place(device=device, dtype=torch.bfloat16, attention=options.attention, requests=8)
    if device.type == "cuda":
        return Rolling(facts, random_nodes(facts, place), place, FRAMES)
    with building(device, place.dtype):
        encoder, predictor = FrameEncoder(facts.encoder), ActionPredictor(facts)
    modules: dict[str, nn.Module] = {"video_encoder": encoder.eval(), "ac_predictor": predictor.eval()}
    return Rolling(facts, modules, place, FRAMES, lambda: StillCache(device))


def _imagine(here: Rolling, wanted: Trial, clock: Clock) -> None:
    """Run one request step by step."""
    driver, known = here.driver, len(wanted.clip) - 1
    whole = Attend(mask="full", positions="shared", tokens=here.facts.encoder.frame_tokens + here.facts.conditions)
    numbers = {NORMALIZE: torch.tensor(True), STEP: torch.tensor(0)}
    with torch.inference_mode():
        handle, latents = here.encode(wanted)

        def read() -> None:
            inputs = {"given_frames": latents[:-1], "given_actions": wanted.known, "given_states": wanted.states[:-1]}
            loop = LoopSpec(max_iters=known, fused=True)
            driver.submit("ac_predictor", handle, {**inputs, **numbers}, loop=loop, attend=whole)

        def roll() -> None:
            inputs = {"frame": latents[-1:], "state": wanted.states[-1], "actions": wanted.candidates[0]}
            loop = LoopSpec(max_iters=HORIZON, carry={"next_frame": "frame", "next_state": "state"}, fused=True)
            attend = replace(whole, keep="loop")
            driver.submit(
                "ac_predictor", handle, {**inputs, **numbers}, loop=loop, attend=attend, outputs=("next_frame",)
            )

        predictor = driver.runners["ac_predictor"]
        clock.run(f"context of {known} frames", predictor, read, driver.take)
        clock.run(f"rollout of {HORIZON} steps", predictor, roll, driver.take)
    _close(here, [handle])


def _close(here: Acting | Rolling, handles: list[Handle]) -> None:
    for handle in handles:
        here.driver.close(handle)
    here.driver.done.clear()


def main() -> None:
    """Measure and print the figures."""
    options = read_options()
    clocks = [Clock(torch.empty(0, device=options.device).device, profiled=options.profile)]
    if options.device == "cpu":
        clocks.append(Clock(torch.device("meta"), counts=True))
    prepare_device(clocks[0].device)
    for clock in clocks:
        if clock.device.type == "meta":  # there is no pinned memory without a GPU: use a copy
            torch.Tensor.pin_memory = torch.Tensor.clone  # type: ignore[method-assign, assignment]
        if options.rows:
            policy_steps(options, clock)
        if not options.no_world:
            world_steps(options, clock)
    asked, lines = clocks[-1].asked, []
    for name, found in clocks[0].figures():
        known = asked.get(name)
        counts = {} if known is None else {"launches": known.launches.total(), "uploads": known.uploads}
        lines.append(f"{json.dumps(name)}: {json.dumps({**found, **counts})}")
    print("{" + ",\n".join(lines) + "}", flush=True)
    if options.profile:
        print(asked[options.profile].launches if options.profile in asked else "")
        pstats.Stats(clocks[0].profile).sort_stats("tottime").print_stats(45)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8], help="requests of Pi0.5 at once")
    parser.add_argument("--no-world", action="store_true", help="leave 2-AC out")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--official", action="store_true", help="the official shapes in place of small ones")
    parser.add_argument("--attention", help="backend of the cache; default flashinfer, torch on the CPU")
    parser.add_argument("--profile", default="", metavar="STEP", help="for example `flows of 8, launch`")
    options = parser.parse_args()
    options.attention = options.attention or ("flashinfer" if options.device == "cuda" else "torch")
    return options


if __name__ == "__main__":
    main()
