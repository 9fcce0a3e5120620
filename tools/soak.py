"""Measures whether a long run grows: memory and handles of every process, and the run's files, over hundreds of steps.

    python tools/soak.py [--steps 300] [--out .soak] [--plain]

Needs the environment of tools/setup_cpu.sh. It runs the CPU recipe with the plugin's parts on, or with --plain verl as
it is, and samples it every few seconds. For the processes of each title, it prints the growth per 100 steps with its
standard error, without the first quarter of the steps; and the sizes of the run's files. Neighbouring samples are
correlated, so the errors are those of means over ten steps.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

REPO = Path(__file__).parent.parent
EVERY_S = 2.0
BLOCK = 10  # steps
ON = (
    "stability=icepop",
    "stability.router_agreement=true",
    "stability.replay=R3",
    "stability.breakdown=true",
    "stability.top_tokens.k=8",
    "stability.cascade_attention=off",
    "stability.trajectories.per_step=2",
    "stability.sync_canary.trajectories=4",
    "stability.guard.after_update.trajectories=4",
    "stability.guard.rules.burst={signal:actor/grad_norm,above:1.0e+6,action:undo}",
    "stability.guard.rules.rate={signal:vllm_kl/k3,above:1.0e+3,action:lower_lr}",
)

Samples = dict[str, list[tuple[int, float, float]]]  # title -> (step, MB, handles) of each sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path(".soak"), help="default: %(default)s")
    parser.add_argument("--plain", action="store_true", help="verl as it is, to compare with")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="further overrides of the run")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "recipes/make_assets.py", "cpu_smoke", "--out", str(out / "assets")], cwd=REPO, check=True
    )
    overrides = arguments.overrides if arguments.plain else [*ON, *arguments.overrides]
    samples = watched(command_of(arguments.steps, overrides, out), out, arguments.steps)
    (out / "samples.json").write_text(json.dumps(samples))
    for line in lines_of(samples):
        print(line)
    for path, size in sorted(sizes(out)):
        print(f"{size / 1e6:10.2f} MB  {path}")


def command_of(steps: int, overrides: Sequence[str], out: Path) -> list[str]:
    return [
        sys.executable,
        "tools/clean_exit.py",
        sys.executable,
        "-m",
        "verl_ext.main_ppo",
        "recipe=cpu_smoke",
        f"assets={out}/assets",
        f"trainer.total_training_steps={steps}",
        f"hydra.run.dir={out}/hydra",
        "trainer.save_freq=25",
        "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.default_local_dir={out}/checkpoints",
        *overrides,
    ]


def watched(command: list[str], out: Path, steps: int) -> Samples:
    """Runs the command, and samples the processes that it has started, from its first step until its last."""
    metrics = out / "metrics.jsonl"
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VERL_FILE_LOGGER_PATH": str(metrics),
    }
    samples: Samples = defaultdict(list)
    with (out / "console.log").open("w") as log:
        run = subprocess.Popen(command, cwd=REPO, env=environment, stdout=log, stderr=log)
        while run.poll() is None:
            time.sleep(EVERY_S)
            step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if not 0 < step < steps:
                continue
            for title, memory, handles in by_title(psutil.Process(run.pid)):
                samples[title].append((step, memory, handles))
            print(f"\rstep {step}", end="", file=sys.stderr, flush=True)
    if run.returncode:
        raise SystemExit(f"the run ended with exit code {run.returncode}: {out}/console.log")
    return samples


def by_title(root: psutil.Process) -> Iterator[tuple[str, float, float]]:
    """Yields (title, MB that are its own, open handles), summed over the processes of a title."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for process in root.children(recursive=True):
        try:
            title = process.name().partition(".")[0]
            memory = process.memory_full_info().uss / 1e6
            handles = process.num_fds()
        except psutil.Error:
            continue
        found[title][0] += memory
        found[title][1] += handles
    for title, (memory, handles) in found.items():
        yield title, memory, handles


def lines_of(samples: Mapping[str, Sequence[tuple[int, float, float]]]) -> Iterator[str]:
    """Yields a line for each title, the largest first."""
    yield f"{'processes':<26}{'MB':>8}{'MB / 100 steps':>20}{'handles':>9}{'handles / 100 steps':>22}"
    for title, rows in sorted(samples.items(), key=lambda item: -item[1][-1][1]):
        steps, memory, handles = np.array(rows, dtype=float).T
        slopes = [slope(steps, values) for values in (memory, handles)]
        if any(each is None for each in slopes):
            continue  # not there long enough
        (memory_slope, memory_error), (handle_slope, handle_error) = slopes  # type: ignore[misc]
        yield (
            f"{title:<26}{memory[-1]:>8.0f}{100 * memory_slope:>11.2f} ± {100 * memory_error:<6.2f}"
            f"{handles[-1]:>9.0f}{100 * handle_slope:>13.2f} ± {100 * handle_error:<6.2f}"
        )


def slope(steps: np.ndarray, values: np.ndarray) -> tuple[float, float] | None:
    """Returns the growth per step and its standard error, by least squares over means of BLOCK steps, without the first
    quarter."""
    kept = steps >= steps.max() / 4
    blocks = (steps[kept] // BLOCK).astype(int)
    every = np.unique(blocks)
    if len(every) < 4:
        return None
    x = np.array([steps[kept][blocks == block].mean() for block in every])
    y = np.array([values[kept][blocks == block].mean() for block in every])
    (grown, _), covariance = np.polyfit(x, y, 1, cov=True)
    return float(grown), float(covariance[0, 0] ** 0.5)


def sizes(out: Path) -> Iterator[tuple[str, int]]:
    """Yields the size of each of the run's files; a folder of checkpoints counts as one."""
    for path in out.iterdir():
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        yield path.name, sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    main()
