# make train            set up and train the demonstration; ARGS="model=gpt_1b ..." passes choices on
# make test             set up and run the tests; ARGS="-k parallel" passes options on
# make lint types lock  for who changes the code
.PHONY: setup train test lint types lock
PYTHON := .venv/bin/python

setup:
	@tools/setup.sh

train: setup
	@$(PYTHON) launch/train.py $(ARGS)

test: setup
	@$(PYTHON) -m pytest -n 2 --dist loadfile $(ARGS)

lint: setup
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

types: setup
	@.venv/bin/mypy

# Without index addresses: the lock serves any registry.
lock: setup
	@.venv/bin/uv pip compile pyproject.toml --extra dev --extra sagemaker --python-version 3.12 \
	  --generate-hashes --no-emit-index-url --no-header --no-annotate -q -o requirements.lock
