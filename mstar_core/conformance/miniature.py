"""A model with its tiny checkpoint, built once for all checks, and the answers of its samples served alone."""

from __future__ import annotations

import functools
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from mstar_core.api.preprocess.child import load_processor
from mstar_core.config.deployment import Plan
from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.conformance.nodes import Faults, RuntimeSettings, build_nodes
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.conformance.samples import asks_of
from mstar_core.errors import EngineError, PluginError
from mstar_core.plugin.conformance import CheckSkipped, Subject
from mstar_core.plugin.spec import ModelSpec
from mstar_core.targets import load_target
from mstar_core.worker.peer_memory.transport import PeerMemory


@dataclass(frozen=True, slots=True)
class Alone:
    """A request served alone: its answer, the walks that it took, and the forward passes of each node."""

    outcome: RequestOutcome
    walks: frozenset[str]
    runs: Mapping[str, int]


class Miniature:
    """A model with its tiny checkpoint. Owns the checkpoint folder, which is removed with the object."""

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
        self.processor = load_processor(spec.processor, self.folder, self.spec.model_kwargs)
        self.built = build_nodes(self.spec, self.folder)
        self._alone: dict[str, Alone] = {}

    def runtime(
        self,
        settings: RuntimeSettings | None = None,
        *,
        ranks: int = 1,
        plan: Plan | None = None,
        faults: Faults | None = None,
        slow: Collection[tuple[str, str]] = (),
        peer_memory: Callable[[str, Collection[str]], PeerMemory] | None = None,
    ) -> LocalRuntime:
        """Return a new deployment of the model."""
        return LocalRuntime(
            self.spec,
            self.folder,
            settings,
            ranks=ranks,
            plan=plan,
            built=self.built,
            processor=self.processor,
            faults=faults,
            slow=slow,
            peer_memory=peer_memory,
        )

    def alone(self, ask: SampleRequest) -> RequestOutcome:
        """Return the answer of a request served alone: one rank, whole prefill, empty cache. Cached."""
        return self.served_alone(ask).outcome

    def served_alone(self, ask: SampleRequest) -> Alone:
        """Serve a request alone. Cached. Raises EngineError if it does not finish."""
        key = repr((ask.text, ask.order, sorted(ask.params.items()), sorted(ask.outputs), ask.seed))
        if key not in self._alone:
            runs = Counter[str]()
            runtime = self.runtime(faults=lambda node, handles: runs.update([node]))
            (outcome,) = runtime.ask(ask)
            if outcome.status != "finished":
                raise EngineError(f"{ask.name} did not finish", outcome.cause)
            self._alone[key] = Alone(outcome, frozenset(runtime.post.walks), runs)
        return self._alone[key]

    @property
    def walks(self) -> set[str]:
        """Names of all walks of the model."""
        return {name for partition in self.spec.partitions for name in partition.walks}

    @property
    def has_cache(self) -> bool:
        """Whether any node has a KV cache."""
        return any(node.kv is not None for node in self.spec.nodes)

    @property
    def can_spread(self) -> bool:
        """Whether the model has enough nodes for two ranks."""
        return len(self.built) > 1


def miniature(subject: Subject) -> Miniature:
    """Return the miniature of the subject's model. Raises CheckSkipped if this version cannot serve it."""
    return _miniature(_Same(subject.model))


class _Same:
    """Cache key that compares a spec by identity. Specs hold mappings and are not hashable."""

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
    """Write the tiny checkpoint as a deployment does: the target function makes the folder and returns its path."""
    written = load_target(target)(folder)
    if written is None or not Path(written).is_dir():
        raise PluginError(
            f"{target} returned {written!r}", "it must return the folder that it wrote", "return the folder"
        )
    return Path(written)
