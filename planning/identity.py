"""What must stay the same when a run continues, and what changed in what may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planning.findings import Finding, written
from planning.parameters import VOCABULARY_MULTIPLE

# Settings (or whole groups) that decide what is learned from what: another value is another run.
FIXED = (
    "model",
    "data.kind",
    "data.paths",
    "data.train_paths",
    "data.valid_paths",
    "data.test_paths",
    "data.split",
    "data.tokenizer",
    "training.global_batch_size",
    "training.seed",
    "training.optimizer.name",
)
# Of the model: said of it, not part of it.
NOT_FIXED = ("model.recipe", "model.name", "model.formulas")

# Of the model: what decides which tensors it has, and of what shape. The rest may differ from that
# of the weights that a run starts from.
SHAPE = (
    "stack",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "pattern",
    "tied_embeddings",
    "qk_norm",
    "num_experts",
    "expert_ffn_hidden_size",
)


def same_shape(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a setting of SHAPE gives two models (`model` of a configuration) the same tensors."""
    if name == "kv_channels" and one[name] != other[name]:
        return _head_size(one) == _head_size(other)
    if name == "vocab_size":  # its table has a multiple of rows
        rows = [-(-model[name] // VOCABULARY_MULTIPLE) for model in (one, other)]
        return rows[0] == rows[1]
    return bool(one[name] == other[name])


def _head_size(model: Mapping[str, Any]) -> float:
    return float(model["kv_channels"] or model["hidden_size"] / model["num_attention_heads"])


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"name": "x"}} -> {"model.name": "x"}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _under(setting: str, names: tuple[str, ...]) -> bool:
    return any(setting == name or setting.startswith(name + ".") for name in names)


def is_fixed(setting: str) -> bool:
    return _under(setting, FIXED) and not _under(setting, NOT_FIXED)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of two configurations (nested dictionaries) that differ: {setting: (old, new)}."""
    old, new = flatten(before), flatten(after)
    ignored = ("run_dir", "resume")
    return {
        name: (old.get(name), new.get(name))
        for name in [*old, *(name for name in new if name not in old)]
        if old.get(name) != new.get(name) and name not in ignored
    }


# layout.sharding -> how a checkpoint holds the optimizer (docs/resume.md).
OPTIMIZER_FORMS = {"optimizer": "sharded", "none": "whole", "fsdp2": "whole", "fsdp": "fsdp"}


def compare(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    run_dir: str,
    *,
    saves: str | None,
) -> tuple[list[Finding], list[str]]:
    """(errors: this is another run; lines: what changed of what may) of two configurations.

    saves: the folder of the checkpoints to continue from; None: there are none.
    """
    findings, allowed = [], []
    sharding = [flatten(values).get("layout.sharding") for values in (before, after)]
    if saves is not None and len({OPTIMIZER_FORMS.get(str(form)) for form in sharding}) > 1:
        findings.append(
            Finding(
                "another-run",
                "error",
                "layout.sharding",
                f"{run_dir} holds checkpoints of sharding={sharding[0]}, which keep the optimizer "
                f"in another form than {sharding[1]}",
                f"set it to {sharding[0]}, or start a new run_dir with its weights: "
                f"checkpoint.load={saves}",
            )
        )
    for name, values in changes(before, after).items():
        old, new = (written(value) for value in values)
        if is_fixed(name):
            findings.append(
                Finding(
                    "another-run",
                    "error",
                    name,
                    f"{run_dir} holds a run with {old}, this one has {new}",
                    "set it back, take another run_dir, or resume=none (the old run is kept aside)",
                )
            )
        else:
            allowed.append(f"{name}: {old} -> {new}")
    return findings, allowed
