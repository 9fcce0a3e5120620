"""Starts runs of the real stack for the end-to-end tests, and finds what they left."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import ROOT
from tests.stack.small_models import NEAR_TIE
from tests.support.documented import undocumented
from tests.support.forking import Forked
from tests.support.signals import heeds_ctrl_c
from verl_ext.report.load import read_run
from verl_ext.report.verdict import judge_run

CLEAN_EXIT = (sys.executable, str(ROOT / "tools" / "clean_exit.py"))
SMALL = (
    "recipe=cpu_smoke",
    "data.train_batch_size=8",  # of every recipe
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",  # few steps: they have to move the weights
    f"recipe_folder={ROOT}/recipes/cpu_smoke",
    f"reward.custom_reward_function.path={ROOT}/tests/stack/rewards.py",
)

# The precision of runs that test something else: products in bfloat16 take ten times as long on a CPU core without
# instructions for them. The gap is then the rollout's rounding.
TRAINS_IN_FLOAT32 = ("precision=fp32", "actor_rollout_ref.rollout.dtype=bfloat16")
MEGATRON_TRAINS_IN_FLOAT32 = "actor_rollout_ref.actor.megatron.dtype=float32"

NEAR_TIES_K3 = 1e-4  # a k3 below this may come from one or two near ties of a router

ASYNC_BUFFER = "trainer.v1.sampler.custom_sampler.name=FastPollReplayBufferAsync"
SEPARATE_ASYNC = (  # three batches are handed out before the first update
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "trainer.v1.separate_async.num_warmup_batches=2",
    ASYNC_BUFFER,
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_ext.cpu.weights",
    "ray_kwargs.ray_init.num_gpus=2",
)

CPU = {  # environment, as tools/quickstart.sh sets it
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # another test beside a run would leave its workers, at Ray's 15, no time
}
PY_EXECUTABLE = "ray_kwargs.ray_init.runtime_env.py_executable"
RETRACTS = ("SGLANG_TEST_RETRACT", "1")  # SGLang retracts a request every third pass, by its own switch for tests
# The start-up table's row of stability.float32_head, for {} heads of each engine; its line may break after this.
FLOAT32_HEADS = r"│ both engines +│ heads: {0} in training, {0} in the"
MARK = "VERL_EXT_TEST_RUN"  # the environment variable that tells a run's processes from others'

# verl's own entry point finds the recipe through the search path.
PLAIN_VERL = ("hydra.searchpath=[pkg://verl_ext.configs]", f"+{SMALL[0]}", *SMALL[1:])


@dataclass(frozen=True)
class Run:
    """A finished run: exit code, console, and each step's metrics."""

    code: int
    console: str
    folder: Path

    @property
    def tail(self) -> str:
        """The end of the console, for a failing assertion."""
        return self.console[-4000:]

    @property
    def steps(self) -> list[dict[str, float]]:
        files = (self.folder / "verl_ext").glob("*.jsonl")  # the file logger names it after the experiment
        (file,) = [file for file in files if "." not in file.stem]  # not X.guard.jsonl, X.trajectories.jsonl
        return [json.loads(line)["data"] for line in file.read_text().splitlines()]


