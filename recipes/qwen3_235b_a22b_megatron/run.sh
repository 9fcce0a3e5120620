#!/usr/bin/env bash
# Qwen3-235B-A22B on Megatron. Run it on one node of the Ray cluster; recipes/README.md lists what to prepare.
set -euo pipefail
export VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$PWD/qwen3_235b_a22b_megatron.jsonl}" # for `verl-ext report`
python -m verl_ext.main_ppo recipe=qwen3_235b_a22b_megatron stability=moe "$@"
