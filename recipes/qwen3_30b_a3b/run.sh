#!/usr/bin/env bash
# Qwen3-30B-A3B on FSDP2. Run it on one node of the Ray cluster; recipes/README.md lists what to prepare.
set -euo pipefail
export VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$PWD/qwen3_30b_a3b.jsonl}" # for `verl-ext report`
python -m verl_ext.main_ppo recipe=qwen3_30b_a3b stability=moe "$@"
