#!/usr/bin/env bash
# gpt-oss-20b on FSDP2. Run it on one node of the Ray cluster; recipes/README.md lists what to prepare.
set -euo pipefail
export VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$PWD/gpt_oss_20b.jsonl}" # for `verl-ext report`
python -m verl_ext.main_ppo recipe=gpt_oss_20b stability=moe "$@"
