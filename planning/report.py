"""A plan as a person reads it, and as plan.json."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

from planning import cost, saving
from planning.findings import Finding, Refusal, errors
from planning.hardware import GPUS, Gpu
from planning.resolve import Resolution
from planning.schema import HardwareConfig, LayoutConfig, RunConfig
from planning.search import MARGIN, SHOWN, why_slower

GIB = 2**30
SHORT = ("memory", "host-memory")  # the findings of a choice that is legal and does not fit


def count(number: float | None) -> str:
    """1,235,814,400 -> '1.24 B'."""
    if number is None:
        return "not estimated"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _hours(number: float) -> str:
    """'9.42', '1,710': three digits, without an exponent."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _gpu(hardware: HardwareConfig) -> Gpu:
    name = hardware.gpu or "cpu"
    return GPUS.get(name) or Gpu(name, name, (0, 0), *[None] * 6)  # an unknown one: refused


def layout_line(layout: LayoutConfig, data_parallel: int) -> str:
    """'data parallel 8, tensor 2 (sequence parallel), optimizer sharded, recompute full'."""
    parts = [f"data parallel {data_parallel}"]
    for name, degree in (
        ("tensor", layout.tensor_parallel),
        ("pipeline", layout.pipeline_parallel),
        ("virtual stages", layout.virtual_pipeline_parallel),
        ("context", layout.context_parallel),
        ("expert", layout.expert_parallel),
    ):
        if (degree or 1) > 1:
            parts.append(f"{name} {degree}")
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    parts.append(
        {
            "none": "nothing sharded",
            "optimizer": "optimizer state sharded",
            "fsdp": f"Megatron-FSDP ({layout.fsdp_strategy})",
            "fsdp2": "FSDP2",
        }[layout.sharding or "none"]
    )
    if layout.recompute == "selective":
        parts.append(f"recompute {', '.join(layout.recompute_modules)}")
    elif layout.recompute == "full" and layout.recompute_layers is not None:
        number = layout.recompute_layers
        parts.append(f"recompute {number} block{'s' * (number > 1)} of each stage")
    elif layout.recompute == "full":
        parts.append("recompute full")
    if layout.cuda_graph == "full":
        parts.append("CUDA graph")
    return ", ".join(parts)


def layout_words(config: RunConfig, data_parallel: int) -> str:
    """The same for a column: 'DP4 TP2 FSDP, MBS 2, recompute 12'; optimizer sharding is unsaid."""
    layout = config.layout
    degrees = (
        ("TP", layout.tensor_parallel),
        ("PP", layout.pipeline_parallel),
        ("VPP", layout.virtual_pipeline_parallel),
        ("CP", layout.context_parallel),
        ("EP", layout.expert_parallel),
    )
    parts = [f"DP{data_parallel}", *(f"{name}{n}" for name, n in degrees if (n or 1) > 1)]
    shown = {"fsdp": "FSDP", "fsdp2": "FSDP2", "none": "replicated"}
    if layout.sharding in shown and data_parallel > 1:
        parts.append(shown[layout.sharding])
    text = f"{' '.join(parts)}, MBS {config.training.micro_batch_size}"
    return text if layout.recompute == "none" else f"{text}, recompute {recompute_words(layout)}"


def recompute_words(layout: LayoutConfig) -> str:
    """'none', 'MLP', '12' (blocks of each stage) or 'all'."""
    if layout.recompute == "full":
        return str(layout.recompute_layers or "all")
    return "none" if layout.recompute != "selective" else " ".join(layout.recompute_modules)


def precision_line(config: RunConfig, start: int, end: int) -> str:
    precision = config.precision
    parts = [precision.name]
    if precision.format != "none":
        parts.append(f"{precision.format} {precision.recipe} ({precision.elements})")
        if start or end:
            parts.append(
                f"first {start} and last {end} of {config.model.num_layers} blocks in BF16"
            )
        parts.append("weights gathered in it" if precision.param_gather else "weights kept in BF16")
    return ", ".join(parts)


