#!/usr/bin/env bash
# Moonlight-16B-A3B on Megatron. Run it on one node of the Ray cluster; recipes/README.md lists what to prepare.
set -euo pipefail
export VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$PWD/moonlight_16b_a3b_megatron.jsonl}" # for `verl-ext report`
python -m verl_ext.main_ppo recipe=moonlight_16b_a3b_megatron stability=moe "$@"
