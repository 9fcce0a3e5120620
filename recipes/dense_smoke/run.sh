#!/usr/bin/env bash
# The quick start on a dense model, on two CPU cores, in the .venv that `bash tools/setup_cpu.sh` makes.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH" VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1
export VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$PWD/.quickstart/dense.jsonl}"
python recipes/make_assets.py dense_smoke
python -m verl_ext.main_ppo recipe=dense_smoke stability=tis "$@"
