#!/usr/bin/env bash
# Build .venv with the tested versions. Called by `make setup` when pyproject.toml or constraints.txt is newer.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
    python=$(bash scripts/find_python.sh)
    echo "setup: building .venv with $python"
    "$python" -m venv --clear .venv
fi

echo "setup: installing the packages of constraints.txt (several GB the first time, some minutes)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
    --constraint constraints.txt --editable '.[dev]'
echo "setup: ready, activate with: source .venv/bin/activate"
