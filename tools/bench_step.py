"""What the plugin costs per training step: the same run with everything on and with stability=none.

    python tools/bench_step.py [--steps 30] [--rounds 2]

Needs the environment of tools/setup_cpu.sh. The learning rate is 0, so that every step of every run has the same
work; runs alternate (off, on, on, off, ...), so that a machine that slows down does not favour one of them. Processes
are forked from one that has imported what they need, as in the quick start: imports are no part of a step.
Prints the median time of a step and of its stages, and the ratio on / off with its 95 % bootstrap interval, for which
runs are drawn first and then their steps: steps of one run are more alike than those of two.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).parent.parent
WARM_UP = 4  # steps: imports in the agent loop, first allocations
STAGES = ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights")
ON = ("stability=icepop", "stability.router_agreement=true", "stability.cascade_attention=off")
OFF = ("stability=none",)


def run(overrides: tuple[str, ...], steps: int, folder: Path) -> list[dict[str, float]]:
    """Seconds of each stage for every step after the warm-up."""
    metrics = folder / "metrics.jsonl"
    of_run = [
        *(f"assets={REPO}/.quickstart/prefix_sums", f"trainer.total_training_steps={steps + WARM_UP}"),
        *("actor_rollout_ref.actor.optim.lr=0", f"hydra.run.dir={folder}"),
        *overrides,
    ]
    forked = '"$PREFORK_PYTHON" -m verl_ext.main_ppo recipe=cpu_smoke "$@"'
    forked += ' ray_kwargs.ray_init.runtime_env.py_executable="$PREFORK_PYTHON"'
    command = [
        *(sys.executable, "tools/clean_exit.py", sys.executable, "tools/prefork.py", "--log", f"{folder}/imports.log"),
        *("sh", "-c", forked, "sh", *of_run),
    ]
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "RAY_prestart_worker_first_driver": "0",
        "RAY_raylet_start_wait_time_s": "300",
    }
    with (folder / "console.log").open("w") as log:
        subprocess.run(command, cwd=REPO, env=environment, stdout=log, stderr=log, check=True)
    rows = [json.loads(line)["data"] for line in metrics.read_text().splitlines()][WARM_UP:]
    return [{stage: row[f"timing_s/{stage}"] for stage in STAGES} for row in rows]


def interval(on: list[list[float]], off: list[list[float]], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of median(on) / median(off), of the steps of several runs each."""
    source = random.Random(0)

    def drawn(runs: list[list[float]]) -> float:
        some = source.choices(runs, k=len(runs))
        return statistics.median(step for run in some for step in source.choices(run, k=len(run)))

    ratios = sorted(drawn(on) / drawn(off) for _ in range(draws))
    return ratios[int(draws * 0.025)], ratios[int(draws * 0.975)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="measured steps a run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of either kind (default: %(default)s)")
    arguments = parser.parse_args()
    subprocess.run(
        [sys.executable, "recipes/cpu_smoke/make_assets.py", "--out", ".quickstart/prefix_sums"], cwd=REPO, check=True
    )
    times: dict[str, list[list[dict[str, float]]]] = {"off": [], "on": []}  # of each run, of each step
    for index in range(arguments.rounds):
        order = (("off", OFF), ("on", ON))
        for name, overrides in order if index % 2 == 0 else order[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(run(overrides, arguments.steps, Path(folder)))
            latest = statistics.median(step["step"] for step in times[name][-1])
            print(f"round {index + 1}, {name}: median step {latest:.3f} s", flush=True)
    print(f"\n{'stage':<16}{'off, s':>10}{'on, s':>10}{'on / off':>10}   95 % interval")
    for stage in STAGES:
        on, off = ([[step[stage] for step in run] for run in times[name]] for name in ("on", "off"))
        low, high = interval(on, off)
        ours, others = (statistics.median(step for run in runs for step in run) for runs in (on, off))
        print(f"{stage:<16}{others:>10.3f}{ours:>10.3f}{ours / others:>10.3f}   {low:.3f} to {high:.3f}")
    each = f"{arguments.rounds} runs of {arguments.steps} steps"
    print(f"\n{each} on, {each} off, after {WARM_UP} of warm-up in each")


if __name__ == "__main__":
    main()
