"""Prepared token files (Megatron's .bin/.idx), looked at before a run starts.

Only headers and single entries are read, so that a file of any size, here or in object storage,
is checked in well under a second; neither torch nor Megatron is imported.

The .idx (megatron/core/datasets/indexed_dataset.py, _IndexWriter), little endian:
    9 bytes magic, u64 version (1), u8 type of a token, u64 sequences S, u64 document entries D,
    i32[S] tokens of each sequence, i64[S] its first byte in the .bin, i64[D] first sequence of
    each document and, last, S.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from planning.findings import ChoiceError, Finding, MachineError, did_you_mean
from planning.schema import DataConfig

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# DType in indexed_dataset.py: code -> name, bytes. Floats are legal there and no token ids.
TOKEN_TYPES = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    8: ("uint16", 2),
}
SIDECAR_VERSION = 1
SPLITS = ("train", "valid", "test")
SCANNED_BYTES = 32 * 2**20  # of a .bin without sidecar, for the largest id

Paths = Sequence[str | float | int | list[str | float | int]]
Weighted = list[tuple[float | None, str]]


class PreparedBy(Protocol):
    """The part of a tokenizer that a sidecar keeps. Ids are in [0, vocab_size)."""

    @property
    def kind(self) -> str: ...

    @property
    def path(self) -> str | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...  # equal for two tokenizers that give the same ids


@dataclass(frozen=True)
class IndexedInfo:
    """One prefix. `tokenizer` is the sidecar's, or None where there is none."""

    prefix: str
    sequences: int
    documents: int
    tokens: int
    dtype: str
    bin_bytes: int
    tokenizer: dict[str, Any] | None


@dataclass(frozen=True)
class DataFacts:
    """One prefix in one split of a run.

    share: of the split's samples that come from it, 0 to 1. tokens: of it that are in this split.
    epochs: how often the run reads them.
    """

    split: str
    prefix: str
    share: float
    documents: int
    tokens: int
    epochs: float
    dtype: str
    vocab_size: int | None
    end_of_document: int | None


# --- one prefix ---------------------------------------------------------------------------------


def inspect(prefix: str, setting: str = "data.paths") -> IndexedInfo:
    """What `prefix`.idx says, checked against `prefix`.bin; local or s3://.

    Raises ChoiceError naming the path and `setting` for a missing, foreign, truncated or empty
    file, and MachineError where this machine cannot reach object storage.
    """
    return _Index(prefix, setting).info


def fingerprint(prefix: str) -> str:
    """Differs where the documents' lengths differ, by all likelihood; reads 128 KiB."""
    return _Index(prefix, "data.paths").fingerprint()


