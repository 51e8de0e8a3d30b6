"""Prepared files are checked before a run: what is in them, what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from planning.findings import ChoiceError, Finding, MachineError
from planning.schema import TokenizerConfig
from tests.training.data_files import choice, write
from training.data import indexed

STEPS = (8, 4, 4)  # sequences needed of train, valid and test


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """100 documents of 20 tokens: 19 bytes and the end."""
    folder = tmp_path_factory.mktemp("text")
    return write(folder / "text", [f"{number:019d}" for number in range(100)])


def copy(prefix: str, folder: Path, name: str = "text") -> Path:
    for suffix in (".bin", ".idx", ".json"):
        (folder / f"{name}{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes())
    return folder / name


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


# --- one prefix ---------------------------------------------------------------------------------


def test_what_a_prefix_holds(text: str) -> None:
    info = indexed.inspect(text)
    assert (info.documents, info.sequences, info.tokens) == (100, 100, 2000)
    assert (info.dtype, info.bin_bytes) == ("uint16", 4000)
    assert info.tokenizer == {
        "kind": "byte",
        "path": None,
        "vocab_size": 257,
        "end_of_document": 256,
        "fingerprint": "byte",
    }


def test_the_sidecar_may_be_missing(text: str, tmp_path: Path) -> None:
    prefix = copy(text, tmp_path)
    Path(f"{prefix}.json").unlink()
    assert indexed.inspect(str(prefix)).tokenizer is None


def test_a_missing_file_names_the_nearest_prefix(text: str, tmp_path: Path) -> None:
    copy(text, tmp_path, "web_text")
    with pytest.raises(ChoiceError, match=r"web_txt\.idx does not exist; did you mean web_text\?"):
        indexed.inspect(str(tmp_path / "web_txt"))


def test_the_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChoiceError) as caught:
        indexed.inspect(str(tmp_path / "nothing"), "data.valid_paths")
    assert caught.value.findings[0].setting == "data.valid_paths"


def test_the_name_of_a_file_is_not_a_prefix(text: str) -> None:
    with pytest.raises(ChoiceError, match=f"give the prefix of both files: {text}$"):
        indexed.inspect(f"{text}.bin")


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("suffix", "size", "words"),
    [
        (".idx", 0, "is truncated: 0 bytes"),
        (".idx", 33, "is truncated: 33 bytes"),
        # 34 of header, 12 a sequence, 8 a document and one more
        (".idx", 2041, "is truncated: 2041 bytes, and its header needs 2042"),
        (".bin", 3998, "is truncated: 3998 bytes, and the index says 4000"),
    ],
)
def test_a_truncated_file(text: str, tmp_path: Path, suffix: str, size: int, words: str) -> None:
    prefix = copy(text, tmp_path)
    truncate(Path(f"{prefix}{suffix}"), size)
    with pytest.raises(ChoiceError, match=words):
        indexed.inspect(str(prefix))


def test_a_foreign_file(text: str, tmp_path: Path) -> None:
    prefix = copy(text, tmp_path)
    Path(f"{prefix}.idx").write_bytes(b"PK\x03\x04" * 600)
    with pytest.raises(ChoiceError, match="is not an index of Megatron's"):
        indexed.inspect(str(prefix))


def test_numbers_that_are_no_ids(text: str, tmp_path: Path) -> None:
    prefix = copy(text, tmp_path)
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[17] = 7  # float32
    Path(f"{prefix}.idx").write_bytes(content)
    with pytest.raises(ChoiceError, match="holds no token ids: type code 7"):
        indexed.inspect(str(prefix))


def test_files_of_two_datasets(text: str, tmp_path: Path) -> None:
    prefix = copy(text, tmp_path)
    other = write(tmp_path / "other", ["longer " * 1000])
    Path(f"{other}.bin").rename(f"{prefix}.bin")
    with pytest.raises(ChoiceError, match=r"text\.bin does not belong to its \.idx"):
        indexed.inspect(str(prefix))


def test_a_sidecar_of_another_dataset(text: str, tmp_path: Path) -> None:
    prefix = copy(text, tmp_path)
    sidecar = json.loads(Path(f"{prefix}.json").read_text())
    Path(f"{prefix}.json").write_text(json.dumps({**sidecar, "tokens": 1999}))
    with pytest.raises(ChoiceError, match="describes 100 documents of 1999 tokens"):
        indexed.inspect(str(prefix))
    Path(f"{prefix}.json").write_text("{")
    with pytest.raises(ChoiceError, match=r"text\.json does not describe a dataset"):
        indexed.inspect(str(prefix))


def test_an_empty_dataset(tmp_path: Path) -> None:
    prefix = write(tmp_path / "empty", [])
    with pytest.raises(ChoiceError, match="is empty: no documents"):
        indexed.inspect(prefix)


def test_the_fingerprint_follows_the_documents_lengths(text: str, tmp_path: Path) -> None:
    same = copy(text, tmp_path)
    lengths = [19] * 98 + [18, 20]  # as many documents and tokens, cut elsewhere
    other = write(tmp_path / "other", ["x" * length for length in lengths])
    assert indexed.fingerprint(str(same)) == indexed.fingerprint(text)
    assert indexed.fingerprint(other) != indexed.fingerprint(text)


# --- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "parsed"),
    [
        (["a", "b"], [(None, "a"), (None, "b")]),
        ([[0.7, "a"], [0.3, "b"]], [(0.7, "a"), (0.3, "b")]),
        ([70, "a", 30, "b"], [(70.0, "a"), (30.0, "b")]),
        (["70", "a", "30", "b"], [(70.0, "a"), (30.0, "b")]),
        ([[2, "a"], 1, "b"], [(2.0, "a"), (1.0, "b")]),
        ([], []),
    ],
)
def test_forms_of_paths(paths: list, parsed: list) -> None:
    assert indexed.parse_paths(paths) == parsed


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["a", [0.3, "b"]], "a has no weight and others have"),
        ([0.7, "a", "b"], "b has no weight and others have"),
        ([0.7, 0.3, "a"], "two weights follow each other: 0.7, 0.3"),
        (["a", 0.3], "no prefix follows the weight 0.3"),
        ([["a", 0.3]], r"\['a', 0.3\] is not a \[weight, prefix\] pair"),
        ([["x", "a"]], r"'x' in \['x', 'a'\] is not a weight"),
        ([[0.3]], r"\[0.3\] is not a \[weight, prefix\] pair"),
        ([[0, "a"]], "the weight 0 is not above 0"),
        ([[-1, "a"]], "the weight -1 is not above 0"),
        ([float("nan"), "a"], "the weight nan is not above 0"),
        ([" "], "a prefix is empty"),
    ],
)
def test_illegal_paths(paths: list, words: str) -> None:
    with pytest.raises(ChoiceError, match=words) as caught:
        indexed.parse_paths(paths, "data.train_paths")
    assert caught.value.findings[0].setting == "data.train_paths"


def test_splits_are_normalized_as_megatron_does() -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    for split in ("969,30,1", "0.9,0.1", "100", "9, 1, 0"):
        assert indexed.parse_split(split) == pytest.approx(parse_and_normalize_split(split))


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "1;2", "0,1,1"])
def test_illegal_splits(split: str) -> None:
    with pytest.raises(ChoiceError) as caught:
        indexed.parse_split(split)
    assert caught.value.findings[0].setting == "data.split"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "no dataset is named"),
        ({"paths": ["a"]}, "data.paths needs a split"),
        ({"paths": ["a"], "split": "1,1", "train_paths": ["b"]}, "are both set"),
        ({"valid_paths": ["a"]}, "no dataset is named"),
    ],
)
def test_choices_that_name_no_data(fields: dict, words: str) -> None:
    with pytest.raises(ChoiceError, match=words):
        indexed.blends(choice(**fields))


def test_samples_needed_are_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from megatron.training import training

    args = SimpleNamespace(
        train_samples=None,
        train_iters=200,
        global_batch_size=16,
        full_validation=False,
        skip_train=False,
        eval_interval=50,
        eval_iters=4,
        start_eval_at_iter=None,
        phase_transition_iterations=None,
    )
    monkeypatch.setattr(training, "get_args", lambda: args)
    ours = indexed.samples_needed(200, eval_interval=50, eval_steps=4, global_batch_size=16)
    assert ours == training.get_train_valid_test_num_samples() == (3200, 320, 64)
    assert indexed.samples_needed(200, 0, 4, 16) == (3200, 0, 0)


# --- the choice against the files ---------------------------------------------------------------


def test_a_good_choice_has_facts_and_no_findings(text: str) -> None:
    facts, findings = indexed.check(choice(paths=[text], split="80,10,10"), 257, 16, (100, 4, 4))
    assert findings == []
    assert [(fact.split, fact.documents, fact.tokens) for fact in facts] == [
        ("train", 80, 1600),
        ("valid", 10, 200),
        ("test", 10, 200),
    ]
    assert facts[0].epochs == 1.0
    assert (facts[0].vocab_size, facts[0].end_of_document, facts[0].share) == (257, 256, 1.0)


def test_the_split_is_megatrons(text: str) -> None:
    """Documents, not tokens, are split, and rounded to whole ones."""
    facts, _ = indexed.check(choice(paths=[text], split="0.333,0.333,0.334"), 257, 16, STEPS)
    assert [fact.documents for fact in facts] == [33, 34, 33]


def test_a_sequence_longer_than_the_dataset(text: str) -> None:
    data = choice(train_paths=[text], valid_paths=[text])
    assert indexed.check(data, 257, 1999, (1, 1, 0))[1] == []
    _, findings = indexed.check(data, 257, 2000, (1, 0, 0))
    finding = only(findings)
    assert (finding.severity, finding.setting) == ("error", "data.train_paths")
    assert "has 2000 tokens" in finding.message
    assert "needs 2001" in finding.message


def test_a_split_that_becomes_empty(text: str) -> None:
    data = choice(paths=[text], split="997,2,1")
    facts, findings = indexed.check(data, 257, 16, (1, 1, 1))
    assert [fact.documents for fact in facts] == [100, 0, 0]
    assert [finding.setting for finding in findings] == ["data.split", "data.split"]
    assert "the valid split of" in findings[0].message
    assert "has 0 tokens in 0 of 100 documents" in findings[0].message
    assert "training.eval_interval=0" in findings[0].fix
    assert indexed.check(data, 257, 16, (1, 0, 0))[1] == []  # nothing reads them


def test_a_split_shorter_than_a_sequence(text: str) -> None:
    _, findings = indexed.check(choice(paths=[text], split="98,2"), 257, 64, (1, 1, 0))
    finding = only(findings)
    assert "the valid split of" in finding.message
    assert "has 40 tokens in 2 of 100 documents, and one sequence needs 65" in finding.message


def test_evaluation_without_validation_data(text: str) -> None:
    for data in (choice(paths=[text], split="1,0,0"), choice(train_paths=[text])):
        finding = only(indexed.check(data, 257, 16, (1, 4, 4))[1])
        assert (finding.id, finding.severity) == ("valid_data", "error")
        assert indexed.check(data, 257, 16, (1, 0, 0))[1] == []


def test_several_epochs_are_a_warning_with_their_number(text: str) -> None:
    finding = only(indexed.check(choice(train_paths=[text]), 257, 16, (250, 0, 0))[1])
    assert (finding.severity, finding.id) == ("warning", "epochs")
    assert "2.0 times" in finding.message


def test_epochs_follow_the_weights(text: str, tmp_path: Path) -> None:
    other = str(copy(text, tmp_path, "other"))
    data = choice(train_paths=[[3, text], [1, other]])
    facts, findings = indexed.check(data, 257, 16, (160, 0, 0))
    assert [fact.share for fact in facts] == [0.75, 0.25]
    # 120 and 40 sequences of 16, and half a percent more, of 2000 tokens each
    assert [fact.epochs for fact in facts] == [121 * 16 / 2000, 41 * 16 / 2000]
    assert findings == []


def test_without_weights_shares_follow_the_tokens(text: str, tmp_path: Path) -> None:
    small = write(tmp_path / "small", [f"{number:019d}" for number in range(25)])
    facts, _ = indexed.check(choice(train_paths=[text, small]), 257, 16, (8, 0, 0))
    assert [fact.share for fact in facts] == [0.8, 0.2]


def test_all_broken_files_are_found_at_once(text: str, tmp_path: Path) -> None:
    data = choice(train_paths=[str(tmp_path / "a"), text], valid_paths=[str(tmp_path / "b")])
    _, findings = indexed.check(data, 257, 16, STEPS)
    assert [finding.setting for finding in findings] == ["data.train_paths", "data.valid_paths"]


def test_a_vocabulary_larger_than_the_models(text: str) -> None:
    finding = only(indexed.check(choice(train_paths=[text]), 256, 16, (1, 0, 0))[1])
    assert (finding.severity, finding.setting) == ("error", "model.vocab_size")
    assert "has 257 ids" in finding.message
    assert finding.fix.startswith("set model.vocab_size=257")


def test_a_tokenizer_that_is_not_the_datas(text: str) -> None:
    chosen = TokenizerConfig(kind="huggingface", path="x", vocab_size=300)
    data = choice(train_paths=[text], tokenizer=chosen)
    finding = only(indexed.check(data, 512, 16, (1, 0, 0))[1])
    assert finding.setting == "data.tokenizer"
    assert "vocabulary of 300" in finding.message
    assert "byte of 257" in finding.message


def test_two_tokenizers_in_one_run(text: str, tmp_path: Path) -> None:
    other = copy(text, tmp_path, "other")
    sidecar = json.loads(Path(f"{other}.json").read_text())
    sidecar["tokenizer"]["fingerprint"] = "another"
    Path(f"{other}.json").write_text(json.dumps(sidecar))
    finding = only(indexed.check(choice(train_paths=[text, str(other)]), 257, 16, (1, 0, 0))[1])
    assert "were prepared with different tokenizers" in finding.message


def test_data_without_sidecar(text: str, tmp_path: Path) -> None:
    """The ids themselves are looked at: 256 is the largest of this text."""
    prefix = copy(text, tmp_path)
    Path(f"{prefix}.json").unlink()
    unsaid = choice(train_paths=[str(prefix)])
    warning = only(indexed.check(unsaid, 257, 16, (1, 0, 0))[1])
    assert (warning.severity, warning.fix) == ("warning", "set data.tokenizer.vocab_size")
    error = only(indexed.check(unsaid, 256, 16, (1, 0, 0))[1])
    assert (error.severity, error.setting) == ("error", "model.vocab_size")
    assert "holds the id 256, and ids must be below 256" in error.message

    def said(vocab_size: int) -> list[Finding]:
        tokenizer = TokenizerConfig(kind="none", path=None, vocab_size=vocab_size)
        data = choice(train_paths=[str(prefix)], tokenizer=tokenizer)
        return indexed.check(data, 1000, 16, (1, 0, 0))[1]

    assert said(257) == []
    assert only(said(200)).setting == "data.tokenizer"
    assert only(said(1001)).setting == "model.vocab_size"


def test_mock_data_needs_no_check() -> None:
    assert indexed.check(choice("mock"), 257, 16, STEPS) == ([], [])


def test_no_import_of_torch() -> None:
    import subprocess
    import sys

    code = "import sys, training.data.indexed, training.data.library_text; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "megatron", "transformers", "boto3"} & set(modules)


# --- object storage -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(text: str) -> Iterator[str]:
    """s3:// prefix of the same text, on a local server."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="texts")
        for suffix in (".bin", ".idx", ".json"):
            client.upload_file(f"{text}{suffix}", "texts", f"some/text{suffix}")
        yield "s3://texts/some/text"
    server.stop()


