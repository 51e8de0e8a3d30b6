"""What a command line may say: the groups of conf/ with their choices, and `--help`.

Imports nothing that takes time.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

CONF = Path(__file__).resolve().parents[1] / "conf"

HELP = """\
Slipway pretrains a Megatron-Core model: a choice becomes one explicit plan, which is checked and
estimated before anything starts, and then trains unchanged.

  python launch/train.py [GROUP=CHOICE ...] [GROUP.SETTING=VALUE ...]

Without words it trains a small model on this machine, in minutes, with or without a GPU.

Choices, each a file conf/GROUP/CHOICE.yaml (* is taken where nothing is said)
{groups}

Examples
  python launch/train.py model=gpt_1b precision=fp8 training.train_steps=100
  python launch/train.py model=gpt_32b precision=nvfp4 hardware=p6_b200 launch=plan
  python launch/train.py model=gpt_8b hardware=p6_b200 launch=sagemaker launch.dry_run=true
  python launch/train.py -m model=gpt_160m precision=bf16,fp8 run_dir=runs/compare

Settings
  --cfg job           every setting with its value, after the words beside it; with --resolve also
                      what follows from others
  run_dir=PATH        where the run is kept, and continued (runs/MODEL/TIME)
  resume=none         do not continue the run in run_dir, but put it aside
  launch=plan         stop after the plan: plan.yaml, plan.json
  launch=sagemaker    a training job; slurm, docker, kubernetes: a file that starts the run there
  'data.paths=[a,b]'  quote what the shell would take; null is no value

Options
  -m, --multirun      one job for each combination of values with commas, and a table of them
  -c, --cfg job       print the settings and stop
  -h, --help          this
  --info, --hydra-help, --shell-completion are Hydra's own (https://hydra.cc).

Exit status
  0    done, submitted, written, or a plan that is legal and fits
  1    failed while running
  2    the choice is wrong wherever it runs
  3    the choice is legal, but this machine cannot run it now
  143  stopped by a signal, after saving
  Of a sweep: 0 if all are 0, else 143, 1, 3 or 2, the first of them that a job has.
"""


def groups() -> list[str]:
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def choices(group: str) -> list[str]:
    """The choices of a group, nested ones too ("bench/fp8")."""
    folder = CONF / group
    return sorted(str(path.relative_to(folder))[:-5] for path in folder.rglob("*.yaml"))


def text() -> str:
    """What `--help` prints."""
    taken = (CONF / "config.yaml").read_text()
    width = max(map(len, groups())) + 2
    rows = []
    for group in groups():
        words = [
            f"{choice}*" if f"- {group}: {choice}\n" in taken else choice
            for choice in choices(group)
        ]
        indent = " " * (width + 2)
        wrapped = textwrap.wrap(
            " ".join(words), 98, initial_indent=indent, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        rows.append(f"  {group:<{width}}" + "\n".join(wrapped).lstrip())
    return HELP.format(groups="\n".join(rows))
