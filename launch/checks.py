"""What only the machine that launches can see of a choice: files, earlier runs, checkpoints."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch import run_folder
from models import stacks
from planning import identity
from planning.findings import ChoiceError, Finding, written
from planning.schema import RunConfig
from training import checkpoints
from training.data import indexed, library_text

CHANNEL = "data:"  # begins a path in a channel of a job: data:NAME/...


def home(text: str, setting: str) -> Path:
    """The path with `~` replaced. Raises ChoiceError: there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        message, fix = f"{text}: there is no such user", "write the path in full"
        raise ChoiceError(Finding("home", "error", setting, message, fix)) from None


def absolute(config: RunConfig) -> RunConfig:
    """The choice with its local paths made absolute: workers need not share our folder.

    Raises ChoiceError: a path in the home of an unknown user.
    """

    def path(text: str, setting: str) -> str:
        return text if not is_local(text) else str(home(text, setting).absolute())

    def paths(items: list[Any], setting: str) -> list[Any]:
        # Strings that are numbers are weights.
        return [
            paths(item, setting)
            if isinstance(item, list)
            else path(item, setting)
            if isinstance(item, str) and not _is_number(item)
            else item
            for item in items
        ]

    home(config.data.cache, "data.cache")
    sources = {
        name: paths(getattr(config.data, name), f"data.{name}")
        for name in ("paths", "train_paths", "valid_paths", "test_paths")
    }
    saving = config.checkpoint
    checkpoint = {
        "save": saving.save
        if isinstance(saving.save, bool)
        else path(saving.save, "checkpoint.save"),
        "load": None if saving.load is None else path(saving.load, "checkpoint.load"),
    }
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=sources),
            "checkpoint": saving.model_copy(update=checkpoint),
        }
    )


def folders(config: RunConfig, run_dir: Path | None) -> list[Finding]:
    """Paths that cannot be: an address, a yes or a file where a folder is meant, one too long, or
    one that this user may not see. Of `config` as it was given, before absolute()."""
    given = [("run_dir", config.run_dir)]
    given += [(name, path) for name, path in named_paths(config) if name.startswith("checkpoint.")]
    found = []
    for setting, text in given:
        if text is None or config.launch.kind == "sagemaker":  # launch/aws/rules.py says more
            continue
        if "://" in text:
            message, fix = f"{text} is an address, and a folder is needed", "name one, or mount it"
        elif setting == "checkpoint.save" and text.lower() in ("yes", "no", "on", "off"):
            word = "true" if text.lower() in ("yes", "on") else "false"
            message, fix = f"{text!r} would be a folder", f"write {word}, or ./{text} for a folder"
        else:
            continue
        found.append(Finding("folder", "error", setting, message, fix))
    looked = [("run_dir", run_dir), ("data.cache", home(config.data.cache, "data.cache"))]
    for setting, text in named_paths(config):
        if is_local(text):
            end = ".idx" if setting.startswith("data.") else ""
            looked.append((setting, home(text + end, setting)))
    for setting, path in looked:
        unusable = [errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP]
        if setting != "run_dir":  # which is made, or said to be not writable
            unusable.append(errno.ENOTDIR)
        try:
            is_folder = path is None or stat.S_ISDIR(path.stat().st_mode)
            if not is_folder and (setting == "data.cache" or not setting.startswith("data.")):
                message, fix = f"{path} is a file, and a folder is needed", "name another one"
                found.append(Finding("folder", "error", setting, message, fix))
        except OSError as error:
            if error.errno in unusable:
                message, fix = f"{path}: {error.strerror}", f"choose another {setting}"
                machine = error.errno == errno.EACCES
                found.append(Finding("folder", "error", setting, message, fix, machine=machine))
    return found


def is_local(path: str) -> bool:
    """Whether a path is of this machine: neither s3://... nor in a job's channel (data:...)."""
    return "://" not in path and not path.startswith(CHANNEL)


