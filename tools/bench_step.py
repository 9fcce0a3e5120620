"""Measures the plugin's cost per training step: the same run with the plugin and with stability=none.

    python tools/bench_step.py [--steps 60] [--rounds 3] [--recipe cpu_smoke] [--on OVERRIDE...] [--both OVERRIDE...]

`--on` replaces the plugin's settings, by default IcePop with the routers' agreement; `--both` changes both runs.
`--recipe` names another of the recipes for CPU cores with vLLM, such as cpu_megatron.

Needs the environment of tools/setup_cpu.sh. Both runs of a round start together and take their steps in turn; meanwhile
the processes of the other run are stopped. So a machine that slows down slows both. The learning rate is 0 and all
responses have the same length, so that every step has the same work. As in the quick start, processes are forked from
one that has imported what they need: imports are not part of a step.
It prints the mean time of a step and of its stages, and the ratio on / off with its 95 % bootstrap interval. The
bootstrap draws rounds first and then their pairs of steps, because those of one round are more alike than those of two.
It uses means, because neighbouring steps are slowed down together, which a ratio of medians would miss.
"""

import argparse
import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

import psutil
from prefork import ROLLOUTS, VERL

REPO = Path(__file__).parent.parent
WARM_UP = 4  # steps: imports in the agent loop, first allocations
STAGES = ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights")
OFF = ("stability=none",)
ON = ("stability=icepop", "stability.router_agreement=true", "stability.cascade_attention=off")

Step = dict[str, float]  # stage -> seconds
Pair = tuple[Step, Step]  # off, on


class Run:
    """A run of training that takes a step on request, and waits in between."""

    def __init__(self, recipe: str, overrides: tuple[str, ...], steps: int, folder: Path):
        folder.mkdir()
        self.folder = folder
        pipes = {name: folder / name for name in ("TURN_ASKED", "TURN_GIVEN")}
        for pipe in pipes.values():
            os.mkfifo(pipe)
        self._asked, self._given = (os.open(pipe, os.O_RDWR) for pipe in pipes.values())
        of_run = [
            f"recipe={recipe}",
            f"assets={REPO}/.quickstart/prefix_sums",
            f"trainer.total_training_steps={steps}",
            "actor_rollout_ref.actor.optim.lr=0",
            "actor_rollout_ref.rollout.ignore_eos=true",
            f"hydra.run.dir={folder}",
            *overrides,
        ]
        forked = '"$PREFORK_PYTHON" -m verl_ext.main_ppo "$@"'
        forked += ' ray_kwargs.ray_init.runtime_env.py_executable="$PREFORK_PYTHON"'
        preload = ("--preload", ",".join((*VERL, *ROLLOUTS["vllm"], "turns")), "--log", f"{folder}/imports.log")
        preforked = [sys.executable, "tools/clean_exit.py", sys.executable, "tools/prefork.py", *preload]
        command = [*preforked, "sh", "-c", forked, "sh", *of_run]
        environment = os.environ | {name: str(pipe) for name, pipe in pipes.items()}
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(REPO / "tools"), os.environ.get("PYTHONPATH")))),
            "VERL_PLATFORM": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_raylet_start_wait_time_s": "300",
        }
        with (folder / "console.log").open("w") as log:
            self._process = subprocess.Popen(command, cwd=REPO, env=environment, stdout=log, stderr=log)

    def wait_for_step(self) -> None:
        """Waits until the run is about to begin a step.

        Raises:
            RuntimeError: the run has ended; the message has the end of its log.
        """
        while not select.select([self._asked], [], [], 1.0)[0]:
            if self._process.poll() is not None:
                said = (self.folder / "console.log").read_text()[-4000:]
                raise RuntimeError(f"a run ended with exit code {self._process.returncode}:\n{said}")
        os.read(self._asked, 1)

    def go_on(self) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        os.write(self._given, b".")

    def stand_still(self) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def steps(self) -> list[Step]:
        """Returns all steps that it took."""
        rows = [json.loads(line)["data"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row["timing_s/step"] -= row["timing_s/turn"]
        return [{stage: row[f"timing_s/{stage}"] for stage in STAGES} for row in rows]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets the run end, or interrupts it."""
        if sys.exc_info()[0] is not None:
            self.stand_still()
            self._process.terminate()
            self.go_on()
        self._process.wait()
        os.close(self._asked)
        os.close(self._given)

    def _processes(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []


def measure(
    recipe: str, steps: int, folder: Path, *, on_first: bool, settings: Sequence[str], both: Sequence[str]
) -> list[Pair]:
    """Measures `steps` steps of both runs, after the warm-up, with the plugin's settings and those of both."""
    last = WARM_UP + steps + 1  # not measured: during this step, the other run ends
    start = partial(Run, recipe, steps=last)
    with start((*OFF, *both), folder=folder / "off") as off, start((*settings, *both), folder=folder / "on") as on:
        runs = (on, off) if on_first else (off, on)
        for run in runs:
            run.wait_for_step()
            run.stand_still()
        for _ in range(last - 1):
            for run in runs:
                run.go_on()
                run.wait_for_step()
                run.stand_still()
        for run in runs:
            run.go_on()
    return list(zip(off.steps()[WARM_UP:-1], on.steps()[WARM_UP:-1], strict=True))


def seconds(measured: list[Pair], stage: str) -> tuple[float, float]:
    """Returns the means of off and on."""
    off, on = (statistics.fmean(pair[side][stage] for pair in measured) for side in (0, 1))
    return off, on


def ratio(measured: list[Pair], stage: str) -> float:
    """Returns mean(on) / mean(off)."""
    off, on = seconds(measured, stage)
    return on / off


def interval(rounds: list[list[Pair]], stage: str, draws: int = 2000) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of the ratio."""
    source = random.Random(0)

    def drawn() -> list[Pair]:
        return [pair for some in source.choices(rounds, k=len(rounds)) for pair in source.choices(some, k=len(some))]

    ratios = sorted(ratio(drawn(), stage) for _ in range(draws))
    return ratios[int(draws * 0.025)], ratios[int(draws * 0.975)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="measured steps per run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--recipe", default="cpu_smoke", help="of both runs (default: %(default)s)")
    parser.add_argument("--on", nargs="+", default=ON, metavar="OVERRIDE", help="the plugin's settings")
    parser.add_argument("--both", nargs="+", default=(), metavar="OVERRIDE", help="more settings of both runs")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # an exception, which ends the runs
    subprocess.run([sys.executable, "recipes/make_assets.py", "cpu_smoke"], cwd=REPO, check=True)
    rounds: list[list[Pair]] = []
    for index in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            asked = {"settings": arguments.on, "both": arguments.both}
            rounds.append(measure(arguments.recipe, arguments.steps, Path(folder), on_first=index % 2 == 1, **asked))
        print(f"round {index + 1}: on / off {ratio(rounds[-1], 'step'):.4f}", flush=True)
    print(f"\n{'stage':<16}{'off, s':>10}{'on, s':>10}{'on / off':>10}   95 % interval")
    together = [pair for measured in rounds for pair in measured]
    for stage in STAGES:
        low, high = interval(rounds, stage)
        off, on = seconds(together, stage)
        print(f"{stage:<16}{off:>10.4f}{on:>10.4f}{on / off:>10.4f}   {low:.4f} to {high:.4f}")
    print(f"\nrounds: {arguments.rounds}, of two runs with {arguments.steps} steps each, after {WARM_UP} of warm-up")


if __name__ == "__main__":
    main()
