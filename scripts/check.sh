#!/usr/bin/env bash
# Format, lint and types: what CI checks besides the tests. Uses $PYTHON, else the checkout's .venv, else python3.
# The tools come with: pip install -e '.[dev]'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi

"$PYTHON" -m ruff format --check .
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
