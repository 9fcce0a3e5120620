#!/usr/bin/env bash
# Set up and run every check: ruff, types, the fast tests, then the end-to-end runs; two at a time.
#   bash tools/test.sh          everything
#   bash tools/test.sh --fast   without the end-to-end runs and other slow tests, and with fewer examples of each property
#   bash tools/test.sh PATH...  only the tests of these files or folders: tests/unit/guard, or verl_ext/guard for its own
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n '2,5s/^# \{0,1\}//p' "$0"; exit; fi
paths=()
for path in "$@"; do
  case "$path" in
    --fast) ;;
    -*) echo "error: test.sh has no option $path; see --help" >&2; exit 2 ;;
    verl_ext/*) room=${path#verl_ext/}; paths+=("tests/unit/${room%%/*}") ;;
    *) paths+=("$path") ;;
  esac
done
for path in "${paths[@]}"; do
  [ -e "$path" ] || { echo "error: there is no $path" >&2; exit 2; }
done
bash tools/setup_cpu.sh megatron sglang veomni
export PATH="$(cd "${VENV:-.venv${VLLM:+-$VLLM}}/bin" && pwd):$PATH"

export OMP_NUM_THREADS=1 # for each of the two workers: what a test computes is small
if [ ${#paths[@]} -gt 0 ]; then
  pytest "${paths[@]}" -m "not network" -rfEs -n 2 --dist worksteal
  exit
fi

# Tests look at the report's pages in a real browser; without a browser, they are skipped and say so.
if [ "${1:-}" != --fast ] && ! command -v chromium google-chrome chromium-browser >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "test: installing Debian's chromium" >&2
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } >/dev/null ||
    echo "test: chromium could not be installed" >&2
fi

ruff check .
ruff format --check .
mypy
if [ "${1:-}" = --fast ]; then
  HYPOTHESIS_PROFILE=fast pytest -m "not e2e and not gpu and not slow and not network" -rfEs -n 2 --dist worksteal
  exit
fi
pytest -m "not e2e and not gpu and not network" -rfEs -n 2 --dist worksteal
# File by file, because the tests of a file share their runs; the longest files come first (tests/stack/conftest.py).
# Only files with such tests are given: each worker would take 40 s to import all others.
mapfile -t files < <(grep -rlE 'mark\.(e2e|gpu)\b|needs_browser' tests --include='test_*.py' | sort)
pytest "${files[@]}" -m "e2e or gpu" -rfEs -n 2 --dist loadfile --no-loadscope-reorder --durations=20
