"""The built models: their sizes, their layers' arithmetic, and the examples of docs/add_a_model.md.

All are built by measure.py, once, in a process of its own.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from models import stacks
from planning import flops
from planning.findings import ChoiceError
from planning.formulas import evaluate, fields
from planning.parameters import count, padded_vocab_size, per_rank
from planning.pattern import blocks, split_stages, stages, symbols
from planning.schema import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/add_a_model.md"


def documented(path: str) -> str:
    """The file `path` as the document shows it: the fenced code whose first line names it."""
    fenced = re.findall(r"```\w+\n# (\S+)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return dict(fenced)[path]


def chosen(name: str, **changes: Any) -> ModelConfig:
    """A model of conf/, with other values in some fields."""
    values = yaml.safe_load((ROOT / f"conf/model/{name}.yaml").read_text())
    return ModelConfig(**values | changes)


def model_of(path: str) -> ModelConfig:
    return ModelConfig(**yaml.safe_load(documented(path)))


SMALL: dict[str, Any] = {"seq_length": 32, "vocab_size": 200}
MODELS = {path.stem: chosen(path.stem) for path in sorted((ROOT / "conf/model").glob("*.yaml"))} | {
    "tiny": chosen("gpt_tiny", **SMALL),
    "tiny_qwen": chosen(
        "gpt_tiny",
        qk_norm=True,
        kv_channels=64,
        tied_embeddings=False,
        rotary_base=1000000,
        **SMALL,
    ),
    "tiny_moe": chosen("moe_tiny", **SMALL),
    "tiny_mixed": chosen("moe_tiny", pattern="*-*E", **SMALL),
    "gpt_2b": model_of("conf/model/gpt_2b.yaml"),
    "parallel_tiny": model_of("conf/model/parallel_tiny.yaml"),
}
WITH_GATED_DELTA_NET = [name for name, model in MODELS.items() if "G" in model.pattern]
WITHOUT = [name for name in MODELS if name not in WITH_GATED_DELTA_NET]


COUNTED = [name for name, model in MODELS.items() if model.formulas is None]  # by Megatron too


@dataclass(frozen=True)
class Layout:
    model: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1


LAYOUTS = {
    "tp8": Layout("qwen3_32b", tp=8, etp=8),
    "pp4": Layout("gpt_3b", pp=4),  # tied: the first and the last rank hold a table each
    "tp2_pp2": Layout("llama3_8b", tp=2, pp=2, etp=2),
    "ep8": Layout("moe_8x1b", ep=8),
    "tp4_etp4": Layout("moe_8x1b", tp=4, etp=4),
    "tp4_ep2_etp2_pp2": Layout("tiny_mixed", tp=2, ep=2, etp=2, pp=2),
}
PATTERNS = {
    "*-" * 3: {"*": 3, "-": 3},
    symbols("G-G-*E", 6): {"G": 4, "-": 4, "*": 2, "E": 2},
    split_stages(blocks("*-", 7), 4): {"*": 7, "-": 7},
    symbols("M*-", 4): {"M": 2, "*": 2, "-": 2},
    symbols("D-+E", 2): {"D": 1, "+": 1, "-": 1, "E": 1},
}
REFUSED = ["*x", "*-+-", "D*"]
FAMILIES = {"tiny": "Llama", "tiny_qwen": "Qwen3", "tiny_moe": "Mixtral"}
TRAINED = ["tiny", "tiny_qwen", "tiny_mixed", "parallel_tiny"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "parallel.py").write_text(documented("models/parallel.py"))
    job = {
        "stacks": str(folder),
        "models": {name: model.model_dump() for name, model in MODELS.items()},
        "counts": WITHOUT,
        "gated_delta_nets": WITH_GATED_DELTA_NET,
        "ranks": {case: list(vars(layout).values()) for case, layout in LAYOUTS.items()},
        "flops": COUNTED,
        "parsed": list(PATTERNS),
        "refused": REFUSED,
        "families": FAMILIES,
        "losses": TRAINED,
        "blocks": ["parallel_tiny"],
    }
    command = [sys.executable, str(Path(__file__).with_name("measure.py"))]
    done = subprocess.run(
        command, check=False, input=json.dumps(job), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_what_is_built(built: dict[str, Any], name: str) -> None:
    counted = count(MODELS[name])
    assert counted is not None
    assert built["counts"][name] == counted.total_padded


@pytest.mark.parametrize("name", COUNTED)
def test_a_steps_operations_are_megatrons(built: dict[str, Any], name: str) -> None:
    assert flops.step(MODELS[name], 3) == pytest.approx(built["flops"][name], rel=1e-12)


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_ranks_count_is_what_it_builds(built: dict[str, Any], case: str) -> None:
    layout = LAYOUTS[case]
    model = MODELS[layout.model]
    parts = stages(blocks(model.pattern, model.num_layers), layout.pp)
    counted = [
        per_rank(
            model,
            parts[index],
            tensor_parallel=layout.tp,
            expert_parallel=layout.ep,
            expert_tensor_parallel=layout.etp,
            embedding=first,
            output=last,
        )
        for index, first, last in ((0, True, layout.pp == 1), (-1, layout.pp == 1, True))
    ]
    assert built["ranks"][case] == [rank.total for rank in counted if rank is not None]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_megatron_reads_our_patterns_as_we_do(built: dict[str, Any], pattern: str) -> None:
    read = built["parsed"][pattern]
    assert read["main"] == pattern
    assert read["layers"] == len(pattern.replace("|", ""))
    assert read["segments"] == pattern.count("|") + 1
    assert {symbol: n for symbol, n in read["counts"].items() if n} == PATTERNS[pattern]


@pytest.mark.parametrize("pattern", REFUSED)
def test_megatron_refuses_what_we_refuse(built: dict[str, Any], pattern: str) -> None:
    assert built["refused"][pattern] is not None
    with pytest.raises(ChoiceError):
        blocks(pattern, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(built: dict[str, Any], name: str) -> None:
    """The same weights in Hugging Face's model of the family, both in FP32."""
    assert built["differences"][name] < 1e-5


