#!/usr/bin/env bash
# Train a small mixture of experts on two CPU cores with verl_ext switched on, then show what happened.
#   bash tools/quickstart.sh [--train megatron] [--rollout sglang] [override ...]
#   --train megatron   trains with Megatron (through Megatron-Bridge) instead of FSDP2
#   --rollout sglang   generates with SGLang instead of vLLM
#   override           a setting of the run, such as trainer.total_training_steps=120
# The first run installs everything into .venv; the next ones reuse it and take two minutes. Results are in .quickstart/.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then sed -n 's/^# \{0,1\}//p' "$0" | sed -n 2,7p; exit; fi

train=fsdp rollout=vllm overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    --train=*) train=${1#*=}; shift ;;
    --train) train=${2:-}; shift 2 || shift ;;
    --rollout=*) rollout=${1#*=}; shift ;;
    --rollout) rollout=${2:-}; shift 2 || shift ;;
    -*) echo "error: quickstart.sh has no option $1; see --help" >&2; exit 2 ;;
    *) overrides+=("$1"); shift ;;
  esac
done
case "$train-$rollout" in
  fsdp-vllm) engines=() recipe=cpu_smoke ;;
  megatron-vllm) engines=(megatron) recipe=cpu_megatron ;;
  fsdp-sglang) engines=(sglang) recipe=cpu_sglang ;;
  megatron-sglang) engines=(megatron sglang) recipe=cpu_megatron_sglang ;;
  *) echo "error: --train takes fsdp or megatron, --rollout takes vllm or sglang; not '$train' and '$rollout'" >&2; exit 2 ;;
esac

if [ -z "${PREFORK_PYTHON:-}" ]; then
  bash tools/setup_cpu.sh "${engines[@]}"
  export PATH="$(cd "${VENV:-.venv${VLLM:+-$VLLM}}/bin" && pwd):$PATH" VERL_PLATFORM=cpu HF_HUB_OFFLINE=1
  export VLLM_CPU_KVCACHE_SPACE=1 # GiB
  export RAY_prestart_worker_first_driver=0 # workers that nothing of verl would use
  export RAY_raylet_start_wait_time_s=300 # 30 are too few on a busy machine
  mkdir -p .quickstart
  # One process imports what a dozen need, while this one makes the assets.
  exec python tools/clean_exit.py python tools/prefork.py --rollout "$rollout" --log .quickstart/imports.log \
    bash tools/quickstart.sh --train "$train" --rollout "$rollout" "${overrides[@]}"
fi
export VERL_FILE_LOGGER_PATH="$PWD/.quickstart/metrics.jsonl"
log=.quickstart/console.log
begun=$(date +%s)

echo "quickstart: starting Ray, $rollout and $train; the first step comes after about 40 s (their output: $log)"
# The model copies most prompts instead of answering with prefix sums: RL breaks the habit within a minute.
python recipes/make_assets.py cpu_smoke --copying 0.7 --out .quickstart/copying
of_vllm=()
[ "$rollout" = vllm ] && of_vllm=(stability.cascade_attention=off)
status=0
"$PREFORK_PYTHON" -m verl_ext.main_ppo recipe=$recipe assets=.quickstart/copying hydra.run.dir=.quickstart/hydra \
  ray_kwargs.ray_init.runtime_env.py_executable="$PREFORK_PYTHON" \
  stability=icepop stability.router_agreement=true stability.trajectories.per_step=2 "${of_vllm[@]}" \
  actor_rollout_ref.actor.optim.lr_warmup_steps=5 "${overrides[@]}" 2>&1 |
  python tools/progress.py "$log" || status=$?
if [ "$status" != 0 ]; then
  [ "$status" = 130 ] || { echo "quickstart: the run ended with exit code $status; the end of $log:" >&2; tail -n 30 "$log" >&2; }
  exit "$status"
fi
metrics=$VERL_FILE_LOGGER_PATH
[ "$(stat -c %Y "$metrics" 2>/dev/null || echo 0)" -ge "$begun" ] || metrics=$log # with trainer.logger=[console]
verl-ext report "$metrics" --out .quickstart/report
