"""The schedule and the data."""

from __future__ import annotations

from collections.abc import Iterator

from planning.rules.base import Facts, Verdict, rule
from planning.schema import amount


@rule("warmup", "optimizer_param_scheduler.py: lr_warmup_steps < lr_decay_steps")
def warmup(f: Facts) -> Iterator[Verdict]:
    training = f.config.training
    decay = training.optimizer.decay_steps or training.train_steps
    warmup = amount(training.optimizer.warmup_steps, decay)
    if warmup >= decay:
        yield (
            "training.optimizer.warmup_steps",
            f"{warmup} steps of warm-up, and the schedule has {decay}",
            f"take fewer than {decay}, or a share such as 2%",
        )


@rule("learning-rate", "arguments.py: min_lr <= lr")
def learning_rate(f: Facts) -> Iterator[Verdict]:
    optimizer = f.config.training.optimizer
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            "training.optimizer.min_learning_rate",
            f"{optimizer.min_learning_rate} is above learning_rate={optimizer.learning_rate}",
            "take less",
        )
    elif optimizer.schedule == "constant" and optimizer.min_learning_rate:
        yield (
            "training.optimizer.min_learning_rate",
            f"a constant learning rate never falls to {optimizer.min_learning_rate}",
            "set it to 0, or take schedule=cosine or linear",
        )


@rule("evaluation", "training.py: do_valid is eval_iters > 0, whatever the interval")
def evaluation(f: Facts) -> Iterator[Verdict]:
    training = f.config.training
    if training.eval_interval and not training.eval_steps:
        yield (
            "training.eval_steps",
            f"0, and training.eval_interval={training.eval_interval} asks for evaluation",
            "take 1 or more, or training.eval_interval=0 for no evaluation",
        )


@rule("unused-data", "a setting that nothing reads")
def unused_data(f: Facts) -> Iterator[Verdict]:
    data, tokenizer = f.config.data, f.config.data.tokenizer
    if data.kind != "indexed":
        given = {
            "data.paths": data.paths,
            "data.train_paths": data.train_paths,
            "data.valid_paths": data.valid_paths,
            "data.test_paths": data.test_paths,
            "data.split": data.split,
        }
        for setting, value in given.items():
            if value:
                yield setting, f"{value} means nothing with data={data.kind}", "take data=indexed"
    if data.kind == "library_text" and (tokenizer.kind, tokenizer.vocab_size) != ("byte", 257):
        wrong = "kind" if tokenizer.kind != "byte" else "vocab_size"
        yield (
            f"data.tokenizer.{wrong}",
            f"{getattr(tokenizer, wrong)} means nothing with data=library_text, read by bytes",
            "leave it out, or take data=indexed",
        )
    if tokenizer.path is not None and tokenizer.kind in ("byte", "none"):
        yield (
            "data.tokenizer.path",
            f"a tokenizer of kind {tokenizer.kind} has no file",
            "set data.tokenizer.kind=huggingface or sentencepiece, or data.tokenizer.path=null",
        )


@rule("tokenizer-vocabulary", "an id beyond the embedding is an invalid read")
def tokenizer_vocabulary(f: Facts) -> Iterator[Verdict]:
    tokens = {"byte": 257}.get(f.config.data.tokenizer.kind, f.config.data.tokenizer.vocab_size)
    if tokens is not None and tokens > f.config.model.vocab_size:
        yield (
            "data.tokenizer",
            f"its {tokens} tokens do not fit model.vocab_size={f.config.model.vocab_size}",
            f"set model.vocab_size={tokens}, or other data",
        )
