#!/usr/bin/env bash
# Set up and run every check: ruff, types, the fast tests, then the end-to-end runs.
#   bash tools/test.sh          everything
#   bash tools/test.sh --fast   without the end-to-end runs
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup_cpu.sh
export PATH="$(cd "${VENV:-.venv}/bin" && pwd):$PATH"

ruff check .
ruff format --check .
mypy
pytest -m "not e2e"
if [ "${1:-}" != --fast ]; then pytest -m e2e; fi
