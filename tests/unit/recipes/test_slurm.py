"""The Slurm script without Slurm: the commands that it starts, and when it requeues the job.

Small programs stand in for Slurm, Ray and the training; tools/slurm_trial.sh runs the script on a real Slurm.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import ROOT

SCRIPT = ROOT / "recipes" / "slurm" / "run.sbatch"
PROGRAMS = {
    "scontrol": 'if [ "$1" = show ]; then echo node1; echo node2; else echo "$2" >>"$WORK/requeued"; kill $PPID; fi',
    "srun": 'echo "$*" >>"$WORK/srun"; while [[ $1 = --* ]]; do shift; done; "$@"',
    "ray": """
        [ -z "$NO_RAY" ] || exit 0
        echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN $*" >>"$WORK/ray"
        while [ "$1" != -- ]; do shift; done; shift; "$@"
    """,
    "verl-ext": 'echo "$*" >"$WORK/doctor"; exit "$DOCTOR"',
    "python": 'echo "$VERL_FILE_LOGGER_PATH $*" >>"$WORK/python"; sleep "$TAKES"; exit "$CODE"',
}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NAME": "verl",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_ON_NODE": "96",
    "SLURM_PROCID": "0",
}


class Job:
    """A job in a folder: `attempt` is one start of it, `saved` writes a checkpoint's number."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run_dir = folder / "runs" / "verl-1234"
        (folder / "bin").mkdir()
        for name, body in PROGRAMS.items():
            program = folder / "bin" / name
            program.write_text(f"#!/usr/bin/env bash\n{body}\n")
            program.chmod(0o755)

    def start(self, *overrides: str, code=0, doctor=0, takes=0, no_ray="", **environment: str) -> subprocess.Popen:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        settings = {"CODE": str(code), "DOCTOR": str(doctor), "TAKES": str(takes), "NO_RAY": no_ray, "PATH": path}
        settings |= {"WORK": str(self.folder), "SLURM_SUBMIT_DIR": str(self.folder)}
        return subprocess.Popen(
            ["bash", str(SCRIPT), *overrides],
            env=os.environ | SLURM | settings | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def attempt(self, *overrides: str, **options) -> tuple[int, str]:
        """Returns exit code and log of one start; -SIGTERM if Slurm ended it to requeue the job."""
        started = self.start(*overrides, **options)
        log, _ = started.communicate(timeout=60)
        return started.returncode, log

    def saved(self, step: int) -> None:
        (self.run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (self.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))

    def written(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def job(tmp_path, monkeypatch):
    for name in ("RUN_DIR", "MOST_FAILURES", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return Job(tmp_path)


REQUEUED = -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "failures", "most", "expected"),
    [
        (0, 0, "", "end"),
        (3, 0, "", "end"),
        (1, 2, "", "requeue"),
        (137, 3, "", "end"),
        (1, 1, "0", "end"),
        (1, 5, "5", "requeue"),
    ],
)
def test_what_follows_an_exit_code(code, failures, most, expected):
    command = f'source "{SCRIPT}"; decide {code} {failures}'
    environment = os.environ | {"MOST_FAILURES": most}
    ended = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == expected


def test_a_run_is_started_on_all_nodes_with_its_folder(job):
    code, log = job.attempt("recipe=cpu_smoke", "trainer.nnodes=1")
    assert code == 0 and "the run ended well" in log and not job.written("requeued")
    run_dir = job.run_dir
    (started,) = job.written("python")
    settings = (
        "trainer.nnodes=2 trainer.n_gpus_per_node=8 trainer.resume_mode=auto "
        f"trainer.default_local_dir={run_dir}/checkpoints hydra.run.dir={run_dir}/hydra recipe=cpu_smoke "
        "trainer.nnodes=1 ++ray_kwargs.ray_init.num_cpus=null ++ray_kwargs.ray_init.num_gpus=null"
    )
    assert started == f"{run_dir}/metrics.jsonl -m verl_ext.main_ppo {settings}"
    assert job.written("doctor") == [f"doctor --trust {settings}"]
    (ray,) = job.written("ray")
    command = "symmetric-run --address=node1:21234 --min-nodes=2 --num-gpus=8 --num-cpus=96 "
    assert re.match(f"token [0-9a-f]{{64}} {command}", ray)
    (srun,) = job.written("srun")
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in srun


def test_failures_in_a_row_are_bounded(job):
    for failure in (1, 2):
        code, log = job.attempt(code=1, SLURM_RESTART_COUNT=str(failure - 1))
        assert code == REQUEUED and f"exit code 1, failure {failure} at this checkpoint" in log
    code, log = job.attempt(code=1, SLURM_RESTART_COUNT="2")
    assert code == 1 and "failure 3 at this checkpoint" in log
    assert job.written("requeued") == ["1234", "1234"]
    code, log = job.attempt(code=1)
    assert code == REQUEUED and "failure 1 at this checkpoint" in log, "another job in the same folder counts anew"


def test_a_new_checkpoint_starts_the_count_again(job):
    for step in range(1, 6):
        job.saved(step)
        assert job.attempt(code=137, SLURM_RESTART_COUNT=str(step))[0] == REQUEUED
    assert len(job.written("requeued")) == 5


def test_a_run_that_the_guard_stopped_is_not_requeued(job):
    code, log = job.attempt(code=3)
    assert code == 3 and "the guard stopped the run; not requeued" in log and not job.written("requeued")


def test_wrong_settings_start_nothing_and_are_not_requeued(job):
    code, log = job.attempt(doctor=1)
    assert code == 2 and "not started and not requeued" in log
    assert not job.written("requeued") and not job.written("srun")


def test_a_ray_that_does_not_start_is_a_failure(job):
    assert job.attempt()[0] == 0
    code, log = job.attempt(no_ray="1")
    assert code == REQUEUED and "exit code 1, failure 1" in log, "the exit code of the attempt before does not count"


def test_a_job_whose_time_is_up_is_requeued_and_no_failure(job):
    started = job.start(code=1, takes=10)
    deadline = time.monotonic() + 30
    while not job.written("python"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started.send_signal(signal.SIGUSR1)
    assert started.wait(20) == REQUEUED
    assert job.written("requeued") == ["1234"]
    assert not (job.run_dir / "failures").exists()


def test_a_run_folder_that_hydra_would_misread_is_refused(job):
    for wrong in ("relative/run", "/tmp/a b", "/tmp/a=b", "/tmp/$x"):
        code, log = job.attempt(RUN_DIR=wrong)
        assert code == 2 and f"error: RUN_DIR={wrong} must be an absolute path" in log


def test_the_scripts_parse():
    for script in (SCRIPT, ROOT / "tools" / "slurm_trial.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
