"""The measurement of BAGEL, tried with the miniature on a CPU, and its checkpoint with small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.families.bagel_checkpoint import write_random
from bench.gpu_bagel import forward_operations
from mstar_bagel.checkpoint.config import Autoencoder, Language, Sizes, Vision, read_sizes
from mstar_bagel.model import Bagel
from mstar_bagel.plugin import mstar_models
from mstar_bagel.sources.download import check_files
from mstar_core.plugin.model import ModelContext
from tests.bench.test_families import measured
from tests.fakes.ports import free_port

pytestmark = pytest.mark.timeout(300)
SMALL = Sizes(
    language=Language(width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=96, vocab=400, max_positions=1024),
    vision=Vision(width=32, layers=1, heads=2, mlp=48, grid=70),
    vae=Autoencoder(width=32, multipliers=(1, 1, 1, 1), blocks=1, channels=4),
)


@pytest.mark.slow
def test_every_load_of_the_server(tmp_path: Path) -> None:
    report = measured(tmp_path / "bagel.json", "bench.gpu_bagel", "--repeats", "1", "--port", str(free_port()))
    assert not any("error" in section for section in report["sections"].values())
    metrics = report["metrics"]
    cached = ("t2i_64_cached_0.3", "edit_64_cached_0.5")
    for name in (
        "t2i_64_guided",
        "t2i_64_plain",
        "t2i_32",
        "edit_64",
        *cached,
        "i2t_32_ttft",
        "text_beside_image_ttft",
    ):
        assert metrics[name]["p50"] > 0
    assert metrics["i2t_4_6_clients_3_e2e"]["n"] == 3
    assert report["sections"]["server"]["result"]["held"] == {}


def test_a_forward_pass_at_full_size_has_the_operations_of_the_targets() -> None:
    """60.3 TFLOP for 4,098 tokens: docs of the targets."""
    assert forward_operations(Language(), 4096, 0) == pytest.approx(60.3e12, rel=0.01)


def test_a_checkpoint_of_random_weights_is_read(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "bagel", seed=1, sizes=SMALL)
    check_files(folder)
    sizes = read_sizes(folder)
    assert (sizes.language, sizes.vision, sizes.vae) == (SMALL.language, SMALL.vision, SMALL.vae)
    spec = mstar_models()[0].bound(folder, {})
    model = Bagel(ModelContext(spec=spec, folder=folder, device=torch.device("cpu"), dtype=torch.float32))
    language = model.get_submodule(spec.node("LLM"))
    assert isinstance(language, torch.nn.Module)
    assert all(value.isfinite().all() for value in language.parameters())
    assert json.loads((folder / "llm_config.json").read_text())["vocab_size"] == SMALL.language.vocab
