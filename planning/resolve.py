"""RunConfig -> Plan: a pure function, with everything that was found on the way."""

from __future__ import annotations

from dataclasses import dataclass

from planning import (
    advice,
    changes,
    environment,
    megatron_args,
    memory,
    rules,
    saving,
    search,
    throughput,
)
from planning.findings import ChoiceError, Finding, did_you_mean, errors
from planning.hardware import GIB, GPUS
from planning.parameters import Parameters, count, padded_vocab_size
from planning.pattern import (
    blocks,
    split_stages,
    symbols_in_first_blocks,
    symbols_in_last_blocks,
)
from planning.plan import VERSION, Derived, Plan
from planning.schema import HardwareConfig, LayoutConfig, RunConfig

LARGEST_MODEL = 10_000  # blocks
TIGHT = 0.02  # of a card: less left than this gets a warning
PROCESS_GIB = 0.5  # of a process on a CPU: Python with torch and Megatron


@dataclass(frozen=True)
class Resolution:
    """What a choice comes to. `plan` is None where the choice is too broken to derive one."""

    config: RunConfig
    plan: Plan | None
    states: memory.States | None
    findings: list[Finding]
    held: memory.Estimate | None = None
    speed: throughput.Estimate | None = None
    options: search.Search | None = None  # where layout or micro batch were chosen here
    saving: float | None = None  # bytes of a node's host memory, while it saves


def resolve(config: RunConfig) -> Resolution:
    """The plan of a choice, its states' memory and all findings; raises nothing for a bad choice.

    `config.hardware` is complete: `hardware=this` was looked up before.
    """
    hardware = config.hardware
    if hardware.gpu is None or hardware.gpus_per_node is None:
        raise ValueError("hardware was not looked up before resolve")
    if unplannable := _unplannable(config):
        return Resolution(config, None, None, unplannable)
    try:
        model_blocks = blocks(config.model.pattern, config.model.num_layers)
    except ChoiceError as refusal:  # no model to check
        return Resolution(config, None, None, refusal.findings)
    try:
        parameters, uncounted = count(config.model), []
    except ChoiceError as refusal:  # an impossible formula, symbol or number of experts
        parameters, uncounted = None, refusal.findings
    found = None
    layout_is_open = config.layout.sharding is None or config.layout.tensor_parallel is None
    if not uncounted:
        config, found = completed(config, model_blocks)
    elif not search.complete(config):
        config = search.plain(config)
    facts = rules.Facts(config, config.layout, model_blocks)
    findings = rules.check(facts)
    said = {finding.setting for finding in errors(findings)}
    findings += [finding for finding in uncounted if finding.setting not in said]
    if uncounted or any(finding.id in STRUCTURAL for finding in errors(findings)):
        return Resolution(config, None, None, findings)
    plan = _plan(config, facts, parameters)
    states = memory.states(facts)
    held = speed = None
    if not errors(findings):
        try:
            held, speed = memory.estimate(facts), throughput.estimate(config, facts)
        except ChoiceError as refusal:  # an impossible formula
            findings += refusal.findings
    host = saving.host_bytes(facts)
    if not (errors(findings) and layout_is_open):  # else nobody knows what would be chosen
        room, here = memory.capacity_gib(facts), hardware.name == "this"
        short = _fits(facts, held) if held else short_states(hardware, states, room, here=here)
        if not errors(short):
            short += saving.check(host, saving.host_gib(hardware), here=False)
        findings += short
    if speed is not None and not errors(findings):
        findings += advice.check(config, facts, speed)
    return Resolution(config, plan, states, findings, held, speed, found, host)


def completed(config: RunConfig, model_blocks: list[str]) -> tuple[RunConfig, search.Search | None]:
    """The choice with what it leaves open, and what was compared for it: the fastest option; where
    none fits the nearest, which says what is short; else the plain one, whose errors a person can
    read."""
    if search.complete(config):
        return config, None
    try:
        found = search.run(config, model_blocks)
    except ChoiceError:  # an impossible formula: said later
        found = None
    for options in (found.best, found.too_large) if found else ():
        if options:
            return options[0].config, found
    return search.plain(config), found


def _unplannable(config: RunConfig) -> list[Finding]:
    """What no rule can be asked about."""
    found = []
    gpu, layers = config.hardware.gpu or "", config.model.num_layers
    if gpu not in GPUS:
        found.append(
            Finding(
                "gpu",
                "error",
                "hardware.gpu",
                f"{gpu!r} is not known here{did_you_mean(gpu, GPUS)}",
                f"take one of {', '.join(GPUS)}",
            )
        )
    if layers > LARGEST_MODEL:
        found.append(
            Finding(
                "num-layers",
                "error",
                "model.num_layers",
                f"{layers:,} blocks are more than any plan here has",
                f"take at most {LARGEST_MODEL:,}",
            )
        )
    return found


# Rules without which sizes of the plan have no meaning.
STRUCTURAL = {"world-size", "pipeline-depth", "virtual-pipeline", "global-batch", "heads-groups",
              "head-size", "experts-given", "precision-format"}  # fmt: skip