class _Index:
    """An open .idx: header checked, entries read one at a time."""

    def __init__(self, prefix: str, setting: str) -> None:
        self.setting = setting
        if prefix.endswith((".bin", ".idx")):
            raise self._error(
                f"{prefix} names a file",
                f"give the prefix of both files: {prefix[:-4]}",
            )
        store = _S3(setting) if prefix.startswith("s3://") else _Local()
        self._idx, self._bin = f"{prefix}.idx", f"{prefix}.bin"
        sizes = {path: store.size(path) for path in (self._idx, self._bin)}
        for path, size in sizes.items():
            if size is None:
                raise self._missing(prefix, path)
        self._store = store
        idx_bytes, bin_bytes = int(sizes[self._idx] or 0), int(sizes[self._bin] or 0)

        if idx_bytes < HEADER.size:
            raise self._broken(f"{self._idx} is truncated: {idx_bytes} bytes")
        magic, version, code, sequences, entries = HEADER.unpack(
            store.read(self._idx, 0, HEADER.size)
        )
        if magic != MAGIC or version != 1:
            raise self._error(
                f"{self._idx} is not an index of Megatron's indexed dataset",
                "prepare the data with tools/prepare_data.py",
            )
        if code not in TOKEN_TYPES:
            raise self._error(
                f"{self._idx} holds no token ids: type code {code}",
                "prepare the data with tools/prepare_data.py",
            )
        dtype, self.itemsize = TOKEN_TYPES[code]
        needed = HEADER.size + sequences * 12 + entries * 8
        if idx_bytes < needed:
            raise self._broken(
                f"{self._idx} is truncated: {idx_bytes} bytes, and its header needs {needed}"
            )
        if sequences == 0 or entries < 2:
            raise self._error(
                f"{prefix} is empty: no documents",
                "prepare it again from files that hold text",
            )
        self.sequences = sequences
        last_entry = self._i64(HEADER.size + sequences * 12 + (entries - 1) * 8)
        self.bytes = self._start(sequences - 1) + self._length(sequences - 1) * self.itemsize
        if last_entry != sequences or self.bytes < 0:
            raise self._broken(f"{self._idx} contradicts itself")
        if self.bytes == 0:
            raise self._error(f"{prefix} is empty: no tokens", "prepare it again")
        if bin_bytes != self.bytes:
            what = "is truncated" if bin_bytes < self.bytes else "does not belong to its .idx"
            raise self._broken(
                f"{self._bin} {what}: {bin_bytes} bytes, and the index says {self.bytes}"
            )
        documents, tokens = entries - 1, self.bytes // self.itemsize
        self.info = IndexedInfo(
            prefix,
            sequences,
            documents,
            tokens,
            dtype,
            bin_bytes,
            self._sidecar(f"{prefix}.json", documents, tokens),
        )

    def tokens(self, beg: int, end: int) -> int:
        """Tokens of the sequences in [beg, end)."""
        if beg >= end:
            return 0
        last = self.bytes if end == self.sequences else self._start(end)
        return (last - self._start(beg)) // self.itemsize

    def largest_id(self) -> int | None:
        """The largest id in the first 32 MiB; None in object storage, where it would be slow."""
        if not isinstance(self._store, _Local):
            return None
        import numpy

        size = min(self.info.bin_bytes, SCANNED_BYTES) // self.itemsize * self.itemsize
        ids = numpy.frombuffer(self._store.read(self._bin, 0, size), dtype=self.info.dtype)
        return int(ids.max())

    def fingerprint(self) -> str:
        lengths, pointers = HEADER.size, HEADER.size + self.sequences * 4
        size = min(2**16, self.sequences * 4)
        last = pointers + self.sequences * 8 - size
        digest = hashlib.sha256(f"{self.sequences} {self.itemsize} {self.bytes}".encode())
        digest.update(self._store.read(self._idx, lengths, size))
        digest.update(self._store.read(self._idx, last, size))
        return digest.hexdigest()[:16]

    def _start(self, sequence: int) -> int:
        return self._i64(HEADER.size + self.sequences * 4 + sequence * 8)

    def _length(self, sequence: int) -> int:
        data = self._store.read(self._idx, HEADER.size + sequence * 4, 4)
        return int.from_bytes(data, "little", signed=True)

    def _i64(self, offset: int) -> int:
        return int.from_bytes(self._store.read(self._idx, offset, 8), "little", signed=True)

    def _sidecar(self, path: str, documents: int, tokens: int) -> dict[str, Any] | None:
        size = self._store.size(path)
        if size is None:
            return None
        try:
            sidecar = json.loads(self._store.read(path, 0, size))
            described = (sidecar["documents"], sidecar["tokens"])
            tokenizer = dict(sidecar["tokenizer"])
            tokenizer = {
                key: tokenizer[key]
                for key in (
                    "kind",
                    "path",
                    "vocab_size",
                    "end_of_document",
                    "fingerprint",
                )
            }
        except (ValueError, KeyError, TypeError) as error:
            raise self._error(
                f"{path} does not describe a dataset: {error!r}",
                "it is written by tools/prepare_data.py; delete it if it is another program's",
            ) from error
        if described != (documents, tokens):
            raise self._error(
                f"{path} describes {described[0]} documents of {described[1]} tokens, and the "
                f"index holds {documents} of {tokens}",
                "the files are of different datasets: copy all three of a prefix together",
            )
        return tokenizer

    def _missing(self, prefix: str, path: str) -> ChoiceError:
        near = ""
        if not prefix.startswith("s3://") and (folder := Path(prefix).parent).is_dir():
            near = did_you_mean(
                Path(prefix).name, sorted(file.stem for file in folder.glob("*.idx"))
            )
        return self._error(
            f"{path} does not exist{near}",
            "give the prefix of a .bin and an .idx file; tools/prepare_data.py makes them",
        )

    def _broken(self, message: str) -> ChoiceError:
        return self._error(message, "copy both files again, or prepare the data again")

    def _error(self, message: str, fix: str) -> ChoiceError:
        return ChoiceError(Finding("indexed_data", "error", self.setting, message, fix))