def test_a_checkpoint_has_transformer_engines_names(built: dict[str, Any]) -> None:
    """So that one saved on a CPU can be read on a GPU: there a norm is part of the linear layer
    after it, and linear layers and other norms have an extra state."""
    layers = [
        [
            "self_attention.linear_proj._extra_state",
            "self_attention.linear_proj.weight",
            "self_attention.linear_qkv._extra_state",
            "self_attention.linear_qkv.layer_norm_weight",
            "self_attention.linear_qkv.weight",
        ],
        [
            "mlp.linear_fc1._extra_state",
            "mlp.linear_fc1.layer_norm_weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2._extra_state",
            "mlp.linear_fc2.weight",
        ],
    ]
    assert built["keys"] == [
        "decoder.final_norm._extra_state",
        "decoder.final_norm.weight",
        *(f"decoder.layers.{i}.{name}" for i in range(4) for name in layers[i % 2]),
        "embedding.word_embeddings.weight",
        "output_layer._extra_state",
    ]


def test_norms_of_a_split_sequence_are_marked(built: dict[str, Any]) -> None:
    marks = built["marks"]
    assert "decoder.final_norm.weight" in marks
    assert all(marks.values()), [name for name, marked in marks.items() if not marked]


@pytest.mark.parametrize("name", TRAINED)
def test_it_learns_a_batch(built: dict[str, Any], name: str) -> None:
    first, *_, last = built["losses"][name]
    assert first == pytest.approx(math.log(padded_vocab_size(MODELS[name])), abs=0.1)
    assert last < 0.6 * first


def test_the_documents_formulas_are_its_blocks(built: dict[str, Any]) -> None:
    model, block = MODELS["parallel_tiny"], built["blocks"]["parallel_tiny"]
    assert model.formulas is not None
    formula = {name: float(evaluate(text, fields(model), name)) for name, text in model.formulas}
    assert formula["parameters"] == block["parameters"]
    assert formula["flops"] == block["flops"]
    assert (
        formula["activation_bytes"] <= block["activation_bytes"] < 2 * formula["activation_bytes"]
    )


def test_the_document_says_its_models_size() -> None:
    model = MODELS["gpt_2b"]
    counted = count(model)
    assert counted is not None
    assert f"{counted.total:,} parameters" in documented("conf/model/gpt_2b.yaml")


def test_an_unknown_stack_names_the_nearest() -> None:
    with pytest.raises(ChoiceError) as refused:
        stacks.load("transfomer")
    (finding,) = refused.value.findings
    assert finding.setting == "model.stack"
    assert "did you mean transformer?" in finding.message