def test_object_storage_is_read_by_parts(s3: str, text: str) -> None:
    there, here = indexed.inspect(s3), indexed.inspect(text)
    assert there.prefix == s3
    assert (there.tokens, there.documents, there.dtype) == (2000, 100, "uint16")
    assert there.tokenizer == here.tokenizer
    assert indexed.fingerprint(s3) == indexed.fingerprint(text)
    facts, findings = indexed.check(choice(paths=[s3], split="80,10,10"), 257, 16, STEPS)
    assert [fact.tokens for fact in facts] == [1600, 200, 200]
    assert findings == []


def test_what_object_storage_lacks(s3: str) -> None:
    for prefix in (f"{s3}s", "s3://no-such-bucket/text"):
        with pytest.raises(ChoiceError, match=rf"{prefix}\.idx does not exist"):
            indexed.inspect(prefix)


def test_object_storage_without_credentials(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import boto3

    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it remembers credentials
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(MachineError, match="Unable to locate credentials"):
        indexed.inspect(s3)


def test_megatron_trains_from_object_storage(s3: str, text: str, tmp_path: Path) -> None:
    """The same samples as from a local copy, in small requests."""
    from tests.training.data_files import megatron_args, null_tokenizer
    from training.data import provider

    def samples(place: str) -> tuple[numpy.ndarray, str]:
        config = provider.dataset_config(
            choice(paths=[place], split="80,10,10"), None, megatron_args(), null_tokenizer()
        )
        train, _, _ = provider.build(config, tmp_path / "cache", (50, 4, 4), lambda: True)
        assert train is not None
        tokens = numpy.stack([train[sample]["tokens"] for sample in range(50)])
        return tokens, type(train.dataset.bin_reader).__name__

    (there, s3_reader), (here, local_reader) = samples(s3), samples(text)
    assert (s3_reader, local_reader) == ("_S3BinReader", "_MMapBinReader")
    assert there.shape == (50, 16)
    assert (there == here).all()
