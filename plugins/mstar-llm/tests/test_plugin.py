"""Embedding models: the last hidden state, of length 1, through the real runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.plugin.processor import PromptRequest
from mstar_llm.checkpoint.config import read_config
from mstar_llm.plugin import Params, bind, llm
from mstar_llm.processor import Processor

from .reference import CASES, write_checkpoint


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> tuple[Path, Any]:
    """A checkpoint in the layout of Qwen3-Embedding, and the model of transformers."""
    folder = tmp_path_factory.mktemp("embedding")
    model = write_checkpoint(CASES["qwen3"], folder, vocab_size=300)
    weights: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    kept = {name.removeprefix("model."): value for name, value in weights.items() if name != "lm_head.weight"}
    save_file(kept, folder / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps([]))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tiny_folder / name).read_bytes())
    return folder, model


@pytest.mark.parametrize("text", ["Hello there, how are you?", "a"])
def test_the_vector_is_the_last_hidden_state_of_transformers(embedding_model: tuple[Path, Any], text: str) -> None:
    folder, model = embedding_model
    spec = bind(llm(read_config(folder)), folder, {})
    outcome = LocalRuntime(spec, folder).request(text, outputs=("embedding",))
    assert outcome.status == "finished", outcome.cause
    vector = torch.frombuffer(bytearray(outcome.outputs["embedding"]), dtype=torch.float32)
    prompt = PromptRequest(text=text, params=Params(), outputs=frozenset({"embedding"}))
    ids = Processor(folder, {}).tokenize(prompt, adds_special=True)
    with torch.inference_mode():
        hidden = model.model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0, -1]
    torch.testing.assert_close(vector, torch.nn.functional.normalize(hidden, dim=-1), atol=1e-5, rtol=0)
