"""`verl-ext submit`: submits runs to a Ray cluster through Ray's job API.

A run's files must outlive the cluster's temporary folders. Checkpoints, metrics, the guard's events and Hydra's output
therefore go to `--run-dir`, a folder per run on a file system that all nodes share. A run that is submitted again with
the same folder resumes from its last complete checkpoint.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from verl_ext.base.arguments import INTERRUPTED, add_command
from verl_ext.base.errors import ConfigError, Problems, UserError, errors_of
from verl_ext.base.printable import printable
from verl_ext.features.stability import stability_config
from verl_ext.features.verl_config import hydra_value
from verl_ext.launch.command_line import compose, plugins, read_launch
from verl_ext.launch.names import unknown_names

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

ADDRESS = "http://127.0.0.1:8265"  # Ray's own default
SUBMIT = """\
Submit a run to a Ray cluster through Ray's job API, follow its log, stop it, resume it. Every node needs verl and
verl_ext: install them there, or use --pip or --image.
"""
DONE = ("SUCCEEDED", "FAILED", "STOPPED")
POLL_S = 1.0
# Files that the nodes never need; Ray refuses a working directory of more than 500 MiB.
EXCLUDES = (".git", ".venv", "__pycache__", "checkpoints", "outputs", "wandb", ".quickstart", "*.pt", "*.safetensors")
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "true", "HYDRA_FULL_ERROR": "0"}
RUN_DIR, OVERRIDES = "verl_ext_run_dir", "verl_ext_overrides"  # keys of a job's metadata
METRICS = "VERL_FILE_LOGGER_PATH"
# Files that go to the run's folder unless the user names another place: setting -> its contents.
PLACES = {"trainer.default_local_dir": "checkpoints", "hydra.run.dir": "Hydra's output", METRICS: "metrics"}
# The parts of a variable's value that Ray may replace. `update_envs` of ray/_private/utils.py (2.60) calls
# os.path.expandvars, whose pattern this is, and then removes each `${NAME}` that the node lacks. There is no escape.
REFERENCE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)
CLUSTERS_OWN = ("ray_kwargs.ray_init.num_cpus", "ray_kwargs.ray_init.num_gpus")


def add_submit_parser(commands: Any) -> None:
    """Adds `verl-ext submit run|status|logs|stop|resume`."""
    brief = "submit runs to a Ray cluster; follow, stop and resume them"
    codes = "0; that of the run, where its log is followed; 1 if the run could not be stopped"
    parser = add_command(commands, "submit", brief, SUBMIT, "", codes=codes)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    def verb(name: str, help: str, run: Any) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help, description=help.capitalize() + ".")
        made.add_argument(
            "--address",
            default=os.environ.get("RAY_API_SERVER_ADDRESS", ADDRESS),
            metavar="URL",
            help="the Ray head's dashboard, http://HOST:8265 (default: $RAY_API_SERVER_ADDRESS, else %(default)s)",
        )
        made.set_defaults(run=lambda arguments: _reported(run, arguments))
        return made

    made = verb("run", "submit a run and follow its log", _run)
    made.usage = "%(prog)s --run-dir DIR [options] [override ...] [-- override ...]"
    made.epilog = (
        "Options and overrides may come in any order. Put flags of verl_ext.main_ppo, such as `--cfg job`, after "
        "`--`. Submitting with the same --run-dir again resumes from its last complete checkpoint."
    )
    made.add_argument(
        "--run-dir",
        required=True,
        help="absolute path for checkpoints, metrics and logs, on a file system that all nodes share",
    )
    made.add_argument(
        "--working-dir", help="a local folder to send to every node, with the code of your rewards and data"
    )
    made.add_argument(
        "--pip",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="a package to install on every node; may be repeated",
    )
    made.add_argument("--image", help="a container image that has verl and verl_ext")
    made.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY[=VALUE]",
        help="environment variable for every process; without VALUE, its value here",
    )
    made.add_argument("--id", help="id of the job (default: Ray makes one)")
    made.add_argument("--detach", action="store_true", help="do not follow the log")
    made.add_argument(
        "--dry-run", action="store_true", help="print the job as JSON and submit nothing; values of --env are hidden"
    )
    made.add_argument(
        "overrides",
        nargs="*",
        metavar="override",
        help="overrides of verl_ext.main_ppo, such as recipe=... stability=...; or a launch script, a YAML file of "
        "overrides, or behind -- a command that starts verl",
    )

    made = verb("status", "list the runs that were submitted, or show one", _status)
    made.add_argument("job", nargs="?", help="id of the job (default: list all)")
    made = verb("logs", "print a run's log", _logs)
    made.add_argument("job", help="id of the job")
    made.add_argument("--follow", action="store_true", help="keep printing until the run ends")
    made = verb("stop", "stop a run", _stop)
    made.add_argument("job", help="id of the job")
    made = verb("resume", "submit a run again; it continues from its last complete checkpoint", _resume)
    made.add_argument("job", help="id of the job")
    made.add_argument("--detach", action="store_true", help="do not follow the log")


@dataclass(frozen=True)
class Job:
    """The request to Ray: the driver's command, the environment of every process, and metadata.

    `elsewhere` lists what the run writes outside its folder; "" if nothing.
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
    """Builds a run's job.

    Args:
        overrides: as for `python -m verl_ext.main_ppo`.
        run_dir: an absolute path, the same on every node.
        working_dir: a local folder that is sent to every node and becomes the current folder there; None sends nothing.
        pip: requirements to install on every node; `${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}` is the folder sent.
        image: a container image that has verl and verl_ext.
        env: KEY=VALUE, or KEY for its value on this machine. Every process gets exactly this value.

    Raises:
        ConfigError: an argument cannot work.
    """
    if not PurePosixPath(run_dir).is_absolute():
        raise ConfigError(f"--run-dir={run_dir} must be an absolute path that every node can write to")
    _check_text(run_dir)
    if pip and image:
        raise ConfigError("--pip and --image exclude each other: put the packages into the image")
    if working_dir is not None and "://" not in working_dir and not Path(working_dir).exists():
        raise ConfigError(f"--working-dir={working_dir} does not exist; give a folder of this machine")
    folder = PurePosixPath(run_dir)
    given = _settings(overrides)
    for key in CLUSTERS_OWN:
        if given.get(key, "null") != "null":
            raise ConfigError(
                f"{key}={given[key]} is refused by a running cluster, which has its own number; remove this override"
            )
    defaults = {"trainer.default_local_dir": str(folder / "checkpoints"), "hydra.run.dir": str(folder / "hydra")}
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
    """Returns the request to print, without the values of `env`, which may be secrets."""
    hidden = {item.partition("=")[0]: "(hidden)" for item in env}
    runtime_env = job.runtime_env | {"env_vars": job.runtime_env["env_vars"] | hidden}
    return {"entrypoint": job.entrypoint, "runtime_env": runtime_env}