class _Local:
    def size(self, path: str) -> int | None:
        file = Path(path)
        return file.stat().st_size if file.is_file() else None

    def read(self, path: str, offset: int, size: int) -> bytes:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(size)


class _S3:
    """Sizes by head_object, bytes by a ranged get_object."""

    def __init__(self, setting: str) -> None:
        self.setting = setting
        try:
            import boto3
            import botocore.exceptions
        except ModuleNotFoundError as error:
            raise self._unreachable(
                "s3:// data needs boto3, which is not installed",
                "pip install '.[sagemaker]'",
            ) from error
        self._errors = botocore.exceptions
        try:
            self._client = boto3.client("s3")
        except (self._errors.BotoCoreError, ValueError) as error:
            raise self._unreachable(
                f"cannot make an S3 client: {error}",
                "check the AWS configuration of this machine",
            ) from error

    def size(self, path: str) -> int | None:
        try:
            return int(self._call("head_object", path)["ContentLength"])
        except FileNotFoundError:
            return None

    def read(self, path: str, offset: int, size: int) -> bytes:
        answer = self._call("get_object", path, Range=f"bytes={offset}-{offset + size - 1}")
        data: bytes = answer["Body"].read()
        return data

    def _call(self, operation: str, path: str, **arguments: str) -> dict[str, Any]:
        bucket, _, key = path.removeprefix("s3://").partition("/")
        try:
            answer: dict[str, Any] = getattr(self._client, operation)(
                Bucket=bucket, Key=key, **arguments
            )
            return answer
        except self._errors.ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in ("404", "NoSuchKey", "NoSuchBucket"):
                raise FileNotFoundError(path) from error
            raise self._unreachable(
                f"{path} cannot be read: {error}",
                "the credentials of this machine need s3:GetObject and s3:ListBucket there",
            ) from error
        except self._errors.ParamValidationError as error:
            raise ChoiceError(
                Finding(
                    "indexed_data",
                    "error",
                    self.setting,
                    f"{path} is not an S3 path",
                    "give s3://bucket/key",
                )
            ) from error
        except self._errors.BotoCoreError as error:  # no credentials, no region, no network
            raise self._unreachable(
                f"{path} cannot be reached: {error}",
                "configure AWS credentials and the region here, or use a local copy",
            ) from error

    def _unreachable(self, message: str, fix: str) -> MachineError:
        return MachineError(Finding("s3_data", "error", self.setting, message, fix))


def write_sidecar(prefix: str, tokenizer: PreparedBy, documents: int, tokens: int) -> None:
    """Write `prefix`.json: what the .bin was made with, which its index does not say."""
    content = {
        "version": SIDECAR_VERSION,
        "documents": documents,
        "tokens": tokens,
        "tokenizer": {
            "kind": tokenizer.kind,
            "path": tokenizer.path,
            "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document,
            "fingerprint": tokenizer.fingerprint,
        },
    }
    Path(f"{prefix}.json").write_text(json.dumps(content, indent=2) + "\n")


# --- the choice ---------------------------------------------------------------------------------


