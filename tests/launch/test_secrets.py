"""What looks like a secret is refused, what does not is not, and none is said or kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import secrets
from launch.train import main
from tests.launch.elsewhere import choose

# Made up, in parts, so that nobody's scanner takes them for real ones.
AWS_ID = "AKIA" + "IOSFODNN7EXAMPLE"
AWS_KEY = "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY"
HF = "hf_" + "aBcDeFgHiJkLmNoPqRsT"
KEY = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIE"
SIGNED = "https://b.s3.amazonaws.com/x?X-Amz-Algorithm=A&X-Amz-" + "Signature=0a1b"
TOKEN = "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0.c2ln"


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("A", AWS_ID, "an AWS access key"),
        ("A", AWS_KEY, "an AWS secret key"),
        ("A", f"x={AWS_KEY};", "an AWS secret key"),
        ("A", KEY, "a private key"),
        ("A", SIGNED, "a signed URL"),
        ("A", "https://storage/x?sv=1&sig=aGVsbG8", "a signed URL"),
        ("A", "https://user:hunter2@host/x", "a password in a URL"),
        ("A", HF, "a Hugging Face token"),
        ("A", "ghp_" + "a1B2c3D4e5F6g7H8i9J0", "a GitHub token"),
        ("A", "xoxb-" + "123456789012-abc", "a Slack token"),
        ("A", "sk-" + "proj-abcdefghijklmnop1234", "an API key"),
        ("A", TOKEN, "a JSON web token"),
        ("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567", "a secret, being named"),
        ("DB_PASSWORD", "correct horse battery", "a secret, being named"),
        ("token", "zx81-spectrum-48k", "a secret, being named"),
        ("DB_PASS", "zx81-spectrum-48k", "a secret, being named"),
        ("SSHKEY", "zx81-spectrum-48k", "a secret, being named"),
    ],
)
def test_secrets_are_known_by_form_or_name(name: str, value: str, what: str) -> None:
    assert (secrets.kind(value, name) or "").startswith(what)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG", "INFO"),
        ("A", "0123456789abcdef0123456789abcdef01234567"),  # a commit
        ("A", "a" * 40),
        ("A", "s3://team-data/web/part-00000-of-01024-with-a-long-name-indeed"),
        ("A", "arn:aws:iam::111122223333:role/slipway-job"),
        ("API_KEY_FILE", "/run/secrets/key"),
        ("HF_TOKEN", "none"),
        ("SECRET_ARN", "arn:aws:secretsmanager:us-east-1:111122223333:secret:hf-AbCdEf"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("tokens", "1048576 tokens a step"),
        ("KEY", "short"),
        ("KEY", "aaaaaaaaaaaa"),
        ("A", "111122223333.dkr.ecr.us-east-1.amazonaws.com/slipway@sha256:" + "0a" * 32),
    ],
)
def test_other_values_are_let_through(name: str, value: str) -> None:
    assert secrets.kind(value, name) is None


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ((f"launch.environment.A={HF}",), "launch.environment.A"),
        ((f"launch.tags.owner={AWS_ID}",), "launch.tags.owner"),
        (("data=indexed", f"data.paths=['{SIGNED}']"), "data.paths"),
        (("checkpoint.load=https://me:pw@host/x",), "checkpoint.load"),
    ],
)
def test_any_setting_of_a_run_is_looked_at(words: tuple[str, ...], setting: str) -> None:
    (found,) = secrets.check(choose("sagemaker", *words))
    assert found.setting == setting
    assert "Secrets Manager" in found.fix
    for value in (HF, AWS_ID, SIGNED, "me:pw"):
        assert value not in str(found)


def test_options_may_set_variables_too() -> None:
    (found,) = secrets.check(
        choose("docker", "launch.options=['--env=API_TOKEN=zx81-spectrum-48k']")
    )
    assert found.setting == "launch.options"
    assert secrets.check(choose("docker", "launch.options=['--cpuset-cpus=0-63']")) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sagemaker", ("launch.output_kms_key=1234abcd-12ab-34cd-56ef-1234567890ab",)),
        ("sagemaker", ("launch.output_kms_key=alias/our-training-runs",)),
        ("kubernetes", ("launch.tolerations=[{key: nvidia.com/gpu, operator: Exists}]",)),
        ("sagemaker", ("launch.tags.cost-center=research-4711",)),
        ("sagemaker", ("launch.channels.tokens=s3://team-data/tokens-2026-v2",)),
    ],
)
def test_names_of_our_own_tell_nothing(kind: str, words: tuple[str, ...]) -> None:
    assert secrets.check(choose(kind, *words)) == []


def test_no_choice_of_conf_looks_like_a_secret() -> None:
    for kind in ("local", "plan", "sagemaker", "slurm", "docker", "kubernetes"):
        assert secrets.check(choose(kind)) == []


def test_kept_words_have_no_secrets() -> None:
    assert secrets.redact(f"+launch.environment.A={HF}") == "+launch.environment.A=<secret>"
    assert secrets.redact(HF) == "<secret>"
    assert secrets.redact("model=gpt_1b") == "model=gpt_1b"
    assert secrets.redact("+launch.environment.MY_TOKEN=zx81-spectrum") == (
        "+launch.environment.MY_TOKEN=<secret>"
    )


@pytest.mark.parametrize(
    "words",
    [
        [f"+launch.environment.A=[{HF}]"],  # no text
        [f"launch.max_run_hours={HF}"],
        [HF],
        [f"data.paths=[{SIGNED}]"],  # not in quotes
        ["+launch.environment.WANDB_API_KEY=''0123456789abcdef"],
        [f"run_dir=a-{HF}", f"run_dir=b-{HF}"],
        [f"+launch.tags.{HF}=a"],
        ["-m", f"launch.max_run_hours={HF},1"],
    ],
)
def test_a_refusal_does_not_repeat_one(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given = ["model=gpt_1b", "hardware=p6_b200", "launch=sagemaker", "launch.dry_run=true", *words]
    assert main(given) == 2
    screen = "".join(capfd.readouterr())
    written = "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    for part in (HF, "0a1b", "0123456789abcdef"):
        assert part not in screen + written


def test_a_word_that_another_one_replaces_is_kept_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=gpt_1b", "hardware=p6_b200", "launch=sagemaker", "launch.dry_run=true"]
    assert main([*words, f"run_dir={HF}", "run_dir=r"]) == 0
    screen = "".join(capfd.readouterr())
    assert HF not in screen + "".join(p.read_text() for p in (tmp_path / "r").iterdir())


def test_what_is_no_secret_is_not_hidden() -> None:
    said = "data.paths: 's3://team-data/web' is no folder; did you mean tokenizer=bytes?"
    assert secrets.hide(said) == said
