#!/usr/bin/env bash
# Ring-mini-2.0 on FSDP2. Run it on one node of a Ray cluster that has them all; what to prepare: recipes/README.md.
set -euo pipefail
export VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$PWD/ring_mini_2.jsonl}" # for `verl-ext report`
python -m verl_ext.main_ppo recipe=ring_mini_2 stability=icepop "$@"
