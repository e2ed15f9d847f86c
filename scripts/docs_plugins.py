"""Generated reference for authors of plugins: declarations of the contracts, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent

SECTIONS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "Nodes and ports": {
        "graph/declare/nodes.py": ("NodeSpec", "PortType", "KVSpec", "Attachment", "Attend", "Sampling", "EngineHints"),
    },
    "Walks and streams": {
        "graph/declare/walks.py": (
            "GraphEdge",
            "StreamingGraphEdge",
            "GraphNode",
            "Sequential",
            "Parallel",
            "Loop",
            "StopOn",
            "StopWhen",
        ),
        "graph/declare/streams.py": ("Stream", "FixedChunk", "SlidingWindow", "LeftContext"),
    },
    "Programs": {
        "plugin/program.py": ("ProgramRequest", "Segment", "Run", "WalkResult", "Signal", "Fork", "Reset"),
    },
    "The model": {
        "plugin/spec.py": ("ModelSpec", "Partition", "Sample", "WeightRef", "Unresumable"),
        "plugin/surface.py": ("Surface", "Audio", "Video", "Action", "Embedding", "Segments"),
        "plugin/params.py": ("param", "sampling_param"),
    },
    "The processor": {
        "plugin/processor.py": (
            "PromptRequest",
            "Inputs",
            "SegmentInputs",
            "Processor",
            "WarmedProcessor",
            "InlineProcessor",
            "TokenizingProcessor",
            "ConstrainableProcessor",
        ),
    },
    "Modules: forward, head, packing, positions": {
        "layers/kv_view.py": ("KVModule", "KVView", "KeepingView", "MemoryView"),
        "engine/module.py": ("NodeModule",),
        "plugin/model.py": ("ModelContext", "Model"),
    },
    "Layers": {
        "layers/transformer.py": (
            "TokenEmbedding",
            "Head",
            "RMSNorm",
            "GatedMLP",
            "AttentionSpec",
            "Attention",
            "DecoderBlock",
        ),
        "layers/layer_norm_blocks.py": ("BlockSpec", "HeadProjections", "EncoderBlock", "CausalBlock", "CrossBlock"),
        "layers/rotary.py": ("RotarySpec", "Rotary"),
        "layers/moe.py": ("MoESpec", "SparseMoE"),
        "layers/code_predictor.py": ("CodePredictorSpec", "CodePredictor"),
    },
    "Parts that families share": {
        "families/llama_sizes.py": ("LlamaSizes",),
        "families/llama.py": ("LlamaStack", "LlamaDecoder"),
        "families/parts.py": ("ModelPart", "load_part", "random_weights", "key_map"),
        "families/text_prompts.py": ("TextPrompts",),
        "families/tokenizer.py": ("TextTokenizer",),
        "families/byte_tokenizer.py": ("byte_tokenizer",),
        "families/mel.py": ("LogMel",),
        "families/step_cache.py": ("StepGroup", "step_groups"),
    },
    "Weights": {
        "weights/checkpoint.py": ("Checkpoint", "NameMap", "load_weights"),
        "weights/sources.py": ("cached_or_fetched", "cached_checkpoint", "chosen_files", "generated_checkpoint"),
        "plugin/json_fields.py": ("JsonFields",),
    },
    "Checks": {
        "plugin/check/reference.py": ("ReferenceRequest", "greedy_ids"),
        "plugin/conformance.py": ("KeyMap",),
        "plugin/testing.py": ("ModelConformance",),
    },
}
"""Title -> file below mstar_core -> names, in the order of the page."""

HEAD: Final = """# Reference for authors of plugins

Generated from the source by `make docs`. [Plugins](plugins.md) introduces these contracts. A block is a
declaration with its documentation, without bodies.
"""


def plugin_reference() -> str:
    """Return the page with the declarations of all contracts. Raises KeyError for a name that a file lacks."""
    parts = [HEAD]
    for title, files in SECTIONS.items():
        parts.append(f"## {title}\n")
        for file, names in files.items():
            module = f"mstar_core.{file.removesuffix('.py').replace('/', '.')}"
            defined = _definitions(ROOT / "mstar_core" / file)
            blocks = "\n\n\n".join(_declaration(defined[name]) for name in names)
            parts.append(f"`{module}`\n\n```py\n{_formatted(blocks)}\n```\n")
    return "\n".join(parts)


def _formatted(code: str) -> str:
    """Return code in the form that the formatter's check of this repository wants, also inside pages."""
    command = [str(Path(sys.executable).parent / "ruff"), "format", "--line-length", "120", "--stdin-filename", "a.py"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout.strip()


def _definitions(path: Path) -> dict[str, ast.stmt]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def _declaration(node: ast.stmt) -> str:
    """Return a class or function as source: its documentation and fields, and the signatures of public methods."""
    if isinstance(node, ast.FunctionDef):
        return "\n".join(_signature(node))
    assert isinstance(node, ast.ClassDef)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"class {node.name}({bases}):" if bases else f"class {node.name}:"]
    body = [line for each in node.body for line in _member(each)]
    return "\n".join([*lines, *(f"    {line}" if line else "" for line in body or ["..."])])


def _member(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            yield from _docstring(text)
        case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
            yield ast.unparse(node)
        case ast.FunctionDef(name=name) if name == "__init__" or not name.startswith("_"):
            yield ""
            yield from (f"@{ast.unparse(each)}" for each in node.decorator_list)
            yield from _signature(node)


def _signature(node: ast.FunctionDef) -> Iterator[str]:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    text = ast.get_docstring(node)
    yield f"def {node.name}({ast.unparse(node.args)}){returns}:{'' if text else ' ...'}"
    if text:
        yield from (f"    {line}" if line else "" for line in _docstring(text))


def _docstring(text: str) -> Iterator[str]:
    """Yield the lines of a docstring at the margin."""
    first, *rest = text.strip("\n").splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    lines = [first.strip(), *(line[margin:].rstrip() for line in rest)]
    while len(lines) > 1 and not lines[-1]:
        lines.pop()
    if len(lines) == 1:
        yield f'"""{lines[0]}"""'
        return
    yield f'"""{lines[0]}'
    yield from lines[1:]
    yield '"""'


PLUGIN_FILES: Final = {"docs/plugin-reference.md": plugin_reference}
