"""Host time of the captured steps around a request: cameras, prefixes and flows of Pi0.5, contexts and steps of 2-AC.

Run from the repository root: `python -m bench.launch_step [--rows 1 8] [--repeats 40]`. Prints JSON: microseconds of
the host from before a step's jobs are submitted until its launch returns, and of its collection, medians and quartiles.
By default nothing computes: weights, caches and inputs are on torch's `meta` device and a replay does nothing, so that
what is left is the host's Python and its calls of torch; `calls` counts those calls of each step, and those of them
that bring host memory to the device. On a GPU the queue is empty before each launch, and the graphs are real:
`--device cuda --official`. `--profile STEP` prints where the host's time of one kind of step goes.
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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.families.policy import Acting, Observation, Place, observation, random_modules
from bench.families.world import Rolling, Trial, random_nodes, trial
from mstar_core.engine.base import LoopSpec
from mstar_core.engine.captured import Captures
from mstar_core.engine.device import prepare_device
from mstar_core.graph.nodes import STEP, Attend, from_param
from mstar_core.worker.arrays import to_tensor
from mstar_pi05.policy import Policy
from mstar_pi05.siglip import Cameras
from mstar_pi05.sizes import IMAGE, Sizes, Tower, Vision
from mstar_pi05.weights import building
from mstar_vjepa2.ac_graph import NORMALIZE
from mstar_vjepa2.ac_predictor import ActionPredictor
from mstar_vjepa2.encoder import FrameEncoder
from mstar_vjepa2.facts import RELEASED_AC, ActionFacts, VitFacts, encoder_of

SMALL = Sizes(
    vocab=512, horizon=50, vision=Vision(width=64, layers=1, heads=2, mlp=64, image_size=224),
    language=Tower(width=64, layers=2, mlp=64, heads=2, kv_heads=1, head_dim=64),
    expert=Tower(width=64, layers=2, mlp=64, heads=2, kv_heads=1, head_dim=64),
)  # fmt: skip
SMALL_AC = ActionFacts(
    encoder=encoder_of(64, 1, 2, 64, crop=256, clip_frames=8),
    predictor=VitFacts(width=64, layers=2, heads=2, inner=64), uses_extrinsics=False, most_frames=37,
)  # fmt: skip


class Still:
    """A graph that does nothing when it is replayed."""

    def replay(self) -> None: ...


class StillCaptures(Captures):
    """Makes such graphs: the step runs once, for its outputs."""

    def graph(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        return Still(), step()


class Counting(TorchDispatchMode):
    """Counts what a step asks of the device: launches, those that bring host memory there among them."""

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
    """What steps cost, by their names. profiled: the one that is profiled."""

    device: torch.device
    profiled: str = ""
    spent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    counts: bool = False
    profile: cProfile.Profile = field(default_factory=cProfile.Profile)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Around what the host does for a step, begun on an idle device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.counts:
            with Counting(self.device) as counting:
                yield
            self.calls[name] = {"launches": counting.launches.total(), "uploads": counting.uploads}
            if self.profiled == name:
                print(counting.launches)
            return
        if name == self.profiled:
            self.profile.enable()
        start = time.perf_counter()
        yield
        self.spent[name].append(time.perf_counter() - start)
        self.profile.disable()

    def figures(self) -> dict[str, Any]:
        """Microseconds of each step: median and quartiles; its calls."""
        found = {}
        for name, samples in self.spent.items():
            low, middle, high = (round(1e6 * value, 1) for value in statistics.quantiles(samples, n=4))
            found[name] = {"us": middle, "quartiles_us": [low, high], **self.calls.get(name, {})}
        return found


# -- Pi0.5 -----------------------------------------------------------------------------------------------------------


def acting(options: argparse.Namespace, device: torch.device, rows: int) -> Acting:
    """Both engines of Pi0.5, captured for so many requests at once."""
    sizes = Sizes() if options.official else SMALL
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16
    place = Place(
        device=device, dtype=dtype, vision="bfloat16", attention="flashinfer" if on_gpu else "torch", requests=rows
    )
    if on_gpu:
        return Acting(sizes, random_modules(sizes, place), place)
    with building(device, dtype):
        policy, cameras = Policy(sizes), Cameras(sizes)
    policy.settle(20)
    modules: dict[str, nn.Module] = {"LLM": policy.eval(), "vit_encoder": cameras.eval()}
    return Acting(sizes, modules, place, lambda: StillCaptures(device))


def policy_steps(options: argparse.Namespace, clock: Clock, rows: int) -> None:
    """Cameras, prefixes and flows of so many requests at once."""
    here = acting(options, clock.device, rows)
    seen = [observation(here.sizes, 3, 60, seed=number) for number in range(rows)]
    if clock.device.type == "cuda":
        for _ in range(2):
            here.act(*seen)
            here.turner.capture()
    else:
        for _ in range(2):
            act(here, seen, Clock(clock.device), rows)
            here.turner.capture()
    clock.counts = clock.device.type != "cuda"
    for _ in range(options.repeats + 1):
        act(here, seen, clock, rows)
        clock.counts = False


def act(here: Acting, seen: list[Observation], clock: Clock, rows: int) -> None:
    """One request each, step by step."""
    turner, runners = here.turner, here.turner.runners
    prefixes = [
        torch.cat([torch.full((len(each.images) * here.sizes.vision.tokens,), IMAGE), each.ids]) for each in seen
    ]
    handles, arrays = [turner.open(len(prefix)) for prefix in prefixes], [each.images.numpy() for each in seen]
    with torch.inference_mode():
        with clock.step(f"cameras of {rows}: launch"):
            keys = [
                turner.submit(
                    "vit_encoder", handle, {"images": to_tensor(array, "uint8"), "tokens": prefix}, outputs=("features",)
                )
                for handle, array, prefix in zip(handles, arrays, prefixes, strict=True)
            ]
            running = runners["vit_encoder"].launch()
        assert running is not None
        with clock.step(f"cameras of {rows}: collect"):
            turner.take(runners["vit_encoder"].collect(running))
        with clock.step(f"prefixes of {rows}: launch"):
            for handle, prefix, key in zip(handles, prefixes, keys, strict=True):
                inputs = {"tokens": prefix, "embeds": turner.done[key].outputs["features"]}
                turner.submit("LLM", handle, inputs, attend=Attend(mask="full"), outputs=())
            running = runners["LLM"].launch()
        assert running is not None
        with clock.step(f"prefixes of {rows}: collect"):
            turner.take(runners["LLM"].collect(running))
        flows = [_flow(each) for each in seen]
        with clock.step(f"flows of {rows}: launch"):
            for handle, (inputs, loop) in zip(handles, flows, strict=True):
                attend = Attend(mask="full", write=False)
                turner.submit("LLM", handle, inputs, loop=loop, outputs=("robot_actions",), attend=attend)
            running = runners["LLM"].launch()
        assert running is not None
        with clock.step(f"flows of {rows}: collect"):
            turner.take(runners["LLM"].collect(running))
    for handle in handles:
        turner.close(handle)
    turner.done.clear()


def _flow(seen: Observation) -> tuple[dict[str, Tensor], LoopSpec]:
    shape = seen.noise.shape
    inputs = {
        "actions": seen.noise, "scale": torch.ones(shape), "offset": torch.zeros(shape),
        from_param("num_steps"): torch.tensor(seen.steps),
    }  # fmt: skip
    return inputs, LoopSpec(max_iters=seen.steps, carry={"actions": "actions"}, fused=True)


# -- V-JEPA 2-AC -----------------------------------------------------------------------------------------------------


def rolling(options: argparse.Namespace, device: torch.device) -> Rolling:
    """Both engines of 2-AC, captured."""
    facts, on_gpu, frames = (
        replace(RELEASED_AC, most_frames=37) if options.official else SMALL_AC,
        device.type == "cuda",
        37,
    )
    place = Place(device=device, dtype=torch.bfloat16, attention="flashinfer" if on_gpu else "torch", requests=8)
    if on_gpu:
        return Rolling(facts, random_nodes(facts, place), place, frames)
    with building(device, torch.bfloat16):
        modules: dict[str, nn.Module] = {
            "video_encoder": FrameEncoder(facts.encoder),
            "ac_predictor": ActionPredictor(facts),
        }
    return Rolling(
        facts, {name: each.eval() for name, each in modules.items()}, place, frames, lambda: StillCaptures(device)
    )


def world_steps(options: argparse.Namespace, clock: Clock) -> None:
    """The context pass of seven frames behind which a rollout of eight steps begins, and that rollout."""
    here = rolling(options, clock.device)
    wanted = trial(here.facts, 8, 1, 8)
    wanted = replace(wanted, clip=wanted.clip.to(clock.device))
    for _ in range(2):
        if clock.device.type == "cuda":
            here.whole(wanted)
        else:
            imagine(here, wanted, Clock(clock.device))
        here.turner.capture()
    clock.counts = clock.device.type != "cuda"
    for _ in range(options.repeats + 1):
        imagine(here, wanted, clock)
        clock.counts = False


def imagine(here: Rolling, wanted: Trial, clock: Clock) -> None:
    """One request, step by step."""
    turner, runner = here.turner, here.turner.runners["ac_predictor"]
    tokens, seen = here.facts.encoder.frame_tokens + here.facts.conditions, len(wanted.clip)
    with torch.inference_mode():
        handle, latents = here.encode(wanted)
        inputs = {
            "given_frames": latents[:-1], "given_actions": wanted.known, "given_states": wanted.states[:-1],
            NORMALIZE: torch.tensor(True), STEP: torch.tensor(0),
        }  # fmt: skip
        attend = Attend(mask="full", positions="shared", tokens=tokens)
        with clock.step(f"context of {seen - 1} frames: launch"):
            turner.submit("ac_predictor", handle, inputs, loop=LoopSpec(max_iters=seen - 1, fused=True), attend=attend)
            running = runner.launch()
        assert running is not None
        with clock.step(f"context of {seen - 1} frames: collect"):
            turner.take(runner.collect(running))
        inputs = {
            "frame": latents[-1:], "state": wanted.states[-1], "actions": wanted.candidates[0],
            NORMALIZE: torch.tensor(True), STEP: torch.tensor(0),
        }  # fmt: skip
        horizon = wanted.candidates.shape[1]
        loop = LoopSpec(max_iters=horizon, carry={"next_frame": "frame", "next_state": "state"}, fused=True)
        attend = replace(attend, keep="loop")
        with clock.step(f"rollout of {horizon} steps: launch"):
            turner.submit("ac_predictor", handle, inputs, loop=loop, attend=attend, outputs=("next_frame",))
            running = runner.launch()
        assert running is not None
        with clock.step(f"rollout of {horizon} steps: collect"):
            turner.take(runner.collect(running))
    turner.close(handle)
    turner.done.clear()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8], help="requests of Pi0.5 at once")
    parser.add_argument("--no-world", action="store_true", help="leave 2-AC out")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--device", default="meta", choices=("meta", "cpu", "cuda"))
    parser.add_argument("--official", action="store_true", help="the official shapes in place of small ones")
    parser.add_argument("--profile", default="", metavar="STEP", help="for example `flows of 8: launch`")
    options = parser.parse_args()
    device = torch.empty(0, device=options.device).device
    prepare_device(device)
    if device.type != "cuda":  # there is nothing to pin: a copy stands in for it
        torch.Tensor.pin_memory = torch.Tensor.clone  # type: ignore[method-assign, assignment]
    clock = Clock(device, options.profile)
    for rows in options.rows:
        policy_steps(options, clock, rows)
    if not options.no_world:
        world_steps(options, clock)
    print(json.dumps({"device": options.device, "torch": torch.__version__}))
    for name, figures in clock.figures().items():
        print(json.dumps({"step": name, **figures}))
    if options.profile:
        pstats.Stats(clock.profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