def lines(resolution: Resolution) -> list[str]:
    """The plan in a few lines; without one, what was chosen."""
    config, plan = resolution.config, resolution.plan
    model, hardware, training = config.model, config.hardware, config.training
    gpu = _gpu(hardware)
    unit = "process" if gpu.is_cpu else "GPU"
    where = f"{hardware.nodes} x {hardware.gpus_per_node} {gpu.title}"
    if gpu.is_cpu:
        where = f"CPU, {hardware.gpus_per_node} process{'es' * (hardware.gpus_per_node != 1)}"
    derived = plan.derived if plan else None
    parameters = count(derived.parameters) if derived else "?"
    if derived and derived.active_parameters != derived.parameters:
        parameters += f", {count(derived.active_parameters)} active"
    rows = [
        ("model", f"{model.name}: {parameters} parameters, {model.num_layers} blocks, "
                  f"sequences of {model.seq_length:,}"),
        ("hardware", f"{hardware.name}: {where}"),
    ]  # fmt: skip
    if derived:
        rows += [
            (
                "precision",
                precision_line(config, derived.bf16_blocks_at_start, derived.bf16_blocks_at_end),
            ),
            (
                "layout",
                f"{config.layout.name}: {layout_line(config.layout, derived.data_parallel)}",
            ),
            (
                "batch",
                f"{training.global_batch_size:,} sequences a step = {training.micro_batch:,} x "
                f"{derived.data_parallel:,} x {derived.gradient_accumulation:,} (micro batch x "
                f"data parallel x accumulation), {count(derived.tokens_per_step)} tokens",
            ),
            (
                "training",
                f"{training.train_steps:,} steps, {count(derived.total_tokens)} tokens of "
                f"{config.data.name}",
            ),
        ]
    rows += _memory_rows(resolution, unit)
    rows += _speed_rows(resolution)
    rows += _search_rows(resolution)
    return [f"{name:<10} {text}" for name, text in rows]


def _memory_rows(resolution: Resolution, unit: str) -> list[tuple[str, str]]:
    hardware, states, held = resolution.config.hardware, resolution.states, resolution.held
    room = hardware.memory_gib or _gpu(hardware).memory_gib
    of = f" of {room:.0f} GiB" if room else ""
    if held is not None:
        parts = sorted(held.parts.items(), key=lambda part: -part[1])
        shown = ", ".join(
            f"{name} {size(value)}" for name, value in parts if value > 0.01 * held.peak
        )
        rows = [
            ("memory", f"peak {size(held.peak)} a {unit}{of}, {size(held.needed)} with what lies "
                       f"outside torch; {held.basis}"),
            ("", shown),
        ]  # fmt: skip
        if resolution.saving:
            has = saving.host_gib(hardware)
            whole = f" {has:,} GiB of" if has else ""
            host = f"{size(resolution.saving)} of a node's{whole} host memory to save and to resume"
            rows.append(("", host))
        return rows
    if states is None:
        return []
    parts_of_states = f"weights {size(states.weights)}, gradients {size(states.gradients)}, "
    parts_of_states += f"optimizer {size(states.optimizer)}"
    return [
        ("states", f"{size(states.total)} a {unit}{of} ({parts_of_states}); activations not "
                   "estimated"),
    ]  # fmt: skip


def _search_rows(resolution: Resolution) -> list[tuple[str, str]]:
    """The layouts that were compared, and why each lost."""
    found = resolution.options
    if found is None:
        return []
    if not found.best:
        near = found.too_large[0]
        short = any(finding.id in SHORT for finding in errors(resolution.findings))
        verdict = "none fits" if short else f"none leaves {MARGIN:.0%} of the memory free"
        needs = f"{size(near.memory.needed)} a GPU"
        if not saving.fits(near.facts):
            needs += f" and {size(saving.host_bytes(near.facts) or 0)} of a node's host memory"
        return [("compared", f"{found.tried:,} estimates: {verdict}; the nearest needs {needs}")]
    rows = [("compared", f"{found.tried:,} estimates; the fastest of each split that fits:")]
    taken = found.best[0]
    for rank, option in enumerate(found.best[:SHOWN], 1):
        why = "taken" if option is taken else why_slower(option, taken)
        layout = layout_words(option.config, option.facts.data_parallel)
        rate = f"{option.speed.tokens_per_s_per_gpu:,.0f} tokens/s a GPU"
        rows.append(("", f"{rank}. {rate}, {size(option.memory.needed)}: {layout} ({why})"))
    return rows