def parse_paths(paths: Paths, setting: str = "data.paths") -> Weighted:
    """(weight, prefix) of each dataset; weight None where none has one.

    Takes prefixes, [weight, prefix] pairs, or a flat list weight, prefix, weight, prefix.
    Raises ChoiceError for anything else, and where only some have a weight.
    """
    parsed: Weighted = []
    pending: float | None = None  # a weight of the flat form, before its prefix
    for item in paths:
        if isinstance(item, list):
            if pending is not None or len(item) != 2 or not isinstance(item[1], str):
                raise _paths_error(f"{item!r} is not a [weight, prefix] pair", setting)
            weight = _weight(item[0], setting)
            if weight is None:
                raise _paths_error(f"{item[0]!r} in {item!r} is not a weight", setting)
            parsed.append((weight, item[1]))
        elif (weight := _weight(item, setting)) is not None:
            if pending is not None:
                raise _paths_error(f"two weights follow each other: {pending:g}, {item}", setting)
            pending = weight
        else:
            parsed.append((pending, str(item)))
            pending = None
    if pending is not None:
        raise _paths_error(f"no prefix follows the weight {pending:g}", setting)
    for _, prefix in parsed:
        if not prefix.strip():
            raise _paths_error("a prefix is empty", setting)
    bare = [prefix for weight, prefix in parsed if weight is None]
    if bare and len(bare) < len(parsed):
        raise _paths_error(f"{bare[0]} has no weight and others have", setting)
    return parsed


def _weight(item: object, setting: str) -> float | None:
    """The number that `item` is, or None if it is none (then it is a prefix)."""
    if isinstance(item, bool):
        raise _paths_error(f"{item!r} is neither a weight nor a prefix", setting)
    try:
        weight = float(item)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if not (math.isfinite(weight) and weight > 0):
        raise _paths_error(f"the weight {item} is not above 0", setting)
    return weight