def run(arguments: list[str], folder: Path, stack: Forked, timeout: int = 900) -> Run:
    """Run `python ARGUMENTS` on the real stack in `folder`, and keep its console there."""
    mark = uuid.uuid4().hex
    try:
        finished = subprocess.run(
            forked_command(arguments, stack),
            cwd=folder,
            env=os.environ | CPU | stack.environment | {MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
    finally:
        kill_all(mark)  # the daemons of Ray are not CLEAN_EXIT's: the process that started them is the server's child
    (folder / "console.log").write_text(finished.stdout)
    return Run(finished.returncode, finished.stdout, folder)


def in_float32(*overrides: str, recipe: str = SMALL[0]) -> tuple[str, ...]:
    """Returns the overrides, and those that train in float32 unless the run has a precision of its own."""
    if any(override.startswith("precision=") or "megatron.dtype=" in override for override in overrides):
        return overrides
    return (*overrides, *((MEGATRON_TRAINS_IN_FLOAT32,) if "megatron" in recipe else TRAINS_IN_FLOAT32))


def forked_command(arguments: list[str], stack: Forked) -> list[str]:
    return [*CLEAN_EXIT, stack.python, *arguments, f"{PY_EXECUTABLE}={stack.python}"]


def assert_k1_is_verls(step: dict[str, float]) -> None:
    """Checks our k1 against verl's, relative to the mean |log k|: k1 is much smaller than its terms of either sign."""
    assert abs(step["vllm_kl/k1"] - step["rollout_corr/kl"]) < 1e-4 * step["vllm_kl/log_ratio_abs_mean"]


def assert_load_is_of(step: dict[str, float], experts: int) -> None:
    """Checks that the load of the experts was counted over a batch whose engines nearly agree."""
    layers = [value for name, value in step.items() if name.startswith("router/load_max/layer_")]
    assert step["router/load_max"] == max(layers) and min(layers) >= 1 and max(layers) <= experts
    assert 1 / experts <= step["router/load_effective"] <= 1
    assert step["router/load_apart"] <= 1 - step["router/agreement"] + 1e-9, "moved choices are different choices"


def assert_engines_agree(step: dict[str, float], k3: float) -> bool:
    """Checks that in float32 all experts are the same and vllm_kl/k3 is below `k3`. Returns whether k3 is.

    The engines' router scores differ by their rounding, so once in many runs they order the last expert chosen and the
    first one left out differently. Such a step has one or two choices that differ, all near ties, and a gap that is
    rounding no more, but small: the rule zero_mismatch may warn of it. Only the adapter of FSDP records how near they
    are. Where the routing of some trajectories is not compared, such a choice may be unseen.
    """
    held = step["vllm_kl/k3"] < k3
    if step["router/agreement"] == step["router/exact_match"] == 1:
        assert held or (step.get("router/sampled", 1) < 1 and step["vllm_kl/k3"] < NEAR_TIES_K3)
        return held
    layers = sum(name.startswith("router/exact_match/layer_") for name in step)
    differing = (1 - step["router/exact_match"]) * step["router/tokens"] * layers
    assert differing < 2.5 and step.get("router/margin_differs", 0) < NEAR_TIE
    assert step["vllm_kl/k3"] < NEAR_TIES_K3
    return held


def assert_documented(run: Run) -> None:
    assert undocumented(name for step in run.steps for name in step) == set()


def left_out(run: Run) -> list[str]:
    """The overrides of the launch's lines "left out"."""
    return re.findall(r"verl_ext: left out: now (.*?), because ", run.console)


def suspected_causes(run: Run) -> list[str]:
    """The causes that the report of this run names, the likeliest first."""
    return [suspect.cause.name for suspect in judge_run(read_run(run.folder / "verl_ext")).suspects]


def assert_top_tokens(step):
    """Checks that every token has top tokens, and that their KL has the size of k3's estimate from single tokens.

    The KL counts what the engines differ by in each top token, and all others as one, in which the differences cancel:
    where every token's log-probability has the same error, it is about the top tokens' mass times k3.
    """
    assert step["vllm_kl/head_missing"] == 0
    assert 0 < step["vllm_kl/head"] < 0.01
    assert 0.1 < step["vllm_kl/head"] / (step["vllm_kl/k3"] * step["vllm_kl/head_mass"]) < 10


def shares_by_lag(step):
    start = "vllm_kl/share/lag/"
    return {name.removeprefix(start): value for name, value in step.items() if name.startswith(start)}


def processes(mark: str) -> list[psutil.Process]:
    """The live processes that a run with this mark in its environment started."""
    variable = f"{MARK}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        # Not process.environ(): it stops at the hole that Ray's new process titles leave.
        with contextlib.suppress(OSError):
            if variable in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def process_titles(mark: str) -> list[str]:
    """Returns the titles of these processes, as a process list shows them."""
    found = []
    for process in processes(mark):
        try:
            found.append(" ".join(process.cmdline()) or process.name())
        except psutil.NoSuchProcess:
            continue
    return found


@dataclass(frozen=True)
class LiveRun:
    """A run that goes on in its folder; each of its processes bears the mark."""

    mark: str
    folder: Path
    process: subprocess.Popen

    @property
    def console(self) -> str:
        return (self.folder / "console.log").read_text()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.console[-3000:]
            assert time.monotonic() < deadline, self.console[-3000:]
            time.sleep(0.2)

    def wait_for_end(self, code: int, seconds: float = 150) -> None:
        assert self.process.wait(seconds) == code, self.console[-3000:]


@contextlib.contextmanager
def live(
    command: list[str], folder: Path, environment: Mapping[str, str] | None = None, mark: str = ""
) -> Iterator[LiveRun]:
    """Starts a run, and kills what is left of it when the context ends."""
    mark = mark or uuid.uuid4().hex
    with (folder / "console.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | CPU | (environment or {}) | {MARK: mark},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=heeds_ctrl_c,
        )
    try:
        yield LiveRun(mark, folder, process)
    finally:
        kill_all(mark)
        process.wait()


def engine_processes(mark: str) -> list[psutil.Process]:
    """Returns the processes that the rollout engine of a forked run started, oldest first: vLLM's engine core, SGLang's
    scheduler.

    A forked process has no title. It ends together with its client, which has a command.
    """
    found = [process for process in processes(mark) if "--multiprocessing-fork" in process.cmdline()]
    return sorted(found, key=lambda process: process.create_time())


def titled_processes(start: str, mark: str) -> list[psutil.Process]:
    """Returns the run's processes whose titles begin with `start`: marked ones, or forks of this process's servers."""
    found = {*processes(mark), *psutil.Process().children(recursive=True)}
    return [process for process in found if process.name().startswith(start)]


def error_of(console: str) -> str:
    """Returns the one error line that a run printed."""
    (error,) = [line for line in console.splitlines() if line.startswith("verl_ext: error:")] or [console[-3000:]]
    return error


def assert_one_error(console: str, said: str) -> None:
    """Checks that a run that died printed one error line, which matches `said` and names the remedy."""
    error = error_of(console)
    assert re.search(said, error) and "trainer.resume_mode=auto" in error, error


def kill_all(mark: str) -> None:
    """Kills all processes of the run, Ray's daemons included."""
    while found := processes(mark):
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=5)