def _speed_rows(resolution: Resolution) -> list[tuple[str, str]]:
    speed = resolution.speed
    if speed is None:
        return []
    shares = sorted(speed.parts.items(), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {s / speed.step_s:.0%}" for name, s in shares[:4])
    estimate = cost.estimate(resolution.config, speed.step_s)
    paid = "price not set (hardware.price_per_node_hour)"
    if estimate.usd is not None:
        paid = (
            f"{estimate.usd_per_billion_tokens:,.0f} USD a billion tokens, {estimate.usd:,.0f} USD "
            "the run"
        )
    return [
        (
            "speed",
            f"{seconds(speed.step_s)} a step, {speed.tokens_per_s_per_gpu:,.0f} tokens/s and "
            f"{speed.model_tflops_per_gpu:,.0f} TFLOP/s a GPU, MFU {speed.mfu:.0%} of "
            f"{speed.mfu_peak_tflops:,.0f} (dense {speed.mfu_format}); {speed.basis}",
        ),
        ("", f"{largest}"),
        (
            "cost",
            f"{_hours(estimate.gpu_hours_per_billion_tokens)} GPU-hours a billion tokens, "
            f"{duration(estimate.hours)} the run; {paid}",
        ),
    ]


def seconds(number: float) -> str:
    """0.1842 -> '184 ms', 12.31 -> '12.3 s', 6420 -> '6,420 s'."""
    if number < 1:
        return f"{number * 1000:.0f} ms"
    return f"{number:.3g} s" if number < 1000 else f"{number:,.0f} s"


def duration(hours: float) -> str:
    """0.05 -> '3 minutes', 30 -> '30 hours', 100 -> '4.2 days'."""
    if hours < 1:
        return f"{hours * 60:.0f} minutes"
    if hours < 48:
        return f"{hours:.3g} hours"
    days = hours / 24
    return f"{days:.3g} days" if days < 1000 else f"{days:,.0f} days"


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """Errors first; what several in a row have in common as a way out is said after the last."""
    ordered = sorted(findings, key=lambda finding: finding.severity != "error")
    lines = []
    for finding, following in zip_longest(ordered, ordered[1:]):
        same = following and following.severity == finding.severity
        if same and following.fix == finding.fix:
            finding = replace(finding, fix="")
        lines.append(f"{finding.severity}: {finding}")
    return lines


def refusal_lines(refusal: Refusal) -> list[str]:
    """Why a run does not start, and where to go instead."""
    return finding_lines(refusal.findings) + ([refusal.ways_on] if refusal.ways_on else [])


def size(number: float, digits: int = 3) -> str:
    """Bytes as GiB, or as MiB where that is readable: '68.3 GiB', '7.61 MiB'."""
    if number < 0.1 * GIB:
        return f"{number / 2**20:.{digits}g} MiB"
    return f"{number / GIB:,.{digits}g} GiB" if number < 1000 * GIB else f"{number / GIB:,.0f} GiB"


def to_json(resolution: Resolution) -> dict[str, Any]:
    """plan.json: verdict, findings, estimates. A null estimate was not made."""
    config, states, held = resolution.config, resolution.states, resolution.held
    hardware = config.hardware
    room = hardware.memory_gib or _gpu(hardware).memory_gib
    found = errors(resolution.findings)
    parts: dict[str, float] = {}
    if held is not None:
        parts = dict(held.parts)
    elif states is not None:
        parts = asdict(states)
    return {
        "legal": not [finding for finding in found if finding.id not in SHORT],
        "findings": [
            {
                name: getattr(finding, name)
                for name in ("id", "severity", "setting", "message", "fix", "source")
            }
            for finding in resolution.findings
        ],
        "memory": {
            "peak_gib": held.peak / GIB if held else None,  # what torch has allocated
            "needed_gib": held.needed / GIB if held else None,  # and the process beside it
            "capacity_gib": room,
            "fits": _fits(resolution, room),
            "parts": {name: number / GIB for name, number in parts.items()},
        },
        "throughput": asdict(resolution.speed) if resolution.speed else {},
        "cost": asdict(cost.estimate(config, resolution.speed.step_s)) if resolution.speed else {},
        "basis": basis(resolution),
    }


def in_short(resolution: Resolution) -> dict[str, Any]:
    """The figures of a plan for a table of many; None: not estimated, or no price."""
    config, plan = resolution.config, resolution.plan
    verdict = to_json(resolution)
    layout = layout_words(config, plan.derived.data_parallel) if plan else None
    paid = ("gpu_hours_per_billion_tokens", "usd_per_billion_tokens")
    return {
        "layout": layout if config.training.micro_batch_size else None,
        **{name: verdict["memory"][name] for name in ("needed_gib", "capacity_gib", "fits")},
        **{name: verdict["throughput"].get(name) for name in ("tokens_per_s_per_gpu", "mfu")},
        **{name: verdict["cost"].get(name) for name in paid},
    }


def _fits(resolution: Resolution, room: float | None) -> bool | None:
    """None: not known; states alone can say no, never yes."""
    if any(found.id == "host-memory" for found in resolution.findings):
        return False
    if resolution.held is not None and room is not None:
        return resolution.held.needed <= room * GIB
    return False if any(found.id == "memory" for found in resolution.findings) else None


def basis(resolution: Resolution) -> str:
    """What the figures rest on."""
    held, speed = resolution.held, resolution.speed
    memory = held.basis if held else "states by exact count, activations not estimated"
    return f"memory: {memory}; speed: {speed.basis if speed else 'not estimated'}"


def table(rows: list[list[str]]) -> list[str]:
    """Rows as aligned columns; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows]  # fmt: skip
