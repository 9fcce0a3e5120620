#!/usr/bin/env bash
# DeepSeek-V3 on Megatron. Run it on one node of the Ray cluster; recipes/README.md lists what to prepare.
set -euo pipefail
export VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$PWD/deepseek_v3_megatron.jsonl}" # for `verl-ext report`
python -m verl_ext.main_ppo recipe=deepseek_v3_megatron stability=moe "$@"
