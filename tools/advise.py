"""The whole decision for a model and some hardware, predicted: before anything is paid for.

    python tools/advise.py model=gpt_32b hardware=p6_b200 [setting=value ...] [--report FOLDER]

Which precision, micro and global batch, sequence length, recompute and split of the GPUs; what
each alternative would take; what to measure first. Words are those of launch/train.py, and what
they set stays. --report writes advice.md and advice.html with pictures.

Exit status: 0 a choice that is legal and fits; 2 the choice is wrong, or nothing fits; 3 no
hardware was named and this machine has no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch import checks, compose, machine
from launch.train import report as refused
from planning import decision, parameters, report, saving
from planning.changes import setting_word
from planning.decision import Alternative, Decision
from planning.findings import ChoiceError, Finding, MachineError, Refusal, errors, refuse
from planning.schema import RunConfig
from planning.search import MARGIN, SHOWN, Option, why_slower
from tools.advice_pages import Section, text, write

NEAREST = 3  # splits that do not fit, of which it is said how far they are from it


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_intermixed_args(words)
    try:
        decided, sections = advise(given.words)
        print(text(sections))
        if given.report:
            folder = Path(given.report)
            title = f"{decided.taken.config.model.name} on {decided.taken.config.hardware.name}"
            try:
                written = write(folder, f"Advice: {title}", sections, decided)
            except OSError as error:
                message = f"{folder} cannot be written: {error.strerror}"
                fix = "name another folder"
                raise ChoiceError(Finding("report", "error", "--report", message, fix)) from None
            print(f"\nreport: {', '.join(map(str, written))}")
        refuse(decided.plan.findings)
    except Refusal as refusal:
        return refused(refusal)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 143
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/advise.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="setting=value", help="as of launch/train.py")
    parser.add_argument("--report", metavar="FOLDER", help="write advice.md and advice.html there")
    return parser


def advise(words: Sequence[str]) -> tuple[Decision, list[Section]]:
    """What is decided for the words of a command line, and what is said of it.

    Raises ChoiceError: wrong words, or nothing is legal. Raises MachineError: no GPU is known.
    """
    choices, asked = choose(words)
    usual = choices[asked or decision.BASELINE]
    counted = parameters.count(usual.model)
    decided = decision.decide(choices, asked, counted.total if counted else 0)
    taken = decided.taken
    if not taken.legal:
        refuse(decided.plan.findings)
        setting = "precision" if usual.precision.dtype != "bf16" else "model"
        raise ChoiceError(
            Finding("advice", "error", setting, "no estimate is made of it",
                    "take a precision with BF16 weights and a model whose blocks are known")
        )  # fmt: skip
    chosen = choices[taken.name]
    own = [word for word in words if not word.startswith("precision=")]
    sections = [
        _choice(decided),
        _precision(decided),
        _batch(taken),
        _sequence(chosen),
        _recompute(taken, chosen),
        _sharding(taken),
        _figures(taken),
    ]
    if taken.fits:
        sections.append(_measure(decided, own, chosen))
    return decided, sections


def choose(words: Sequence[str]) -> tuple[dict[str, RunConfig], str | None]:
    """(the choice in each precision that has BF16 weights, the precision that the words name)."""
    here = machine.look()
    asked = None
    for override in compose.parse(words):
        if override.key_or_group == "precision":
            asked = str(override.value())
    config = _on_gpus(compose.choose(words), here)
    refuse(checks.stack(config))
    found = {}
    for name in compose.choices("precision"):
        if "/" in name and name != asked:  # for comparing with vendors' figures only
            continue
        other = config
        if name != asked:
            rest = [word for word in words if not word.startswith("precision=")]
            try:
                other = _on_gpus(compose.choose([*rest, f"precision={name}"]), here)
            except ChoiceError:  # a setting that is none of this precision's
                continue
        if name == asked or other.precision.dtype == "bf16":
            found[name] = other
    return dict(sorted(found.items(), key=lambda item: item[0] != decision.BASELINE)), asked


def _on_gpus(config: RunConfig, here: machine.Machine) -> RunConfig:
    hardware = machine.fill(config.hardware, here)
    if hardware.gpu != "cpu":
        return config.model_copy(update={"hardware": hardware})
    named = [name for name in compose.choices("hardware") if name not in ("this", "cpu")]
    fix = f"name what it is for: hardware={', '.join(named)}"
    if config.hardware.name != "this":
        message = "advice is about GPUs, and this is a CPU"
        raise ChoiceError(Finding("advice", "error", "hardware", message, fix))
    card = here.gpu_names[0] if here.gpu_names else "no GPU"
    message = f"this machine has {card}, for which nothing is predicted"
    raise MachineError(Finding("advice", "error", "hardware", message, fix, machine=True))


# --- what is said -------------------------------------------------------------------------------


def _choice(decided: Decision) -> Section:
    lines = report.lines(dataclasses.replace(decided.plan, options=None))
    warnings = [f for f in decided.plan.findings if f.severity == "warning"]
    return Section(
        "The choice",
        [
            f"All figures are predicted, none was measured: {report.basis(decided.plan)}.",
            f"What fits barely leaves less than {MARGIN:.0%} of a GPU free, and is not taken by a "
            "search.",
        ],
        block=[*lines, *report.finding_lines(warnings)],
    )


def _fit(one: Alternative) -> str:
    if one.held is None or one.room is None:
        return ""
    over = one.held.needed - one.room
    if over > 0:
        return f"no, by {report.size(over)}"
    if not one.saves:
        return "no, the host's memory"
    return "yes" if one.held.needed <= one.room * (1 - MARGIN) else "barely"


def _gib(one: Alternative) -> str:
    return f"{one.held.needed / report.GIB:,.0f}" if one.held else ""


def _against(one: Alternative, base: Alternative) -> str:
    if one is base or not base.rate:
        return ""
    said = f"{one.rate / base.rate - 1:+.0%}"
    return "0%" if said in ("+0%", "-0%") else said


def _words(one: Alternative) -> str:
    return report.layout_words(one.config, one.facts.data_parallel)


def _precision(decided: Decision) -> Section:
    rows = [["precision", "step", "tokens/s/GPU", "against BF16", "GiB/GPU", "fits", "MFU, of",
             "layout"]]  # fmt: skip
    illegal = []
    for one in decided.precisions:
        if one.held is None or one.speed is None:
            found = errors(one.findings)
            illegal.append(f"{one.name}: {found[0].message if found else 'not estimated'}.")
            continue
        gain = decided.gain(one)
        rows.append([
            f"{one.name} (taken)" if one is decided.taken else one.name,
            report.seconds(one.speed.step_s), f"{one.rate:,.0f}",
            "" if gain is None or one.name == decision.BASELINE else f"{gain:.2f} x",
            _gib(one), _fit(one),
            f"{one.speed.mfu:.0%} of {one.speed.mfu_peak_tflops:,.0f} {one.speed.mfu_format}",
            _words(one),
        ])  # fmt: skip
    taken = decided.taken
    before = [f"Take {taken.name}: {'; '.join(decided.why)}."]
    if not taken.fits:
        before = [f"None fits; the figures below are of {taken.name}."]
    after = [
        "Each precision has its own fastest layout. Measure BF16 first, change the format only "
        "where its products are what takes the time, and compare loss curves before production: "
        "nothing here says what a format does to the loss.",
    ]
    gathered = decision.changed(taken, "", precision__param_gather=True)
    if taken.config.precision.format != "none" and gathered is not None and gathered.held:
        after.insert(
            0,
            "A low precision alone saves no memory: its weights stand beside those in BF16. Kept "
            f"and gathered in {taken.name} (precision.param_gather=true) the same layout needs "
            f"{_gib(gathered)} GiB, at {_against(gathered, taken)} in speed.",
        )
    return Section("Precision", before, rows, [*after, *illegal], picture="precision")


def _batch(taken: Alternative) -> Section:
    rows = [["global", "micro", "micro batches a GPU", "tokens a step", "step", "tokens/s/GPU",
             "against", "GiB/GPU", "fits"]]  # fmt: skip
    found = [("micro", one) for one in decision.micro_batches(taken)]
    found += [("global", one) for one in decision.global_batches(taken)]
    for what, one in found:
        training, speed = one.config.training, one.speed
        assert speed is not None
        count = training.global_batch_size // (training.micro_batch * one.facts.data_parallel)
        tokens = training.global_batch_size * one.config.model.seq_length
        same = one.config.training == taken.config.training
        rows.append([
            f"{training.global_batch_size:,}" if what == "global" else "",
            str(training.micro_batch), f"{count:,}", report.count(tokens),
            report.seconds(speed.step_s), f"{one.rate:,.0f}",
            "taken" if same else _against(one, taken), _gib(one), _fit(one),
        ])  # fmt: skip
    return Section(
        "Batch",
        [
            "Micro batch: the largest that fits is not always the fastest. Global batch: what it "
            "does to the loss is for the learning rate to answer; more micro batches a step hide "
            "the exchange of gradients, the optimizer and a pipeline's bubble."
        ],
        rows,
    )


def _sequence(chosen: RunConfig) -> Section:
    rows = [["sequence", "global batch", "step", "tokens/s/GPU", "against", "GiB/GPU", "fits",
             "layout"]]  # fmt: skip
    found = list(decision.sequences(chosen))
    wrong = []
    for one in found:
        if one.speed is None:
            problem = errors(one.findings)
            wrong.append(f"{one.name}: {problem[0].message if problem else 'not estimated'}.")
            continue
        rows.append([
            one.name, f"{one.config.training.global_batch_size:,}",
            report.seconds(one.speed.step_s), f"{one.rate:,.0f}", _against(one, found[0]),
            _gib(one), _fit(one), _words(one),
        ])  # fmt: skip
    lines = ["Twice and four times the length, with as many tokens a step where they divide; "
             "attention's share grows with the length, and what a micro batch keeps."]  # fmt: skip
    return Section("Sequence length", lines, rows, wrong)


def _recompute(taken: Alternative, chosen: RunConfig) -> Section:
    rows = [["recompute", "tokens/s/GPU", "against", "GiB/GPU", "fits", "layout"]]
    for one in decision.recomputes(taken):
        rows.append([one.name, f"{one.rate:,.0f}", _against(one, taken), _gib(one), _fit(one),
                     "as taken"])  # fmt: skip
    missing = []
    if chosen.layout.recompute is None:
        for way, name in (("none", "none"), ("full", "all blocks")):
            best = decision.best_with(chosen, recompute=way)
            if best is None:
                missing.append(f"With recompute {name}, no layout fits.")
                continue
            rows.append([f"{name}, its best layout", f"{best.rate:,.0f}", _against(best, taken),
                         _gib(best), _fit(best), _words(best)])  # fmt: skip
    lines = [
        f"Taken: {report.recompute_words(taken.config.layout)}. Blocks computed again in the "
        "backward pass cost a part of the forward pass, and their memory may buy a larger micro "
        "batch or less splitting."
    ]
    return Section("Checkpointing of activations", lines, rows, missing)


def _sharding(taken: Alternative) -> Section:
    options = taken.options
    if options is None or not (options.best or options.too_large):
        return Section("Sharding", ["The layout was given, so none was searched."])
    rows = [["", "tokens/s/GPU", "GiB/GPU", "layout", "why"]]
    for rank, option in enumerate(options.best[:SHOWN], 1):
        why = "taken" if rank == 1 else why_slower(option, options.best[0])
        rows.append([str(rank), *_of(option), why])
    for option in options.too_large[:NEAREST]:
        over = f"{report.size(option.memory.needed - (taken.room or 0))} too large"
        if option.memory.needed <= (taken.room or 0):
            over = "fits without the margin alone"
            if not saving.fits(option.facts):
                over = "a save does not fit in the host's memory"
        rows.append(["-", *_of(option), over])
    lines = [
        f"{options.tried:,} estimates: of each split its fastest micro batch and recompute. Below "
        "the fastest, the nearest of those that do not fit and could have been as fast."
    ]
    return Section("Sharding", lines, rows, picture="splits")


def _of(option: Option) -> list[str]:
    return [f"{option.speed.tokens_per_s_per_gpu:,.0f}",
            f"{option.memory.needed / report.GIB:,.0f}",
            report.layout_words(option.config, option.facts.data_parallel)]  # fmt: skip


def _figures(taken: Alternative) -> Section:
    held, speed = taken.held, taken.speed
    assert held is not None
    assert speed is not None
    memory = sorted(held.parts.items(), key=lambda part: -part[1])
    time = sorted(speed.parts.items(), key=lambda part: -part[1])
    rows = [["memory", "GiB", "step", "ms", "share"]]
    for index in range(max(len(memory), len(time))):
        row = ["", "", "", "", ""]
        if index < len(memory):
            row[:2] = [memory[index][0], f"{memory[index][1] / report.GIB:.2f}"]
        if index < len(time):
            name, s = time[index]
            row[2:] = [name, f"{1000 * s:,.0f}", f"{s / speed.step_s:.1%}"]
        rows.append(row)
    rows.append(["peak", f"{held.peak / report.GIB:.2f}", "whole step",
                 f"{1000 * speed.step_s:,.0f}", "100%"])  # fmt: skip
    outside = f"Outside torch's memory: {report.size(held.outside)} more."
    return Section("Predicted figures, by part", [], rows, [outside])


def _measure(decided: Decision, words: list[str], chosen: RunConfig) -> Section:
    """Exact commands, on the machine itself."""
    taken, options = decided.taken, decided.taken.options
    start = ["python", "launch/train.py"]
    short = ["training.train_steps=20", "training.eval_interval=0", "checkpoint.save=false"]
    both = ",".join(dict.fromkeys((decision.BASELINE, taken.name)))
    commands = [
        ("the node itself", ["python", "tools/doctor.py"]),
        ("the BF16 baseline: speed and memory against the figures above",
         [*start, *words, f"precision={decision.BASELINE}", *short]),
    ]  # fmt: skip
    if taken.name != decision.BASELINE:
        commands.append(
            (f"{taken.name}: does it gain what is predicted",
             [*start, *words, f"precision={taken.name}", *short])
        )  # fmt: skip
    second = options.best[1:2] if options else []
    for option in second:
        given = _settings(option.config, chosen)
        commands.append(
            ("the split that came second: they may change places",
             [*start, *words, f"precision={taken.name}", *given, *short])
        )  # fmt: skip
    if taken.name != decision.BASELINE:
        commands.append(
            ("loss curves of both, before production",
             [*start, "-m", "experiment=compare_precision", *words, f"precision={both}",
              "training.train_steps=2000", "run_dir=runs/formats"])
        )  # fmt: skip
        commands.append(("and beside each other",
                         ["python", "tools/compare_runs.py", "runs/formats"]))  # fmt: skip
    block = []
    for why, command in commands:
        block += [f"# {why}", shlex.join(command)]
    lines = ["In this order; change one thing at a time, and only a measured bottleneck."]
    return Section("What to measure first", lines, block=block)


def _settings(option: RunConfig, asked: RunConfig) -> list[str]:
    """What a search decided, as words."""
    found = []
    for name, value in option.layout:
        if value != getattr(asked.layout, name):
            found.append(setting_word(f"layout.{name}", value))
    if asked.training.micro_batch_size is None:
        found.append(f"training.micro_batch_size={option.training.micro_batch_size}")
    return found


if __name__ == "__main__":
    sys.exit(main())
