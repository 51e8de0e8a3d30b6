"""RunConfig -> Plan: a pure function, with everything that was found on the way."""

from __future__ import annotations

from dataclasses import dataclass

from planning import advice, environment, layout, megatron_args, memory, rules, throughput
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
from planning.schema import LayoutConfig, RunConfig

LARGEST_MODEL = 10_000  # blocks
PROCESS_GIB = 0.5  # of a process on a CPU: Python with torch and Megatron


@dataclass(frozen=True)
class Resolution:
    """What a choice comes to. `plan` is None where the choice is too broken to derive one."""

    config: RunConfig
    plan: Plan | None
    states: memory.States | None
    findings: list[Finding]
    speed: throughput.Estimate | None = None


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
    facts = _choose_layout(config, model_blocks, parameters)
    config = facts.config
    findings = rules.check(facts)
    said = {finding.setting for finding in errors(findings)}
    findings += [finding for finding in uncounted if finding.setting not in said]
    if uncounted or any(finding.id in STRUCTURAL for finding in errors(findings)):
        return Resolution(config, None, None, findings)
    plan = _plan(config, facts, parameters)
    states = memory.states(config.model, config.precision, facts.layout, facts.world_size)
    findings += _capacity(config, states)
    speed = None
    if not errors(findings):
        try:
            speed = throughput.estimate(config, facts)
        except ChoiceError as refusal:  # an impossible formula
            findings += refusal.findings
    if speed is not None:
        findings += advice.check(config, facts, speed)
    return Resolution(config, plan, states, findings, speed)


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


def _choose_layout(
    config: RunConfig, model_blocks: list[str], parameters: Parameters | None
) -> rules.Facts:
    """The facts of the choice with every None of its layout decided.

    parameters: None where they are not known; the layout is then chosen without them.
    """
    hardware = config.hardware
    per_node = hardware.gpus_per_node or 1
    world_size = per_node * hardware.nodes
    room = hardware.memory_gib or GPUS[hardware.gpu or "cpu"].memory_gib

    def facts(candidate: LayoutConfig) -> rules.Facts:
        chosen = config.model_copy(update={"layout": candidate})
        return rules.Facts(chosen, candidate, model_blocks)

    def legal(candidate: LayoutConfig) -> bool:
        return not any(not finding.machine for finding in errors(rules.check(facts(candidate))))

    def fits(candidate: LayoutConfig) -> bool:
        if parameters is None or room is None:
            return True
        states = memory.states(config.model, config.precision, candidate, world_size)
        return states is None or states.total <= layout.STATE_SHARE * room * GIB

    found = layout.candidates(
        config.layout,
        parameters.total if parameters else None,
        world_size,
        per_node,
        config.training.optimizer.name,
    )
    return facts(found[0] if len(found) == 1 else layout.choose(found, legal, fits))


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
        // (training.micro_batch_size * facts.data_parallel),
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


def _capacity(config: RunConfig, states: memory.States | None) -> list[Finding]:
    """Whether weights, gradients and optimizer state alone fit in a GPU's (or the CPU's) memory."""
    hardware = config.hardware
    gpu = GPUS[hardware.gpu or "cpu"]
    room = hardware.memory_gib or gpu.memory_gib
    if states is None or room is None:
        return []
    needed, what = states.total / GIB, "weights, gradients and optimizer state alone"
    where = f"one {gpu.title}"
    if gpu.is_cpu:
        processes = hardware.gpus_per_node or 1
        needed = (needed + PROCESS_GIB) * processes
        what = f"{processes:,} process{'es' * (processes > 1)} with {what}"
        where = "this machine"
    if needed <= room:
        return []
    return [
        Finding(
            "state-memory",
            "error",
            "layout",
            f"{what} take {needed:,.0f} GiB on {where}, which has {room:,.0f} GiB",
            "shard more (layout=fsdp, tp8), take more or larger GPUs "
            "(hardware=b300 launch=plan, hardware.nodes=2), or a smaller model",
            "planning/memory.py",
            machine=hardware.name == "this",
        )
    ]