def _check_text(run_dir: str) -> None:
    if "$" in run_dir:  # Ray expands variables in the environment, OmegaConf interpolations in the overrides
        raise ConfigError(f"--run-dir={run_dir} must be the folder itself, without a $: Ray and Hydra would replace it")
    if run_dir.encode(errors="ignore").decode() != run_dir or "\0" in run_dir:
        raise ConfigError(f"--run-dir={printable(run_dir)} must be a path in UTF-8; choose another name")


def _settings(overrides: Sequence[str]) -> dict[str, str]:
    """Returns key -> value of the overrides, without Hydra's plus signs."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def _elsewhere(given: dict[str, str]) -> str:
    return ", ".join(f"{what} to {given[key]} ({key})" for key, what in PLACES.items() if key in given)


def _variable(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not key:
        raise ConfigError("--env needs a name: --env KEY=VALUE, or --env KEY for its value on this machine")
    if not equals:
        if key not in os.environ:
            raise ConfigError(f"--env {key} has no value on this machine; give one: --env {key}=VALUE")
        value = os.environ[key]
    if REFERENCE.search(value):
        raise ConfigError(
            f"--env {key}: its value has a $ before a name or a brace, which Ray would replace; set {key} on every "
            f"node before `ray start`, and leave out --env {key}"
        )
    return key, value


def connect(address: str) -> "JobSubmissionClient":
    """Returns the cluster's client. Uses this user's token if there is one, as `ray start` does.

    Raises:
        ConfigError: no job server answers at the address, or it requires a token that this machine lacks.
    """
    malformed = f"--address {address} is not a dashboard's address, which has the form http://HOST:8265"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(malformed)
    token = Path.home() / ".ray" / "auth_token"
    if "RAY_AUTH_MODE" not in os.environ and token.exists():
        os.environ["RAY_AUTH_MODE"] = "token"  # before Ray reads it
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise ConfigError(
            f"the Ray head at {address} requires a token: copy ~/.ray/auth_token of the machine that started it to "
            f"{token}, or set RAY_AUTH_TOKEN and RAY_AUTH_MODE=token"
        ) from error
    except ValueError as error:  # from requests and urllib3, for an impossible host or port
        raise ConfigError(malformed) from error
    except (ConnectionError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray head answers at {address}: start one with `ray start --head`, or give --address "
            f"({str(error).splitlines()[0]})"
        ) from error


def follow(client: "JobSubmissionClient", job_id: str) -> int:
    """Prints the job's log until the job ends; returns its driver's exit code. Ctrl-C leaves the job running."""
    try:
        asyncio.run(_print_log(client, job_id))
        return _exit_code(client, job_id)
    except KeyboardInterrupt:
        print(
            f"\nverl-ext submit: {job_id} keeps running. Watch it: `verl-ext submit logs {job_id} --follow`. Stop it: "
            f"`verl-ext submit stop {job_id}`",
            file=sys.stderr,
        )
        return INTERRUPTED


async def _print_log(client: "JobSubmissionClient", job_id: str) -> None:
    async for lines in client.tail_job_logs(job_id):
        print(lines, end="", flush=True)


def _exit_code(client: "JobSubmissionClient", job_id: str) -> int:
    while (info := client.get_job_info(job_id)).status not in DONE:  # the log ends a moment before the job
        time.sleep(POLL_S)
    print(f"verl-ext submit: {job_id} {info.status}: {_first_line(info.message)}", file=sys.stderr)
    if info.driver_exit_code is not None:
        return info.driver_exit_code
    return 0 if info.status == "SUCCEEDED" else 1


def stop_job(client: "JobSubmissionClient", job_id: str, patience_s: float = 60.0) -> str:
    """Stops the job and waits for it; returns its last status."""
    client.stop_job(job_id)
    deadline = time.monotonic() + patience_s
    while (status := client.get_job_info(job_id).status) not in DONE and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return str(status)


def rows(client: "JobSubmissionClient") -> list[tuple[str, ...]]:
    """Returns id, status, start, minutes and run folder of each of our jobs, the newest first."""
    found = [job for job in client.list_jobs() if RUN_DIR in (job.metadata or {})]
    found.sort(key=lambda job: job.start_time or 0, reverse=True)
    return [
        (
            job.submission_id or "",
            str(job.status),
            time.strftime("%Y-%m-%d %H:%M", time.localtime((job.start_time or 0) / 1000)),
            f"{((job.end_time or 1000 * time.time()) - (job.start_time or 0)) / 60000:.1f}",
            job.metadata[RUN_DIR],
        )
        for job in found
    ]


def _reported(run: Any, arguments: argparse.Namespace) -> int:
    try:
        return run(arguments)
    except RuntimeError as error:  # Ray's client raises it with the server's sentence
        raise UserError(str(error)) from error


def check_launch(overrides: Sequence[str]) -> None:
    """Refuses overrides that cannot be composed, names that verl does not have, and settings of stability that do not
    exist or cannot be parsed. With plugins, the job reads the latter.

    Rules that need the packages or files of the run are left to the job: it runs on other machines.

    Raises:
        ConfigError: it has a problem for each override that is refused.
    """
    composed, problems = compose(overrides, trust=True), Problems()
    problems.found += composed.problems
    if composed.config is not None:
        problems.found += errors_of(unknown_names(composed.config))
        if not plugins(composed.config):  # they may be only on the nodes
            with problems:
                stability_config(composed.config.stability)
    problems.raise_any()


def _run(arguments: argparse.Namespace) -> int:
    overrides, said, *_ = read_launch(arguments.overrides, os.environ, complete=True)
    check_launch(overrides)
    if said:
        print(f"verl-ext submit: {said}", file=sys.stderr)
    job = build_job(
        overrides,
        run_dir=arguments.run_dir,
        working_dir=arguments.working_dir,
        pip=arguments.pip,
        image=arguments.image,
        env=arguments.env,
    )
    if job.elsewhere:
        print(f"verl-ext submit: not in {arguments.run_dir}: {job.elsewhere}", file=sys.stderr)
    if arguments.dry_run:
        print(json.dumps(shown(job, arguments.env), indent=2))
        return 0
    return _submit(connect(arguments.address), job, arguments.id, arguments.detach)


def _submit(client: "JobSubmissionClient", job: Job, job_id: str | None, detach: bool) -> int:
    job_id = client.submit_job(
        entrypoint=job.entrypoint, runtime_env=job.runtime_env, metadata=job.metadata, submission_id=job_id
    )
    what = "everything else that" if job.elsewhere else "everything"
    folder = printable(job.metadata[RUN_DIR])  # `resume` has it from the cluster
    print(f"verl-ext submit: {job_id} submitted; {what} it writes goes to {folder}", file=sys.stderr)
    return 0 if detach else follow(client, job_id)


def _status(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    client = connect(arguments.address)
    found = [row for row in rows(client) if arguments.job in (None, row[0])]
    if arguments.job and not found:
        raise ConfigError(f"there is no run {arguments.job}; `verl-ext submit status` lists the runs")
    table = Table("job", "status", "started", "minutes", "run folder")
    for row in found:
        table.add_row(*(Text(printable(cell)) for cell in row))  # Text: brackets are no markup
    Console().print(table)
    if arguments.job and (message := client.get_job_info(arguments.job).message):
        for line in message.splitlines():
            print(printable(line, most=None))
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    client = connect(arguments.address)
    if arguments.follow:
        return follow(client, arguments.job)
    print(client.get_job_logs(arguments.job), end="")
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    status = stop_job(connect(arguments.address), arguments.job)
    print(f"verl-ext submit: {arguments.job} {status}", file=sys.stderr)
    return 0 if status in DONE else 1


def _resume(arguments: argparse.Namespace) -> int:
    client = connect(arguments.address)
    info = client.get_job_info(arguments.job)
    if RUN_DIR not in (info.metadata or {}):
        raise ConfigError(f"{arguments.job} was not submitted by verl-ext submit")
    if info.status not in DONE:
        raise ConfigError(f"{arguments.job} is {info.status}; stop it first: verl-ext submit stop {arguments.job}")
    # The cluster still has the working folder of the first submission, under the URI in runtime_env.
    job = Job(info.entrypoint, dict(info.runtime_env or {}), dict(info.metadata))
    return _submit(client, job, None, arguments.detach)


def _first_line(message: str | None) -> str:
    lines = [line for line in (message or "").splitlines() if line.strip()]
    return printable(lines[0]) if lines else ""


def override(key: str, value: str) -> str:
    """Returns `key=value`, quoted if Hydra would otherwise read the value as a list, number, null, function or sweep.

    Callers refuse a value with `${...}`. OmegaConf interpolates it even in quotes, and no escape survives: verl
    resolves its config in place, which undoes the escape, and reads it again.
    """
    return f"{key}={hydra_value(value)}"
