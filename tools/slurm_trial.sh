#!/usr/bin/env bash
# Try recipes/slurm/run.sbatch on a real Slurm of two nodes, on this machine, with the CPU recipe.
#   bash tools/slurm_trial.sh [FOLDER]
# Needs root, Debian's slurm-wlm and munge, and the .venv that tools/setup_cpu.sh makes. It takes seven minutes on two cores.
# A node is a slurmd in namespaces of its own (network, process ids, host name, /tmp): `ray stop` stops all Ray that it
# sees. All files are in FOLDER (default: .quickstart/slurm), which is emptied first.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD work=$(realpath -m "${1:-.quickstart/slurm}") names=(trial1 trial2) pids=() munge=
# The imports of Ray's workers, except Ray itself, which reads the job's number on import.
preload=torch,tensordict,transformers.models.qwen3_moe.modeling_qwen3_moe,vllm.entrypoints.openai.api_server
export PATH="$root/.venv/bin:/usr/sbin:/sbin:$PATH"

inside() { nsenter -t "${pids[$1]}" -a -w"$root" -- env SLURM_CONF="$work/slurm.conf" "${@:2}"; } # NODE COMMAND...
slurm() { inside 0 "$@"; }

configure() {
  rm -rf "$work"
  mkdir -p "$work/state" "$work/munge" "$work/py"
  chmod 711 "$work/munge"
  printf '127.0.0.1 localhost\n10.213.9.1 trial1\n10.213.9.2 trial2\n' >"$work/hosts"
  echo 'nameserver 127.0.0.1' >"$work/resolv.conf" # refuses at once; look-ups at the machine's own would time out
  cat >"$work/slurm.conf" <<CONF
ClusterName=trial
SlurmctldHost=trial1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc=$work/jobs.txt
ReturnToService=2
MpiDefault=none
NodeName=trial[1-2] CPUs=16 RealMemory=1000 Gres=gpu:1
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  echo "Name=gpu File=/dev/null" >"$work/gres.conf" # one logical GPU
  printf 'CgroupAutomount=no\nConstrainCores=no\n' >"$work/cgroup.conf"
  # Ray's workers come from each node's own server of tools/prefork.py, whose address the node keeps in its /tmp.
  printf '#!/usr/bin/env bash\nset -a; . /tmp/prefork; exec "$PREFORK_PYTHON" "$@"\n' >"$work/py/python"
  chmod +x "$work/py/python"
}

start_node() { # NUMBER
  local name=${names[$1]}
  mkdir -p "$work/spool-$name"
  unshare --net --pid --uts --mount --fork --mount-proc --kill-child bash -c "
    hostname $name
    mount --bind $work/hosts /etc/hosts
    mount --bind $work/resolv.conf /etc/resolv.conf
    mount -t tmpfs tmpfs /tmp
    while :; do sleep 1000; done" & # bash, not sleep: it reaps what Ray's daemons leave, as an init does
  local pid=
  until pid=$(pgrep -P $!) && [ "$(nsenter -t "$pid" -u hostname)" = "$name" ]; do sleep 0.2; done
  pids[$1]=$pid
}

start() {
  dd if=/dev/urandom of="$work/munge/key" bs=1 count=1024 2>/dev/null
  chmod 400 "$work/munge/key"
  munged --foreground --force --socket="$work/munge/socket" --key-file="$work/munge/key" --pid-file="$work/munge/pid" \
    --seed-file="$work/munge/seed" --log-file="$work/munge/log" --num-threads=2 2>"$work/munge/stderr" &
  munge=$!
  start_node 0
  start_node 1
  ip link add name vtrial1 type veth peer name vtrial2
  for node in 0 1; do
    local cable=v${names[$node]}
    ip link set "$cable" netns "${pids[$node]}"
    inside $node ip addr add "10.213.9.$((node + 1))/24" dev "$cable"
    inside $node ip link set lo up
    inside $node ip link set "$cable" up
    inside $node ip route add default dev "$cable" # programs ask for the address that leads outside
  done
  slurm slurmctld -D >"$work/slurmctld.out" 2>&1 &
  for node in 0 1; do
    VERL_PLATFORM=cpu TORCH_COMPILE_DISABLE=1 inside $node python tools/prefork.py --log "$work/imports-$node.log" \
      --preload "$preload" bash -c "env | grep ^PREFORK_ >/tmp/prefork; exec slurmd -D -N ${names[$node]}" \
      >"$work/slurmd-$node.out" 2>&1 &
  done
  until [ "$(slurm sinfo --noheader --states=idle --Format=nodes 2>/dev/null | tr -d ' ')" = 2 ]; do sleep 1; done
  slurm sinfo
}