def named_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(setting, path) of all that the choice names by a path."""

    def inside(items: list[Any]) -> Iterator[str]:
        for item in items:
            if isinstance(item, list):
                yield from inside(item)
            elif isinstance(item, str) and not _is_number(item):
                yield item

    if config.data.kind == "indexed":
        for name in ("paths", "train_paths", "valid_paths", "test_paths"):
            for path in inside(getattr(config.data, name)):
                yield f"data.{name}", path
    for name in ("load", "save"):
        if isinstance(path := getattr(config.checkpoint, name), str):
            yield f"checkpoint.{name}", path


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def stack(config: RunConfig) -> list[Finding]:
    try:
        stacks.check(config.model.stack)
    except ChoiceError as error:
        return error.findings
    return []


def data(config: RunConfig) -> list[Finding]:
    training = config.training
    made = None
    if config.data.kind == "library_text":
        if config.hardware.name != "this":
            return []  # made where it runs, from the sources there
        prefixes = library_text.expected(Path(config.data.cache).expanduser().resolve())
        if prefixes is None:
            return []  # the first worker makes it
        made = (prefixes.train, prefixes.valid, prefixes.test)
    needed = indexed.samples_needed(
        training.train_steps,
        training.eval_interval,
        training.eval_steps,
        training.global_batch_size,
    )
    _, findings = indexed.check(
        config.data, config.model.vocab_size, config.model.seq_length, needed, made
    )
    return findings


def checkpoint_folder(config: RunConfig, run_dir: Path) -> Path:
    save = config.checkpoint.save
    return run_dir / "checkpoints" if isinstance(save, bool) else Path(save)


def against_previous(config: RunConfig, folder: Path | None) -> tuple[list[Finding], list[str]]:
    """(errors: `folder` is of another run; lines: what changed) where a run would continue."""
    saves = checkpoint_folder(config, folder or Path())
    # What a job has saved is where the job was.
    submitted = folder is not None and (folder / "job.json").exists()
    saved = checkpoints.newest_complete(saves).taken is not None or submitted
    trained = saved or (folder is not None and run_folder.is_started(folder))
    previous, where = _previous_config(config, folder, trained)
    if previous is None and trained and config.resume == "auto":
        message = (
            f"{folder or saves} holds a run, and no plan.yaml that can be read: nothing says what "
            "its checkpoints are of"
        )
        fix = "put back its plan.yaml, or take resume=none or another run_dir"
        return [Finding("previous-plan", "error", "run_dir", message, fix)], []
    # A plan may replace that of a start that has trained nothing.
    if previous is None or config.resume != "auto" or not (
        trained or config.launch.kind == "local"
    ):  # fmt: skip
        return [], []
    after = config.model_dump(mode="json")
    different, changed = identity.compare(
        previous, after, str(where), saves=str(saves) if saved else None
    )
    return different, changed if trained else []


def _previous_config(
    config: RunConfig, run_dir: Path | None, trained: bool
) -> tuple[dict[str, Any] | None, Path | None]:
    """The configuration of the run that this one would continue, and where it is, if there is
    one."""
    folders = [checkpoint_folder(config, run_dir or Path())]
    if run_dir is not None:
        folders.insert(0, run_dir)
    elif isinstance(config.checkpoint.save, bool):
        return None, None
    for folder in folders:
        found = run_folder.planned_config(folder)
        if found is not None and (trained or not run_folder.is_only_planned(found)):
            return found, folder
    return None, None


def initial_weights(config: RunConfig) -> list[Finding]:
    folder = config.checkpoint.load
    if folder is None or "://" in folder:
        return []
    newest = checkpoints.newest_complete(Path(folder))
    sharded = config.layout.sharding == "fsdp"
    if newest.taken is None:
        reason = f": {newest.passed_over[0].reason}" if newest.passed_over else ""
        message, fix = f"{folder} holds no complete checkpoint{reason}", "name one that has iter_*"
        if not Path(folder).exists():
            message = f"{folder} does not exist"
        elif checkpoints.newest_complete(inside := Path(folder) / "checkpoints").taken:
            fix = f"a run's are inside: checkpoint.load={inside}"
        elif checkpoints.newest_complete(around := Path(folder).parent).taken:
            fix = f"name the folder around it: checkpoint.load={around}"
    elif sharded != (newest.taken.format == "dcp"):
        # docs/resume.md: Megatron-FSDP saves in a format of its own.
        message = f"{newest.taken.path} was {'not ' if sharded else ''}saved by Megatron-FSDP"
        fix = f"take {'another layout than fsdp' if sharded else 'layout=fsdp'}"
    else:
        return _other_shape(config, Path(folder))
    return [Finding("initial-weights", "error", "checkpoint.load", message, fix)]


def _other_shape(config: RunConfig, folder: Path) -> list[Finding]:
    """How the model of the weights differs, where their run left its plan beside them."""
    theirs, ours = (run_folder.planned_config(folder) or {}).get("model"), config.model.model_dump()
    if not isinstance(theirs, dict):
        return []
    return [
        Finding(
            "initial-weights",
            "error",
            f"model.{name}",
            f"{folder} holds the weights of a model with {written(theirs[name])}, this one has "
            f"{written(ours[name])}",
            "take that model's settings, or other weights",
        )
        for name in identity.SHAPE
        if name in theirs and not identity.same_shape(name, theirs, ours)
    ]
