#!/usr/bin/env bash
# Set up and run every check: ruff, types, the fast tests, then the end-to-end runs.
#   bash tools/test.sh          everything
#   bash tools/test.sh --fast   without the end-to-end runs
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup_cpu.sh
export PATH="$(cd "${VENV:-.venv}/bin" && pwd):$PATH"

# The report's pages are looked at in a real browser; those tests are skipped, and say so, where there is none.
if ! command -v chromium google-chrome chromium-browser >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "test: installing Debian's chromium" >&2
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } >/dev/null ||
    echo "test: chromium could not be installed" >&2
fi

ruff check .
ruff format --check .
mypy
pytest -m "not e2e" -rfEs
if [ "${1:-}" != --fast ]; then pytest -m e2e; fi