def checkpoint_format(config: RunConfig, layout: LayoutConfig) -> str | None:
    if config.checkpoint.save is False:
        return None
    return "fsdp_dtensor" if layout.sharding == "fsdp" else "torch_dist"


def _plan(config: RunConfig, facts: rules.Facts, parameters: Parameters | None) -> Plan:
    hardware, model, training = config.hardware, config.model, config.training
    model_blocks, (start, end) = facts.blocks, facts.bf16_blocks
    backend = "torch" if facts.gpu.is_cpu else "te"
    stages = facts.pp * facts.vpp
    pattern = split_stages(model_blocks, stages)
    tokens = training.global_batch_size * model.seq_length
    format = checkpoint_format(config, facts.layout)
    derived = Derived(
        world_size=facts.world_size,
        data_parallel=facts.data_parallel,
        gradient_accumulation=training.global_batch_size
        // (training.micro_batch * facts.data_parallel),
        tokens_per_step=tokens,
        total_tokens=tokens * training.train_steps,
        parameters=parameters.total if parameters else None,
        active_parameters=parameters.active_per_token if parameters else None,
        allocated_parameters=parameters.total_padded if parameters else None,
        padded_vocab_size=padded_vocab_size(model),
        layer_pattern=pattern,
        bf16_blocks_at_start=start,
        bf16_blocks_at_end=end,
        checkpoint_format=format,
    )
    return Plan(
        version=VERSION,
        name=model.name,
        backend=backend,
        config=config,
        derived=derived,
        processes_per_node=hardware.gpus_per_node or 1,
        nodes=hardware.nodes,
        environment=environment.build(hardware, facts.layout),
        megatron_args=megatron_args.build(
            config,
            backend=backend,
            pattern=pattern,
            padded_vocab_size=derived.padded_vocab_size,
            bf16_symbols=(
                symbols_in_first_blocks(model_blocks, start),
                symbols_in_last_blocks(model_blocks, end),
            ),
            symbols_per_block=max(len(block) for block in model_blocks),
            checkpoint_format=format,
        ),
    )


def _fits(facts: rules.Facts, held: memory.Estimate) -> list[Finding]:
    """Whether the peak fits in a GPU, and what would make it fit."""
    room = memory.capacity_gib(facts)
    if room is None:
        return []
    needed, gpu = held.needed / GIB, facts.gpu.title
    parts = sorted(held.parts.items(), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {size / GIB:,.0f}" for name, size in parts[:3])
    if needed > room:
        ways = [str(change) for change in changes.that_fit(facts)]
        return [
            Finding(
                "memory",
                "error",
                "layout",
                f"a run needs {needed:,.0f} GiB on one {gpu}, {needed - room:,.0f} GiB more than "
                f"its {room:,.0f} GiB: {largest} GiB",
                "what makes it fit: " + "; or ".join(ways)
                if ways
                else f"shard over {_larger(facts.config.hardware)}, or take a smaller model",
                "planning/memory.py",
                machine=facts.config.hardware.name == "this",
            )
        ]
    if needed > room * (1 - TIGHT):
        return [
            Finding(
                "memory-tight",
                "warning",
                "layout",
                f"{needed:,.1f} of {room:,.1f} GiB on a GPU leave little for what an estimate "
                f"does not see: {largest} GiB",
                "watch peak_memory_gib in the first steps",
                "planning/memory.py",
            )
        ]
    return []


def _larger(hardware: HardwareConfig) -> str:
    """Hardware that has more than what was named, in words of the command line."""
    most = max(GPUS.values(), key=lambda gpu: gpu.memory_gib or 0)
    more = f"hardware.nodes={2 * hardware.nodes}"
    if (GPUS[hardware.gpu or "cpu"].memory_gib or 0) >= (most.memory_gib or 0):
        return f"more GPUs ({more})"
    return f"more or larger GPUs ({more}, or hardware={most.name} launch=plan)"


def short_states(
    hardware: HardwareConfig, states: memory.States | None, room: float | None, *, here: bool
) -> list[Finding]:
    """Whether weights, gradients and optimizer state alone fit, where no more is known.

    room: GiB of one GPU, or of the machine for all processes on a CPU; None: not known. here: of
    this machine.
    """
    gpu = GPUS[hardware.gpu or "cpu"]
    if room is None or (states is None and not gpu.is_cpu):
        return []
    needed = states.total / GIB if states else 0.0
    what = "weights, gradients and optimizer state alone" if states else "Python and torch alone"
    where, setting = f"one {gpu.title}", "layout"
    fix = f"shard more (layout=fsdp, tp8), take {_larger(hardware)}, or a smaller model"
    if gpu.is_cpu:
        processes = hardware.gpus_per_node or 1
        needed = (needed + PROCESS_GIB) * processes
        what = f"{processes:,} process{'es' * (processes > 1)} with {what}"
        where = "this machine"
        if PROCESS_GIB * processes > room / 2:
            setting = "hardware.gpus_per_node"
            fix = f"take fewer processes: {setting}={max(1, int(room))}"
    if needed <= room:
        return []
    return [
        Finding(
            "memory",
            "error",
            setting,
            f"{what} take {needed:,.0f} GiB on {where}, which has {room:,.0f} GiB",
            fix,
            "planning/memory.py",
            machine=here,
        )
    ]
