"""Documents of JSONL, Parquet and text files, in pieces that can be read apart.

The pieces and their order depend on the files alone, not on who reads them: so that any number of
processes, and any number of starts, give the same documents in the same order.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from planning.findings import ChoiceError, Finding, did_you_mean

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}


@dataclass(frozen=True)
class Piece:
    """A part of a file: bytes [beg, end), or row groups of Parquet. `size`: its bytes on disk."""

    file: str
    format: str  # jsonl, parquet, or text
    beg: int
    end: int
    size: int
    modified_ns: int


@dataclass(frozen=True)
class Bad:
    """A document that cannot be read: where (file, or file:line), and why."""

    where: str
    reason: str


def find(inputs: Sequence[str], format: str | None = None) -> list[tuple[Path, str]]:
    """(file, format) of files, folders (searched through) and globs, in order.

    format: of all files; None goes by suffix. Raises ChoiceError for what is not there, is of an
    unknown kind, or is named twice.
    """
    found: list[tuple[Path, str]] = []
    for item in inputs:
        path = Path(item).expanduser()
        if path.is_file():
            found.append((path, format or _format_of(path)))
            continue
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            files = [f for f in files if not _hidden(f.relative_to(path))]
        else:
            files = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
            files = [file for file in files if file.is_file()]
        known = [(file, format or _known(file)) for file in files]
        chosen = [(file, kind) for file, kind in known if kind]
        if not chosen:
            raise _missing(item, path, files)
        found += chosen
    seen: set[Path] = set()
    for file, _ in found:
        if file.resolve() in seen:
            raise _error("inputs", f"{file} is named twice", "name each file once")
        seen.add(file.resolve())
    return found


def shards(
    files: Sequence[tuple[Path, str]], text_key: str, unit: str, shard_bytes: int
) -> list[list[Piece]]:
    """The pieces of all files, in order, in groups of about `shard_bytes` on disk.

    text_key: the Parquet column. unit: 'file' or 'line', what a document of a text file is.
    Raises ChoiceError for a Parquet file that cannot be read or lacks the column.
    """
    groups: list[list[Piece]] = []
    room = 0
    for file, format in files:
        for piece in _pieces(file, format, text_key, unit, shard_bytes):
            if piece.size > room or not groups:
                groups.append([])
                room = shard_bytes
            groups[-1].append(piece)
            room -= piece.size
    return groups


def read(piece: Piece, text_key: str, unit: str) -> Iterator[str | Bad]:
    """The documents of a piece; empty ones too."""
    import pyarrow

    try:
        if piece.format == "parquet":
            yield from _read_parquet(piece, text_key)
        elif piece.format == "text" and unit == "file":
            with _open(piece.file) as stream:
                yield _of_bytes(stream.read(), piece.file)
        else:
            for offset, line in _lines(piece):
                if piece.format == "jsonl":
                    yield _of_json(line, text_key, piece, offset)
                else:
                    yield _of_bytes(line.rstrip(b"\r\n"), piece, offset)
    except (EOFError, zlib.error, gzip.BadGzipFile, pyarrow.ArrowException) as error:
        yield Bad(piece.file, f"damaged: {error}")


def _known(file: Path) -> str | None:
    suffixes = file.suffixes[:-1] if file.suffix == ".gz" else file.suffixes
    return SUFFIXES.get(suffixes[-1].lower()) if suffixes else None


def _format_of(file: Path) -> str:
    if found := _known(file):
        return found
    compressed = file.suffix in (".zst", ".bz2", ".xz", ".zip")
    raise _error(
        "inputs",
        f"{file} is of an unknown kind",
        "decompress it first (.gz alone is read as it is)"
        if compressed
        else "say what it is with --format jsonl, parquet or text",
    )


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _missing(item: str, path: Path, files: Sequence[Path]) -> ChoiceError:
    if files:
        return _error(
            "inputs",
            f"{item} holds {len(files)} files, none of them "
            + ", ".join(sorted(SUFFIXES))
            + " (or these with .gz)",
            "say what they are with --format jsonl, parquet or text",
        )
    near = ""
    if path.parent.is_dir():
        near = did_you_mean(path.name, sorted(other.name for other in path.parent.iterdir()))
    what = "is empty" if path.is_dir() else f"does not exist{near}"
    return _error("inputs", f"{item} {what}", "name files, folders or quoted globs")


def _pieces(file: Path, format: str, text_key: str, unit: str, shard_bytes: int) -> Iterator[Piece]:
    stat = file.stat()
    size, modified = stat.st_size, stat.st_mtime_ns
    if format == "parquet":
        for index, group_bytes in enumerate(_row_groups(file, text_key)):
            yield Piece(str(file), format, index, index + 1, group_bytes, modified)
    elif file.suffix == ".gz" or (format == "text" and unit == "file"):
        yield Piece(str(file), format, 0, size, size, modified)
    else:
        for beg in range(0, size, shard_bytes):
            end = min(beg + shard_bytes, size)
            yield Piece(str(file), format, beg, end, end - beg, modified)


def _row_groups(file: Path, text_key: str) -> list[int]:
    """Compressed bytes of each row group."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise _error(
            "inputs", f"{file} is not a Parquet file: {error}", "leave it out, or write it again"
        ) from error
    if text_key not in schema.names:
        raise _error(
            "--text-key",
            f"{file} has no column {text_key!r}{did_you_mean(text_key, schema.names)}",
            f"its columns are {', '.join(schema.names)}",
        )
    kind = schema.field(text_key).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise _error(
            "--text-key", f"{file}: the column {text_key!r} is {kind}, not text", "name another"
        )
    column = schema.names.index(text_key)
    return [
        metadata.row_group(group).column(column).total_compressed_size
        if metadata.num_columns == len(schema.names)
        else metadata.row_group(group).total_byte_size
        for group in range(metadata.num_row_groups)
    ]


