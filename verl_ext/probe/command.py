"""`verl-ext probe`: start the run's engines, have them score the same tokens, and say where they come apart."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_ext.doctor import composed
from verl_ext.errors import ConfigError, UserError
from verl_ext.printable import printable

SAID = "verl_ext: probe: "  # begins a line of the process that says how far it is
ERROR = "verl_ext: error: "

DESCRIPTION = """\
Before a run: what do its engines make of the same tokens, and where do they come apart? Starts them as the run would,
samples a few answers, has the rollout engine score them once more and the training engine twice, with its own routing
and with the rollout's, and compares hidden states layer by layer. No weight changes. Most of the time is the start.
"""
EPILOG = """\
exit code: 0; 1 where k3 is above --fail-above; 2 where it cannot be done.

examples:
  verl-ext probe recipe=qwen3_30b_a3b ...                      the overrides of a launch
  verl-ext probe --fail-above 1e-3 --json recipe=... > p.json  in CI, after an upgrade of an engine
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "probe",
        help="where do rollout and training come apart, before a run",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    composed.add_arguments(parser)
    parser.add_argument("--prompts", type=int, default=16, help="one answer each (default: %(default)s)")
    parser.add_argument("--fail-above", type=float, metavar="K3", help="exit with 1 where k3, in nats, is above this")
    parser.add_argument("--out", type=Path, default=Path(".probe"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where the gap is above what was asked for, 2 where it cannot be measured."""
    try:
        found = _probe(arguments)
    except UserError as error:
        line = " ".join(str(error).split())
        print(f"verl-ext probe: {printable(line, most=len(line))}", file=sys.stderr)
        return 2
    from verl_ext.probe.show import conclude, show

    told = conclude(found)
    if arguments.json:
        print(json.dumps({**found, "verdict": asdict(told)}, indent=2))
    else:
        show(found, told)
    return int(arguments.fail_above is not None and found["pairs"][0]["k3"] > arguments.fail_above)


def _probe(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.prompts < 1:
        raise ConfigError(f"--prompts={arguments.prompts} must be at least 1")
    config = composed.required(arguments)
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    file, console = out / "probe.json", out / "console.log"
    file.unlink(missing_ok=True)
    overrides = probe_overrides(config, arguments.prompts, out)
    command = [
        sys.executable,
        "-m",
        "verl_ext.probe.main",
        *composed.given(arguments),
        *overrides,
        f"+probe_out={file}",
    ]
    error = _follow(command, console)
    if not file.exists():
        raise ConfigError(error or f"the engines ended before anything was found; everything they said: {console}")
    return json.loads(file.read_text())


def probe_overrides(config: Any, prompts: int, out: Path) -> list[str]:
    """What turns a run into a probe of it, after its own overrides.

    Raises:
        ConfigError: the run's training engine is not one that is probed.
    """
    actor = config.actor_rollout_ref.actor
    if actor.strategy != "fsdp2":
        raise ConfigError(
            f"the probe reads the training engine of actor.strategy=fsdp2, and this run has {actor.strategy}"
        )
    if config.actor_rollout_ref.rollout.name != "vllm":
        raise ConfigError(f"the probe reads vLLM, and this run samples with {config.actor_rollout_ref.rollout.name}")
    rollout, trainer = "actor_rollout_ref.rollout", "trainer"
    overrides = [
        "stability.metrics=true",
        "stability.guard.rules=null",
        "stability.trajectories.per_step=0",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
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
    ]
    if experts_of(config):
        overrides += [
            "stability.router_agreement=true",
            "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3",
        ]
    return overrides


def experts_of(config: Any) -> int:
    """Experts that a token uses; 0 for a dense model, and one whose config this machine cannot read."""
    from verl_ext.launch.routing_checks import hf_config_of
    from verl_ext.routing.config_names import TOP_KS, first_of

    model = hf_config_of(config.actor_rollout_ref.model)
    return first_of(getattr(model, "text_config", None) or model, TOP_KS)


def _follow(command: list[str], console: Path) -> str:
    """Run it, its output in `console`, telling how far it is; the error that it ends with, if it says one."""
    from rich.console import Console

    error = ""
    with (
        console.open("w") as log,
        Console(stderr=True).status("starting Ray, vLLM and FSDP2") as status,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=os.environ
        ) as process,
    ):
        for line in process.stdout or ():
            log.write(line)
            if SAID in line:
                status.update(line.partition(SAID)[2].strip())
            if ERROR in line:
                error = line.partition(ERROR)[2].strip()
    return error
