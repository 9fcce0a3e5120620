"""`verl-ext probe`: start the run's engines, have them score the same tokens, and say where they come apart."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_ext.doctor import composed
from verl_ext.errors import ConfigError, UserError
from verl_ext.launch.arguments import INTERRUPTED, REFUSED, add_own, names
from verl_ext.printable import printable
from verl_ext.probe import process
from verl_ext.probe.sweep import ALL, NAMES, Change, Swept, changed, changes_of

FAILED = 1

DESCRIPTION = """\
Before a run: what do its engines make of the same tokens, and where do they come apart? Starts them as the run would,
samples a few answers, has the rollout engine score them once more and the training engine twice, with its own routing
and with the rollout's, and compares hidden states layer by layer; then the same after a weight sync and after an
update with made-up advantages, of which nothing is kept. Most of the time is the start.
"""
EPILOG = f"""\
settings of --sweep, of which `all` takes those that fit the run:
  {", ".join(NAMES[:9])},
  {", ".join(NAMES[9:])}

exit code: 0; with --fail-above, 1 where k3 is above it or a value is NaN or infinite; 2 where it cannot be done; 130
after Ctrl-C: a sweep goes on then.

examples:
  verl-ext probe recipe=qwen3_30b_a3b ...                      the overrides of a launch
  verl-ext probe --fail-above 1e-3 --json recipe=... > p.json  in CI, after an upgrade of an engine
  verl-ext probe --sweep all recipe=...                        which setting the gap depends on; a start for each
  verl-ext probe --sweep fp32 --add graphs_off='actor_rollout_ref.rollout.enforce_eager=true' recipe=...
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
    parser.add_argument(
        "--sweep", type=names, default=(), metavar="NAME,...", help=f"settings to change one at a time, or {ALL}"
    )
    add_own(parser, "a setting to sweep")
    parser.add_argument(
        "--fail-above", type=float, metavar="K3", help="exit with 1 where k3, in nats, is above this or NaN"
    )
    parser.add_argument("--out", type=Path, default=Path(".probe"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--no-page", action="store_true", help="the tables and the JSON alone")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where the gap is above what was asked for or not finite, 2 where it cannot be measured."""
    try:
        found = _probe(arguments)
    except UserError as error:
        line = " ".join(str(error).split())
        print(f"verl-ext probe: {printable(line, most=len(line))}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("verl-ext probe: interrupted; the same command goes on with a sweep's next setting", file=sys.stderr)
        return INTERRUPTED
    from verl_ext.probe.show import agrees, conclude, show

    told = conclude(found)
    if arguments.json:
        print(json.dumps({**found, "verdict": asdict(told)}, indent=2))
    else:
        show(found, told)
    if not arguments.no_page:
        from verl_ext.probe.page import write_probe_page

        page = write_probe_page(found, told, arguments.out)
        print(f"page: {page}", file=sys.stderr if arguments.json else sys.stdout)
    return 0 if arguments.fail_above is None or agrees(found, told, arguments.fail_above) else FAILED


def _probe(arguments: argparse.Namespace) -> dict[str, Any]:
    """What process.start found; with "sweep" where one was asked for."""
    from rich.console import Console

    if arguments.prompts < 1:
        raise ConfigError(f"--prompts={arguments.prompts} must be at least 1")
    config = composed.required(arguments)
    out, given = arguments.out.absolute(), composed.given(arguments)
    console = Console(stderr=True)
    changes = changes_of(config, arguments.sweep, dict(arguments.add)) if arguments.sweep or arguments.add else []
    with console.status("starting Ray, vLLM and FSDP2") as status:
        if not changes:
            return process.start([*given, *probe_overrides(config, arguments.prompts, out)], out, status.update)

        def look(name: str, overrides: Sequence[str], folder: Path, tell: process.Tell) -> dict[str, Any]:
            whole = [*overrides, *probe_overrides(config, arguments.prompts, folder)]
            found = process.kept(whole, folder)
            if found is not None:
                console.print(f"{name}: done already, in {folder}", highlight=False, markup=False, soft_wrap=True)
                return found
            return process.start(whole, folder, tell)

        return _sweep(given, changes, out, look, status.update)


def _sweep(
    given: Sequence[str], changes: Sequence[Change], out: Path, look: Callable[..., dict[str, Any]], tell: process.Tell
) -> dict[str, Any]:
    """The launch as it is, then with each change."""
    count, seconds = len(changes) + 1, list[float]()

    def telling(name: str) -> process.Tell:
        mean = sum(seconds) / len(seconds) if seconds else 0.0
        left = f", about {mean * (count - len(seconds)) / 60:.0f} min left" if mean else ""
        tell(f"{len(seconds) + 1} of {count}{left}: {name}: starting")
        return lambda said: tell(f"{len(seconds) + 1} of {count}{left}: {name}: {said}")

    found = look("the launch as it is", given, out, telling("the launch as it is"))
    seconds.append(found.get("seconds", 0.0))
    swept = [_swept("", (), found)]
    for change in changes:
        try:
            one = look(change.name, changed(given, change), out / "sweep" / change.name, telling(change.name))
        except ConfigError as error:
            swept.append(Swept(change.name, change.overrides, error=str(error)))
        else:
            swept.append(_swept(change.name, change.overrides, one))
        seconds.append(swept[-1].seconds)
    return {**found, "sweep": [asdict(one) for one in swept]}


def _swept(name: str, overrides: tuple[str, ...], found: Mapping[str, Any]) -> Swept:
    from verl_ext.probe.show import conclude
    from verl_ext.probe.verdict import NOT_FINITE

    told = conclude(found)
    if told.cause == NOT_FINITE:  # k3 over what is left of the tokens is not compared with k3 over all
        return Swept(name, overrides, seconds=found.get("seconds", 0.0), error=told.sentence)
    k3 = {(pair["one"], pair["other"]): pair for pair in found["pairs"]}
    whole = k3["decode", "train"]
    return Swept(
        name,
        overrides,
        whole["k3"],
        whole["k3_error"],
        k3["decode", "prefill"]["k3"],
        k3["prefill", "train"]["k3"],
        found.get("seconds", 0.0),
    )


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