def _paths_error(message: str, setting: str) -> ChoiceError:
    return ChoiceError(
        Finding(
            "data_paths",
            "error",
            setting,
            message,
            "give prefixes [a, b], or a weight for each [[0.7, a], [0.3, b]]",
        )
    )


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of train, valid and test, which sum to 1, of '969,30,1'.

    Raises ChoiceError for other than one to three numbers, and where train gets nothing.
    """
    numbers = split.split(",")
    legal = len(numbers) <= 3 and all(
        re.fullmatch(r"\d+(\.\d*)?|\.\d+", number.strip()) for number in numbers
    )
    shares = [float(number) for number in numbers] if legal else []
    if not shares or shares[0] == 0:
        raise ChoiceError(
            Finding(
                "data_split",
                "error",
                "data.split",
                f"{split!r} is not a split"
                + (": nothing is left to train on" if shares else " into train,valid,test"),
                'give up to three numbers, such as "969,30,1"',
            )
        )
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    return (shares[0] / total, shares[1] / total, shares[2] / total)


def blends(data: DataConfig) -> tuple[Weighted | None, list[Weighted]]:
    """The datasets of `data`: (of all splits, []) with data.paths, else (None, [train, valid,
    test]). Raises ChoiceError where the choice names none, or both forms.
    """
    shared = parse_paths(data.paths, "data.paths")
    separate = [
        parse_paths(getattr(data, f"{split}_paths"), f"data.{split}_paths") for split in SPLITS
    ]

    def error(setting: str, message: str, fix: str) -> ChoiceError:
        return ChoiceError(Finding("data_paths", "error", setting, message, fix))

    if shared and any(separate):
        raise error(
            "data.paths",
            "data.paths and separate paths of a split are both set",
            "use data.paths with data.split, or train_paths, valid_paths and test_paths",
        )
    if shared:
        if data.split is None:
            raise error("data.split", "data.paths needs a split", 'set it, such as "969,30,1"')
        return shared, []
    if not separate[0]:
        raise error(
            "data.paths",
            "no dataset is named",
            "give the prefix of a .bin and an .idx file: data.paths=[my_text]",
        )
    return None, separate


# --- the choice against the files ---------------------------------------------------------------


def samples_needed(
    train_steps: int, eval_interval: int, eval_steps: int, global_batch_size: int
) -> tuple[int, int, int]:
    """Sequences that a run reads of train, valid and test, as Megatron counts them
    (get_train_valid_test_num_samples in megatron/training/training.py).
    """
    evaluates = eval_interval > 0
    evaluations = train_steps // eval_interval + 1 if evaluates else 0
    return (
        train_steps * global_batch_size,
        evaluations * eval_steps * global_batch_size,
        eval_steps * global_batch_size if evaluates else 0,
    )


def check(
    data: DataConfig,
    model_vocab_size: int,
    seq_length: int,
    needed: tuple[int, int, int],
    library_text: Sequence[str] | None = None,
) -> tuple[list[DataFacts], list[Finding]]:
    """The datasets of a run, and everything wrong with them.

    needed: `samples_needed(...)`. library_text: its train, valid and test prefix, for that kind.
    Raises what `inspect` raises for object storage that cannot be reached; all else is a finding.
    """
    if data.kind == "mock":
        return [], []
    try:
        used = list(_used(data, library_text))
    except ChoiceError as error:
        return [], error.findings
    findings: list[Finding] = []
    opened: dict[str, _Index] = {}
    for use in used:
        for _, prefix in use.datasets:
            if prefix not in opened:
                try:
                    opened[prefix] = _Index(prefix, use.setting)
                except ChoiceError as error:
                    findings += error.findings
    if findings:
        return [], findings

    settings = {prefix: use.setting for use in used for _, prefix in use.datasets}
    findings += _vocabulary(data, model_vocab_size, opened, settings)
    facts: list[DataFacts] = []
    for use, samples in zip(used, needed, strict=True):
        more_facts, more_findings = _split(data, use, samples, seq_length, opened)
        facts += more_facts
        findings += more_findings
    return facts, findings


@dataclass(frozen=True)
class _Use:
    """A split: its datasets, and the part [beg, end) of each, of 1, that it reads."""

    split: str
    setting: str
    datasets: Weighted
    beg: float = 0.0
    end: float = 1.0


def _used(data: DataConfig, library_text: Sequence[str] | None) -> Iterator[_Use]:
    if data.kind == "library_text":
        if library_text is None:
            raise ValueError("data.kind=library_text needs its prefixes")
        for split, prefix in zip(SPLITS, library_text, strict=True):
            yield _Use(split, "data.cache", [(None, prefix)])
        return
    shared, separate = blends(data)
    if shared is None:
        for split, datasets in zip(SPLITS, separate, strict=True):
            yield _Use(split, f"data.{split}_paths", datasets)
        return
    beg = 0.0
    for split, share in zip(SPLITS, parse_split(data.split or ""), strict=True):
        yield _Use(split, "data.paths", shared if share else [], beg, beg + share)
        beg += share


def shares(datasets: Weighted, infos: Sequence[IndexedInfo]) -> list[float]:
    """How much of the samples comes from each dataset: by weight, else by tokens. Sums to 1."""
    weights = [
        float(info.tokens) if weight is None else weight
        for (weight, _), info in zip(datasets, infos, strict=True)
    ]
    return [weight / sum(weights) for weight in weights]


def _split(
    data: DataConfig,
    use: _Use,
    samples: int,
    seq_length: int,
    opened: dict[str, _Index],
) -> tuple[list[DataFacts], list[Finding]]:
    of_split = "data.split" if data.paths else use.setting
    if not use.datasets:
        if use.split == "valid" and samples:
            return [], [
                Finding(
                    "valid_data",
                    "error",
                    of_split,
                    "the valid split is empty, and training.eval_interval asks for evaluation",
                    "give it a share, or set training.eval_interval=0",
                )
            ]
        return [], []
    facts, findings = [], []
    indices = [opened[prefix] for _, prefix in use.datasets]
    for index, share in zip(
        indices, shares(use.datasets, [index.info for index in indices]), strict=True
    ):
        # Megatron splits by sequences (documents), not by tokens, and rounds like this
        # (blended_megatron_dataset_builder.py).
        beg, end = round(use.beg * index.sequences), round(use.end * index.sequences)
        tokens = index.tokens(beg, end)
        # With several datasets Megatron draws 0.5% more of each (mid_level_dataset_surplus).
        drawn = math.ceil(samples * share * (1.005 if len(indices) > 1 else 1))
        epochs = drawn * seq_length / tokens if tokens else math.inf
        info = index.info
        tokenizer = info.tokenizer or {}
        facts.append(
            DataFacts(
                use.split,
                info.prefix,
                share,
                end - beg,
                tokens,
                epochs,
                info.dtype,
                tokenizer.get("vocab_size"),
                tokenizer.get("end_of_document"),
            )
        )
        if not samples:
            continue
        if tokens < seq_length + 1:
            whole = use.end - use.beg == 1
            findings.append(
                Finding(
                    "dataset_too_short",
                    "error",
                    use.setting if whole else "data.split",
                    f"the {use.split} split of {info.prefix} has {tokens} tokens in {end - beg} "
                    f"of {index.sequences} documents, and one sequence needs {seq_length + 1}",
                    f"use more data, or model.seq_length below {tokens}"
                    if whole
                    else f"give {use.split} a larger share in data.split, a dataset of its own in "
                    f"data.{use.split}_paths, or use more data"
                    + (", or set training.eval_interval=0" if use.split != "train" else ""),
                )
            )
        elif use.split == "train" and epochs > 1:
            findings.append(
                Finding(
                    "epochs",
                    "warning",
                    use.setting,
                    f"the run reads {info.prefix} {epochs:.1f} times: {drawn:,} sequences of "
                    f"{seq_length:,} tokens from {tokens:,} tokens",
                    "train fewer steps, or add data"
                    + (", or lower its weight" if len(indices) > 1 else ""),
                )
            )
    return facts, findings


def _vocabulary(
    data: DataConfig,
    model_vocab_size: int,
    opened: dict[str, _Index],
    settings: dict[str, str],
) -> list[Finding]:
    """Ids that the model has no row for, and datasets that do not go together."""
    findings = []
    chosen = 257 if data.tokenizer.kind == "byte" else data.tokenizer.vocab_size
    made_with: dict[str, str] = {}  # fingerprint -> first prefix
    for prefix, index in opened.items():
        sidecar = index.info.tokenizer
        if sidecar:
            made_with.setdefault(str(sidecar["fingerprint"]), prefix)
            size, source = int(sidecar["vocab_size"]), f"{prefix}.json"
        elif chosen:
            size, source = chosen, "data.tokenizer"
        else:
            size, source = 0, ""
        if sidecar and chosen and chosen != size:
            findings.append(
                Finding(
                    "data_tokenizer",
                    "error",
                    "data.tokenizer",
                    f"the choice has a vocabulary of {chosen}, and {prefix} was prepared with "
                    f"{sidecar['kind']} of {size}",
                    "choose the tokenizer that the data was prepared with, or kind=none with "
                    "vocab_size=null, which takes what the data says",
                )
            )
        if size > model_vocab_size:
            findings.append(
                Finding(
                    "data_vocabulary",
                    "error",
                    "model.vocab_size",
                    f"the tokenizer of {prefix} has {size} ids ({source}), and the model has "
                    f"{model_vocab_size}",
                    f"set model.vocab_size={size}, or choose data for this model",
                )
            )
        elif not sidecar:
            limit = size or model_vocab_size
            largest = index.largest_id()
            if largest is not None and largest >= limit:
                findings.append(
                    Finding(
                        "data_vocabulary",
                        "error",
                        "data.tokenizer" if size else "model.vocab_size",
                        f"{prefix} holds the id {largest}, and ids must be below {limit}",
                        "name the tokenizer that the data was prepared with, and a model with "
                        "its vocabulary",
                    )
                )
            elif not size:
                findings.append(
                    Finding(
                        "data_vocabulary",
                        "warning",
                        settings[prefix],
                        f"{prefix} does not say which tokenizer made it (no {prefix}.json): its "
                        f"ids are taken to be below {model_vocab_size}",
                        "set data.tokenizer.vocab_size",
                    )
                )
    if len(made_with) > 1:
        first, second, *_ = made_with.values()
        findings.append(
            Finding(
                "data_tokenizer",
                "error",
                settings[second],
                f"{first} and {second} were prepared with different tokenizers",
                "prepare all datasets of a run with one tokenizer",
            )
        )
    return findings
