#!/usr/bin/env bash
# Train the quick start's model with a rollout that differs from the training engine, with and without a remedy: verl, Ray,
# vLLM and FSDP2 on two CPU cores, some minutes a run.
#   bash recipes/collapse/run.sh REGIME ARM SEED [override ...]    e.g. stale none 0
# REGIME is stale or quantized; ARM is exact, none, guard, rollback, or a preset without its batch skip, such as tis. A
# finished run is not repeated; each run writes .collapse/REGIME/ARM/seedN/metrics.jsonl.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ $# -lt 3 ] || [ "$1" = --help ]; then sed -n 's/^# \{0,1\}//p' "$0" | sed -n 2,6p; exit; fi

if [ -z "${PREFORK_PYTHON:-}" ]; then
  bash tools/setup_cpu.sh
  export PATH="$(cd "${VENV:-.venv}/bin" && pwd):$PATH" VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1
  export RAY_prestart_worker_first_driver=0 RAY_raylet_start_wait_time_s=300
  mkdir -p .collapse
  exec python tools/clean_exit.py python tools/prefork.py --log .collapse/imports.log bash recipes/collapse/run.sh "$@"
fi

remedy() { # the overrides of an arm
  case $1 in
    exact | none) echo stability=none stability.metrics=true ;;
    # The preset. 32 batches wait: after one refused update, the updates of the next 32 steps may be refused as well.
    guard) echo stability=guard stability.guard.stop_after=50 ;;
    # The same, and above the bound it restores the last good checkpoint, but not again before the waiting batches are
    # used up.
    rollback) echo stability=guard stability.guard.{stop_after=50,rollback_cooldown=33} trainer.save_freq=2 \
      "stability.guard.rules.past={signal:vllm_kl/k3,above:0.1,action:rollback}" ;;
    *) echo "stability=$1" stability.batch_skip.threshold=null ;;
  esac
}

gap() { # the overrides of a regime; none for the exact arm
  case $2/$1 in
    exact/*) ;;
    # 32 batches are sampled before the first update, and each batch is trained on 32 updates after it was sampled: with
    # `wait` and 1, no batch is taken while another is being sampled.
    */stale) echo trainer.v1.trainer_mode=colocate_async trainer.v1.colocate_async.num_warmup_batches=32 \
      trainer.v1.sampler.{max_off_policy_threshold=1,max_off_policy_strategy=wait} \
      trainer.v1.sampler.custom_sampler.name=FastPollReplayBufferAsync ;;
    */quantized) echo stability.fake_quantization.{format=fp4,group=channel,router=true,head=true} ;;
    *) echo "collapse: the regime $1 is not known; choose stale or quantized" >&2; exit 2 ;;
  esac
}

train() {
  local regime=$1 arm=$2 seed=$3 out=.collapse/$1/$2/seed$3
  shift 3
  [ -e "$out/done" ] && return
  mkdir -p "$out" && rm -f "$out"/metrics.*  # of an interrupted run
  python recipes/make_assets.py cpu_smoke --seed "$seed" --out ".collapse/assets-$seed" >&2
  echo "collapse: $regime, $arm, seed $seed (the run's output: $out/console.log)" >&2
  VERL_FILE_LOGGER_PATH=$PWD/$out/metrics.jsonl "$PREFORK_PYTHON" -m verl_ext.main_ppo recipe=cpu_smoke precision=fp32 \
    assets=".collapse/assets-$seed" hydra.run.dir="$out/hydra" data.seed="$seed" trainer.default_local_dir="$out/checkpoints" \
    ray_kwargs.ray_init.runtime_env.py_executable="$PREFORK_PYTHON" \
    $(gap "$regime" "$arm") $(remedy "$arm") stability.router_agreement=true trainer.total_training_steps=120 "$@" \
    > "$out/console.log" 2>&1 || { echo "collapse: the run ended with exit code $?; the end of its log:" >&2; tail -n 15 "$out/console.log" >&2; return 1; }
  touch "$out/done"
}

train "$@"
