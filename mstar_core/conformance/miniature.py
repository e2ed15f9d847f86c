"""A model with its tiny checkpoint, built once for all checks of it, and what its samples give when served alone."""

from __future__ import annotations

import functools
import importlib
import shutil
import tempfile
import weakref
from collections.abc import Collection
from pathlib import Path

from mstar_core.conformance.bench import Bench
from mstar_core.conformance.desk import Ask, make_processor
from mstar_core.conformance.material import asks_of
from mstar_core.conformance.nodes import Faults, Settings, build_nodes
from mstar_core.conformance.outcome import Outcome
from mstar_core.errors import EngineError, PluginError
from mstar_core.plugin.conformance import CheckSkipped, Subject
from mstar_core.plugin.spec import ModelSpec


class Miniature:
    """A served model in small. Owns the folder of its checkpoint, which goes when nobody uses it any more."""

    def __init__(self, spec: ModelSpec) -> None:
        if spec.model is None or spec.processor is None:
            raise CheckSkipped("this version carries no model code")
        if spec.tiny is None:
            raise CheckSkipped("the model has no tiny checkpoint")
        if not spec.samples:
            raise PluginError(f"{spec.name} has no samples", hint="add a Sample for each kind of request")
        home = Path(tempfile.mkdtemp(prefix="mstar-conformance-"))
        weakref.finalize(self, shutil.rmtree, home, ignore_errors=True)
        self.folder = _written(spec.tiny, home / spec.name)
        self.spec = spec.bound(self.folder, spec.model_kwargs)
        self.asks = asks_of(self.spec)
        self.processor = make_processor(self.spec, self.folder)
        self.built = build_nodes(self.spec, self.folder)
        self._alone: dict[str, Outcome] = {}
        self.walks_alone: set[str] = set()

    def bench(
        self,
        settings: Settings | None = None,
        *,
        ranks: int = 1,
        faults: Faults | None = None,
        slow: Collection[tuple[str, str]] = (),
    ) -> Bench:
        """A deployment of it."""
        return Bench(
            self.spec, self.folder, settings, ranks=ranks, built=self.built, processor=self.processor, faults=faults,
            slow=slow,
        )  # fmt: skip

    def alone(self, ask: Ask) -> Outcome:
        """What a request gives when nothing else is there: one rank, whole prefill, an empty cache. Kept."""
        key = repr((ask.text, ask.order, sorted(ask.params.items()), sorted(ask.outputs), ask.seed))
        if key not in self._alone:
            bench = self.bench()
            (outcome,) = bench.ask(ask)
            if outcome.status != "finished":
                raise EngineError(f"{ask.name} did not finish", outcome.cause)
            self.walks_alone |= bench.post.walks
            self._alone[key] = outcome
        return self._alone[key]

    @property
    def walks(self) -> set[str]:
        """Names of all walks."""
        return {name for partition in self.spec.partitions for name in partition.walks}

    @property
    def has_cache(self) -> bool:
        """Whether any node keeps a cache."""
        return any(node.kv is not None for node in self.spec.nodes)

    @property
    def can_spread(self) -> bool:
        """Whether it has nodes enough for two ranks."""
        return len(self.built) > 1


def miniature(subject: Subject) -> Miniature:
    """The subject's model in small. Raises CheckSkipped when this version cannot serve it."""
    return _miniature(_Same(subject.model))


class _Same:
    """A spec as a key: the very same object. Specs hold mappings, so they have no hash of their own."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.spec is self.spec


@functools.lru_cache(maxsize=1)
def _miniature(key: _Same) -> Miniature:
    return Miniature(key.spec)


def _written(target: str, folder: Path) -> Path:
    """Write the tiny checkpoint as a deployment does: the function makes the folder and gives back where it is."""
    module, _, name = target.partition(":")
    given = vars(importlib.import_module(module))[name](folder)
    if given is None or not Path(given).is_dir():
        raise PluginError(f"{target} gave {given!r}", "it gives the folder that it wrote", "return the folder")
    return Path(given)