stop() {
  for pid in "${pids[@]}"; do kill -9 "$pid"; done # the first process of a node: all others end with it
  [ -z "$munge" ] || kill "$munge"
}

submit() { # NAME RUN_OPTIONS... -- OVERRIDES...; prints the job's id
  local name=$1 options=()
  shift
  while [ "$1" != -- ]; do options+=("$1") && shift; done
  shift
  slurm env RUN_DIR="$work/$name" VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 \
    RAY_prestart_worker_first_driver=0 RAY_raylet_start_wait_time_s=300 \
    sbatch --parsable --job-name="$name" --gpus-per-node=1 --time=60 --output="$work/$name.out" "${options[@]}" \
    recipes/slurm/run.sbatch recipe=cpu_smoke data.train_batch_size=8 actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.actor.optim.lr_warmup_steps=0 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    ray_kwargs.ray_init.runtime_env.py_executable="$work/py/python" "$@"
}

saved() { cat "$work/$1/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

until_saved() { until [ "$(saved "$1")" -ge "$2" ]; do sleep 1; done; } # NAME STEP

state() { slurm scontrol show job "$1" | grep -oE '(JobId|JobState|Reason|Restarts|ExitCode)=[^ ]+' | tr '\n' ' '; }

until_ended() { # JOB
  until [[ "$(state "$1")" =~ JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL) ]]; do sleep 2; done
}

hasten() { # JOB: Slurm lets a requeued job wait for two minutes
  until [[ "$(state "$1")" =~ JobState=PENDING ]]; do sleep 1; done
  state "$1" && echo
  until slurm scontrol update JobId="$1" StartTime=now 2>/dev/null; do sleep 1; done
}

report() { # NAME JOB
  state "$2" && echo
  grep -E '^slurm: |guard state of step|guard stopped|Resuming from' "$work/$1.out" | grep -v '^slurm: error' || true
}

trap stop EXIT
configure
start
python recipes/make_assets.py cpu_smoke

echo "== wrong settings: not started, not requeued"
job=$(submit wrong --nodes=1 -- stability=icepop stability.icepop.alpha=6)
until_ended "$job"
report wrong "$job"

echo "== a run on two nodes: its trainer is killed, its time is up, a node fails, then it ends"
# A rule that always fires gives the guard a state that a fresh one does not have.
job=$(submit run -- stability=guard trainer.save_freq=1 trainer.total_training_steps=16 \
  '+stability.guard.rules.trial={signal: critic/score/mean, above: -1, action: warn}')
until_saved run 2
echo "trainer killed (kill -9) after checkpoint $(saved run)"
slurm sh -c 'kill -9 $(pgrep -xf "python -m verl_ext.main_ppo .*")' # of this node: it has process ids of its own
hasten "$job"
until_saved run $(($(saved run) + 3))
echo "USR1 sent, as Slurm does before the time is up, after checkpoint $(saved run)"
slurm scancel --signal=USR1 --batch "$job"
hasten "$job"
until_saved run $(($(saved run) + 3))
echo "the second node is down after checkpoint $(saved run)"
slurm scontrol update NodeName=trial2 State=down Reason=trial # it registers again by itself: ReturnToService
hasten "$job"
until_ended "$job"
report run "$job"
steps=$(grep -oE '^\{"step":[0-9]+' "$work/run/metrics.jsonl" | grep -oE '[0-9]+$' | tr '\n' ' ')
echo "last checkpoint $(saved run); steps in metrics.jsonl: $steps"

echo "== the guard stops a run that was requeued from outside before: not requeued again"
job=$(submit guard --nodes=1 -- stability=guard trainer.save_freq=1 trainer.total_training_steps=12 \
  '+stability.guard.rules.trial={signal: critic/score/mean, above: -1, patience: 2, action: stop}')
until grep -qs 'Head node started' "$work/guard.out"; do sleep 1; done
echo "requeued from outside (scontrol requeue), as for a job of more priority"
slurm scontrol requeue "$job"
hasten "$job"
until_ended "$job"
report guard "$job"
[ ! -e "$work/guard/failures" ] || echo "that requeue was counted as a failure"

echo "== scancel: not requeued"
job=$(submit cancelled -- stability=guard)
until grep -qs 'Head node started' "$work/cancelled.out"; do sleep 1; done
slurm scancel "$job"
until_ended "$job"
sleep 10
report cancelled "$job"
