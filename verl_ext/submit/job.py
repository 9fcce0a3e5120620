"""What `verl-ext submit` sends to Ray for one run."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from verl_ext.errors import ConfigError
from verl_ext.launch.overrides import override
from verl_ext.printable import printable

# What is never needed on the nodes; Ray refuses a working directory of more than 500 MiB.
EXCLUDES = (".git", ".venv", "__pycache__", "checkpoints", "outputs", "wandb", ".quickstart", "*.pt", "*.safetensors")
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "true", "HYDRA_FULL_ERROR": "0"}
RUN_DIR, OVERRIDES = "verl_ext_run_dir", "verl_ext_overrides"  # keys of a job's metadata
METRICS = "VERL_FILE_LOGGER_PATH"
# What goes to the run's folder unless the user names another place: setting -> what stands there.
PLACES = {"trainer.default_local_dir": "checkpoints", "hydra.run.dir": "Hydra's output", METRICS: "metrics"}
HIDDEN = "(hidden)"
CLUSTERS_OWN = ("ray_kwargs.ray_init.num_cpus", "ray_kwargs.ray_init.num_gpus")


@dataclass(frozen=True)
class Job:
    """What is sent to Ray: the command of the driver, the environment of every process, and what to remember.

    `elsewhere` says what the run writes to other places than its folder; "" if nothing.
    """

    entrypoint: str
    runtime_env: dict[str, Any]
    metadata: dict[str, str]
    elsewhere: str = ""


def build_job(
    overrides: Sequence[str],
    *,
    run_dir: str,
    working_dir: str | None = None,
    pip: Sequence[str] = (),
    image: str | None = None,
    env: Sequence[str] = (),
) -> Job:
    """The job of one run.

    Args:
        overrides: as for `python -m verl_ext.main_ppo`.
        run_dir: absolute, the same path on every node.
        working_dir: a local folder that is sent to every node and becomes the current one there; None sends nothing.
        pip: requirements to install on every node; `${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}` stands for the folder sent.
        image: a container image with verl and verl_ext in it.
        env: KEY=VALUE, or KEY for the value that it has here.

    Raises:
        ConfigError: an argument cannot work.
    """
    if not PurePosixPath(run_dir).is_absolute():
        raise ConfigError(f"--run-dir={run_dir} must be an absolute path that every node can write to")
    _check_text(run_dir)
    if pip and image:
        raise ConfigError("--pip and --image exclude each other: put the packages into the image")
    if working_dir is not None and "://" not in working_dir and not Path(working_dir).exists():
        raise ConfigError(f"--working-dir={working_dir} is not there; give a folder of this machine")
    folder = PurePosixPath(run_dir)
    given = _settings(overrides)
    for key in CLUSTERS_OWN:
        if given.get(key, "null") != "null":
            raise ConfigError(
                f"{key}={given[key]} is refused by a cluster that runs already, which has its own number; leave it out"
            )
    defaults = {
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "hydra.run.dir": str(folder / "hydra"),
    }
    added = [override(key, value) for key, value in defaults.items() if key not in given]
    added += [f"++{key}=null" for key in CLUSTERS_OWN if key not in given]
    # Hydra takes no overrides behind a flag such as `--cfg job`.
    flag = next((index for index, word in enumerate(overrides) if word.startswith("-")), len(overrides))
    command = ["python", "-m", "verl_ext.main_ppo", *overrides[:flag], *added, *overrides[flag:]]
    variables = dict(_variable(item) for item in env)
    runtime_env: dict[str, Any] = {"env_vars": ENVIRONMENT | {METRICS: str(folder / "metrics.jsonl")} | variables}
    if working_dir is not None:
        runtime_env |= {"working_dir": working_dir, "excludes": list(EXCLUDES)}
    if pip:
        runtime_env["pip"] = list(pip)
    if image:
        runtime_env["image_uri"] = image
    metadata = {RUN_DIR: run_dir, OVERRIDES: json.dumps(list(overrides))}
    return Job(shlex.join(command), runtime_env, metadata, _elsewhere(given | variables))


def shown(job: Job, env: Sequence[str]) -> dict[str, Any]:
    """What is sent, without the values that the user gave by `env`: they may be secrets."""
    hidden = {item.partition("=")[0]: HIDDEN for item in env}
    runtime_env = job.runtime_env | {"env_vars": job.runtime_env["env_vars"] | hidden}
    return {"entrypoint": job.entrypoint, "runtime_env": runtime_env}


def _check_text(run_dir: str) -> None:
    if "$" in run_dir:  # Ray expands variables in what it sets for a process, OmegaConf interpolations in the overrides
        raise ConfigError(f"--run-dir={run_dir} must be the folder itself, without a $: Ray and Hydra would replace it")
    if run_dir.encode(errors="ignore").decode() != run_dir or "\0" in run_dir:
        raise ConfigError(f"--run-dir={printable(run_dir)} must be a path in UTF-8")


def _settings(overrides: Sequence[str]) -> dict[str, str]:
    """Key -> value of the overrides, without Hydra's plus signs."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def _elsewhere(given: dict[str, str]) -> str:
    return ", ".join(f"{what} to {given[key]} ({key})" for key, what in PLACES.items() if key in given)


def _variable(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not key:
        raise ConfigError("--env needs a name: --env KEY=VALUE, or --env KEY for the value that it has here")
    if equals:
        return key, value
    if key not in os.environ:
        raise ConfigError(f"--env {key} has no value here; give one: --env {key}=VALUE")
    return key, os.environ[key]
