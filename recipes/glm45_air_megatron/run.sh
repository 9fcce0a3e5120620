#!/usr/bin/env bash
# GLM-4.5-Air on Megatron. Run it on one node of the Ray cluster; recipes/README.md lists what to prepare.
set -euo pipefail
export VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$PWD/glm45_air_megatron.jsonl}" # for `verl-ext report`
python -m verl_ext.main_ppo recipe=glm45_air_megatron stability=moe "$@"