def _read_parquet(piece: Piece, text_key: str) -> Iterator[str | Bad]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(piece.file) as parquet:
        batches = parquet.iter_batches(
            batch_size=1024,
            row_groups=list(range(piece.beg, piece.end)),
            columns=[text_key],
            use_threads=False,
        )
        for batch in batches:
            for value in batch.column(0):
                yield value.as_py() or ""


def _open(file: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file)) if file.endswith(".gz") else open(file, "rb")


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that begin in the piece."""
    with _open(piece.file) as stream:
        if piece.beg:
            stream.seek(piece.beg - 1)
            stream.readline()  # the rest of a line that begins before
        offset = stream.tell()
        compressed = piece.file.endswith(".gz")  # its one piece is the whole file
        while (compressed or offset < piece.end) and (line := stream.readline()):
            yield offset, line
            offset += len(line)


def _of_bytes(content: bytes, file: str | Piece, offset: int = 0) -> str | Bad:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        where = file if isinstance(file, str) else _place(file, offset)
        return Bad(where, f"not UTF-8: {error}")


def _of_json(line: bytes, text_key: str, piece: Piece, offset: int) -> str | Bad:
    if not line.strip():
        return ""
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        return Bad(_place(piece, offset), f"not JSON: {error}")
    if not isinstance(record, dict):
        return Bad(_place(piece, offset), "not a JSON object")
    if text_key not in record:
        keys = ", ".join(record) or "none"
        near = did_you_mean(text_key, record)
        return Bad(_place(piece, offset), f"no key {text_key!r}{near} (its keys: {keys})")
    text = record[text_key]
    if text is None:
        return ""
    if not isinstance(text, str):
        return Bad(_place(piece, offset), f"{text_key!r} is {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON may escape halves of a surrogate pair
        return Bad(_place(piece, offset), f"{text_key!r} is not text: {error}")
    return text


def _place(piece: Piece, offset: int) -> str:
    """file:line of a byte offset; reads the file up to there, so only for what is bad."""
    number = 1
    with _open(piece.file) as stream:
        while offset > 0 and (block := stream.read(min(offset, 2**20))):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{piece.file}:{number}"


def _error(setting: str, message: str, fix: str) -> ChoiceError:
    return ChoiceError(Finding("documents", "error", setting, message, fix))
