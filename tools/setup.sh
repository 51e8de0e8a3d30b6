#!/bin/sh
# Make .venv from requirements.lock; quick when it is current. Called by make.
set -eu
cd "$(dirname "$0")/.."

is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

# What the environment was made from: the lock, and the paths and version of its Python.
stamp=.venv/slipway-stamp
wanted=$(cat requirements.lock pyproject.toml tools/setup.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && is_312 .venv/bin/python; then
  exit 0
fi

if ! is_312 .venv/bin/python; then
  rm -rf .venv
  made=
  for python in python3.12 python python3; do  # `python` follows .python-version under pyenv
    if is_312 "$python"; then
      echo "setup: making .venv with $(command -v "$python")"
      "$python" -m venv .venv && made=1 && break
      echo "setup: $python cannot make environments (on Debian: apt-get install python3.12-venv)" >&2
    fi
  done
  if [ -z "$made" ] && command -v uv >/dev/null 2>&1; then
    echo "setup: making .venv with uv"
    uv venv --quiet --python 3.12 .venv && made=1
  fi
  if [ -z "$made" ]; then
    echo "setup: no Python 3.12 here. Install python3.12 (with venv), pyenv (pyenv install 3.12)" >&2
    echo "       or uv (pip install uv), and run make again." >&2
    exit 3
  fi
fi

# The version of uv in the lock installs the rest: minutes faster than pip, and removes what is not
# in the lock.
uv=$(grep -E '^uv==' requirements.lock | cut -d' ' -f1)
if ! .venv/bin/uv --version 2>/dev/null | grep -q "${uv#uv==}"; then
  if [ -x .venv/bin/pip ]; then .venv/bin/python -m pip install --quiet "$uv"; fi
fi
installer=.venv/bin/uv
[ -x "$installer" ] || installer=uv
echo "setup: installing $(grep -cE '^[a-z0-9]' requirements.lock) packages (about 6 GB with torch)"
"$installer" pip sync --quiet --require-hashes --python .venv/bin/python requirements.lock
"$installer" pip install --quiet --no-deps --no-build-isolation --python .venv/bin/python -e .
echo "$wanted" > "$stamp"
