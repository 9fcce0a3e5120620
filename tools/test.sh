#!/usr/bin/env bash
# Set up and run every check: ruff, types, the fast tests, then the end-to-end runs; two at a time.
#   bash tools/test.sh          everything
#   bash tools/test.sh --fast   without the end-to-end runs and other slow tests, and with fewer examples of each property
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup_cpu.sh megatron sglang
export PATH="$(cd "${VENV:-.venv${VLLM:+-$VLLM}}/bin" && pwd):$PATH"

# The report's pages are looked at in a real browser; those tests are skipped, and say so, where there is none.
if [ "${1:-}" != --fast ] && ! command -v chromium google-chrome chromium-browser >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "test: installing Debian's chromium" >&2
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } >/dev/null ||
    echo "test: chromium could not be installed" >&2
fi

ruff check .
ruff format --check .
mypy
# One thread for each of the two: what a test computes is small.
export OMP_NUM_THREADS=1
if [ "${1:-}" = --fast ]; then
  HYPOTHESIS_PROFILE=fast pytest -m "not e2e and not gpu and not slow and not network" -rfEs -n 2 --dist worksteal
  exit
fi
pytest -m "not e2e and not gpu and not network" -rfEs -n 2 --dist worksteal
# File by file, for tests of one share their runs; the longest come first as they are.
pytest -m "e2e or gpu" -rfEs -n 2 --dist loadfile --no-loadscope-reorder --durations=20
