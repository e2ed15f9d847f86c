"""Sections of a run. Each applies one load to a deployment and records client results and process costs."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from bench.serving import load
from bench.serving.client import Heard
from bench.serving.deployment import Served, gpu_state
from bench.serving.figures import Figures
from bench.serving.load import Storm, Target
from bench.serving.watch import TELEMETRY_S, watched
from mstarctl.bench.measure.playback import silences

BUFFERS_S: Final = (0.0, 0.1)
"""Playback buffers: seconds between the first chunk and the start of playback."""

GAP_S: Final = 0.1
COUNTED_S: Final = 30.0
T = TypeVar("T")
GOOD_FIRST_S: Final = 0.5
"""Goodput objective: first audio within this time, and no gap with the longest start buffer."""


@dataclass(slots=True)
class Run:
    """Measurements of one deployment. Owned by the caller, filled by the sections in order."""

    served: Served
    target: Target
    figures: Figures
    sample_rate: int = 24000
    next_seed: int = 1
    errors: Counter[str] = field(default_factory=Counter)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def numbers(self, count: int) -> int:
        """Reserve `count` request numbers and return the first, so that no two requests are alike."""
        first, self.next_seed = self.next_seed, self.next_seed + count
        return first

    def closed(self, streams: int, rounds: int) -> None:
        """Measure `streams` clients with `rounds` requests each."""
        label = f"streams_{streams}"
        with self.section(label):
            made = self.drive(load.closed_loop(self.target, streams, rounds, self.numbers(streams * rounds)))
        self.note(made.heard, label)
        good = [heard for heard in made.heard if not heard.code]
        self.figures.add(f"ids_per_s_{label}", [self.target.ids * len(good) / made.wall_s], "1/s")
        sound = sum(map(self.sound_s, good))
        self.figures.add(f"audio_s_per_s_{label}", [sound / made.wall_s], "1")

    def open(self, streams: float, span_s: float) -> None:
        """Measure Poisson arrivals for `span_s` seconds, at a rate that keeps `streams` requests playing."""
        label, each_s = f"open_{streams:g}", self.expected_sound_s()
        per_s = streams / each_s
        with self.section(label) as facts:
            first = self.numbers(math.ceil(3 * per_s * span_s))
            made = self.drive(load.open_loop(self.target, per_s, span_s, first))
        facts |= {"arrivals_per_s": round(per_s, 3), "span_s": span_s, "sound_s_each": round(each_s, 3)}
        self.note(made.heard, label)
        self.figures.add(f"goodput_{label}", [sum(map(self.is_good, made.heard)) / made.wall_s], "1/s")
        self.figures.add(f"good_share_{label}", [sum(map(self.is_good, made.heard)) / max(1, len(made.heard))], "1")

    def bursts(self, count: int, rounds: int) -> None:
        """Measure `count` simultaneous requests, `rounds` times; each round starts after the previous one."""
        label = f"burst_{count}"
        with self.section(label):
            made = [self.drive(load.burst(self.target, count, self.numbers(count))) for _ in range(rounds)]
        self.note([heard for each in made for heard in each.heard], label)

    def storm(self, plan: Storm) -> None:
        """Measure requests many of which disconnect. Afterwards all must be accounted for and no resource held."""
        warm = max(plan.at_once, plan.requests // 10)
        outcomes: Counter[str] = Counter()
        with self.section("storm") as facts:
            counted = handled(self.served.metrics())
            self._blow(plan, 0, warm, outcomes)
            facts["held_after_warm_up"] = self.served.wait_clean()
            before = self.served.resident_bytes()
            wall_s = self._blow(plan, 1, plan.requests - warm, outcomes)
            held = self.served.wait_clean()
            after = self.served.resident_bytes()
        grown = {name: after[name] - before[name] for name in after if not name.endswith(" most")}
        left = self._unaccounted(counted + plan.requests)
        facts |= {"outcomes": dict(outcomes), "held": held, "grown_bytes": grown, "unaccounted": left}
        self.figures.add("storm_requests_per_s", [(plan.requests - warm) / wall_s], "1/s")
        self.figures.add("storm_held", [float(len(held))], "1")
        self.figures.add("storm_unaccounted", [float(left)], "1")
        for name, size in grown.items():
            self.figures.add(f"storm_growth_per_10000_{name}", [size * 1e4 / max(1, plan.requests - warm)], "B")
        self.errors.update({code: n for code, n in outcomes.items() if code not in ("", "left")})

    def _unaccounted(self, total: float) -> int:
        """Return the requests that the api has not counted, after the time it needs to notice disconnects."""
        end = time.monotonic() + COUNTED_S
        while (left := round(total - handled(self.served.metrics()))) and time.monotonic() < end:
            time.sleep(TELEMETRY_S)
        return left

    def _blow(self, plan: Storm, part: int, requests: int, outcomes: Counter[str]) -> float:
        part_of = replace(plan, requests=requests, seed=plan.seed + part)
        wall_s: float = self.drive(load.storm(self.target, part_of, lambda heard: outcomes.update([heard.code])))
        return wall_s

    def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a load on a new event loop."""
        return asyncio.run(coroutine)

    def note(self, heard: list[Heard], label: str) -> None:
        """Record the clients' metrics. A failed request counts in `errors` only."""
        self.errors.update(each.code for each in heard if each.code)
        good = [each for each in heard if not each.code and each.marks]
        silent = sum(1 for each in heard if not each.code and not each.marks)
        if silent:
            self.errors["no_sound"] += silent
        first = [each.marks[0] - each.sent_s for each in good]
        inside = [float(each.usage.get("ttft_ms", math.nan)) / 1e3 for each in good]
        spans = [each.ended_s - each.sent_s for each in good]
        gaps = [gaps_of(each.marks) for each in good]
        add = self.figures.add
        add(f"first_audio_{label}", first)
        add(f"first_audio_in_api_{label}", inside)
        add(f"first_audio_outside_api_{label}", [one - other for one, other in zip(first, inside, strict=True)])
        add(f"queued_{label}", [float(each.usage.get("queue_ms", math.nan)) / 1e3 for each in good])
        add(f"request_{label}", spans)
        add(f"realtime_factor_{label}", [s / self.sound_s(h) for s, h in zip(spans, good, strict=True)], "1")
        add(f"sound_each_{label}", [self.sound_s(each) for each in good])
        add(f"longest_gap_{label}", [max(each, default=0.0) for each in gaps])
        add(f"chunk_gap_{label}", [gap for each in gaps for gap in each])
        add(f"gaps_over_100ms_{label}", [float(sum(gap > GAP_S for gap in each)) for each in gaps], "1")
        for buffer_s in BUFFERS_S:
            dry = [self.dry(each, buffer_s) for each in good]
            name = f"buffer_{round(1e3 * buffer_s)}ms_{label}"
            add(f"underruns_{name}", [float(len(each)) for each in dry], "1")
            add(f"underrun_length_{name}", [moment for each in dry for moment in each])
            if dry:
                add(f"requests_with_underrun_{name}", [sum(map(bool, dry)) / len(dry)], "1")

    def sound_s(self, heard: Heard) -> float:
        """Return the seconds of audio that a client received."""
        return sum(heard.samples) / self.sample_rate

    def expected_sound_s(self) -> float:
        """Return the seconds of audio per request, from the measurements so far."""
        known = [s for name, values in self.figures.samples.items() if name.startswith("sound_each_") for s in values]
        if not known:
            raise RuntimeError("no request has been measured yet: the length of an open loop's requests is not known")
        return sum(known) / len(known)

    def dry(self, heard: Heard, buffer_s: float) -> list[float]:
        """Return the gaps that a listener would hear, in seconds."""
        return silences(heard.marks, [samples / self.sample_rate for samples in heard.samples], buffer_s)

    def is_good(self, heard: Heard) -> bool:
        """Return whether a request met the objective."""
        if heard.code or not heard.marks or heard.marks[0] - heard.sent_s > GOOD_FIRST_S:
            return False
        return not self.dry(heard, BUFFERS_S[-1])

    @contextmanager
    def section(self, label: str) -> Iterator[dict[str, Any]]:
        """Record the costs of every process during the block. Yields the section's facts, which the block extends."""
        with watched(self.served, self.figures, label) as facts:
            yield facts
        facts["gpu"] = gpu_state()
        captured = sum(value for name, value in facts["telemetry"].items() if name.endswith(".graphs_captured"))
        if captured:
            self.errors["captured_while_timed"] += int(captured)
        self.sections[label] = facts


def gaps_of(marks: list[float]) -> list[float]:
    """Return the seconds between chunks."""
    return [later - earlier for earlier, later in itertools.pairwise(marks)]


def handled(metrics: dict[str, float]) -> float:
    """Return the number of requests to `/generate` that were answered, refused or disconnected."""
    counted = (name for name in metrics if name.startswith("mstar_requests_total{") and 'route="generate"' in name)
    return sum(metrics[name] for name in counted)
