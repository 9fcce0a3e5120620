#!/usr/bin/env bash
# Measure on one GPU, in under nine minutes, what one GPU can run of this project.
#   bash tools/gpu.sh            everything; results.json and results.html in gpu-results/
#   bash tools/gpu.sh --dry      the same code at tiny sizes on a CPU
#   bash tools/gpu.sh --pack     fetch the packages that a bare GPU machine lacks into gpu-wheels/, to take them there
#   bash tools/gpu.sh --help     parts and options
#   PYTHON=python3               the interpreter, which must have torch
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
if [ "${1:-}" = --pack ]; then exec bash "$root/tools/gpu/pack.sh" "${@:2}"; fi
if [ -z "${PYTHON:-}" ]; then PYTHON="$root/.venv/bin/python"; [ -x "$PYTHON" ] || PYTHON=python3; fi

path="$root:$root/tools"
if compgen -G "$root/gpu-wheels/*.whl" >/dev/null &&
  ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("verl") is None)'; then
  site="$(mktemp -d)"
  trap 'rm -rf "$site"' EXIT
  echo "gpu: installing the wheels of gpu-wheels/ for this run" >&2
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$root"/gpu-wheels/*.whl
  path="$path:$site"
fi
PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m gpu "$@"
