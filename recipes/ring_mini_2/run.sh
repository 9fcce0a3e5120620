#!/usr/bin/env bash
# Ring-mini-2.0 on FSDP2. Run it on one node of the Ray cluster; recipes/README.md lists what to prepare.
set -euo pipefail
export VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$PWD/ring_mini_2.jsonl}" # for `verl-ext report`
python -m verl_ext.main_ppo recipe=ring_mini_2 stability=icepop "$@"
