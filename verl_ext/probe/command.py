"""`verl-ext probe`: starts a run's engines, lets both score the same tokens, and finds where they diverge."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_ext.base.arguments import add_command, add_own, names, positive
from verl_ext.base.errors import ConfigError
from verl_ext.features.settings import FORMATS
from verl_ext.launch.command_line import add_arguments, given_arguments, required_config
from verl_ext.launch.files import file_problems
from verl_ext.probe.engines import Tell, kept_result, start_engines
from verl_ext.probe.overrides import probe_overrides
from verl_ext.probe.sweep import ALL, LAUNCH, LAYERS, NAMES, SettingChange, SweepResult, changes_of, with_change

FAILED = 1  # exit code

DESCRIPTION = """\
Compares a run's rollout engine with its training engine before the run. Starts both as the run would and samples a few
answers. The rollout engine scores the answers once more; the training engine scores them with its own routing, with the
rollout's routing, and with several answers in one pass. Hidden states are compared layer by layer. The scores are
repeated after a weight sync and after an update with made-up advantages, which is not kept. Most of the time is spent
on starting the engines.
"""
EPILOG = f"""\
settings of --sweep (`all` means all that fit the run):
  {", ".join(NAMES[:9])},
  {", ".join(NAMES[9:])}
--sweep {LAYERS} rounds one group of the rollout's weights at a time, within one start: which layers to keep in 16 bits

examples:
  verl-ext probe recipe=qwen3_30b_a3b ...                      the overrides of a launch
  verl-ext probe --fail-above 1e-3 --json recipe=... > p.json  in CI, after an upgrade of an engine
  verl-ext probe --sweep all recipe=...                        find the setting that the gap depends on; one start each
  verl-ext probe --sweep fp32 --add graphs_off='actor_rollout_ref.rollout.enforce_eager=true' recipe=...
"""


def add_probe_parser(commands: Any) -> None:
    brief = "find where rollout and training differ, before a run"
    codes = "0; with --fail-above, 1 if k3 is above the limit or a value is NaN or infinite"
    again = "the same command continues with a sweep's next setting"
    parser = add_command(commands, "probe", brief, DESCRIPTION, EPILOG, codes=codes, again=again)
    add_arguments(parser)
    parser.add_argument(
        "--prompts",
        type=positive,
        default=16,
        help="prompts, with one answer each (default: %(default)s), rounded up to the training ranks",
    )
    parser.add_argument(
        "--batches",
        type=positive,
        default=1,
        help="batches to score before the update (default: %(default)s); from 4 on, the probe reports whether the gap "
        "grows while the weights stay the same",
    )
    parser.add_argument(
        "--sweep", type=names, default=(), metavar="NAME,...", help=f"settings to change one at a time, or {ALL}"
    )
    add_own(parser, "a setting to sweep")
    parser.add_argument(
        "--format", choices=FORMATS[1:], default="fp8", help=f"what --sweep {LAYERS} rounds to (default: %(default)s)"
    )
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
    """Returns 0; 1 if the gap is above --fail-above or not finite."""
    found = _find_gap(arguments)
    from verl_ext.probe.verdict import ProbeResult, print_probe

    result = ProbeResult.read(found)
    if arguments.json:
        print(json.dumps({**found, "verdict": result.as_json()}, indent=2))
    else:
        print_probe(result)
    if not arguments.no_page:
        from verl_ext.probe.page import write_probe_page

        page = write_probe_page(result, arguments.out)
        print(f"page: {page}", file=sys.stderr if arguments.json else sys.stdout)
    return 0 if arguments.fail_above is None or result.agrees(arguments.fail_above) else FAILED


def _find_gap(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the measurements, with the key "sweep" if settings were swept."""
    from rich.console import Console

    config = required_config(arguments)
    if missing := [*file_problems(config)]:  # before anything asks for a model on the Hub
        raise ConfigError.of(missing)
    out, given = arguments.out.absolute(), given_arguments(arguments)
    console = Console(stderr=True)
    changes = changes_of(config, arguments.sweep, dict(arguments.add)) if arguments.sweep or arguments.add else []

    def measure(name: str, overrides: Sequence[str], folder: Path, tell: Tell) -> dict[str, Any]:
        rounds_to = arguments.format if LAYERS in arguments.sweep and name == LAUNCH else ""
        whole = [*overrides, *probe_overrides(config, arguments.prompts, folder, arguments.batches, rounds_to)]
        found = kept_result(whole, folder) if changes else None
        if found is None:
            return start_engines(whole, folder, tell)
        console.print(f"{name}: done already, in {folder}", highlight=False, markup=False, soft_wrap=True)
        return found

    with console.status("starting Ray and the engines") as status:
        if not changes:
            return measure(LAUNCH, given, out, status.update)
        return _measure_changes(given, changes, out, measure, status.update)


def _measure_changes(
    given: Sequence[str],
    changes: Sequence[SettingChange],
    out: Path,
    measure: Callable[..., dict[str, Any]],
    tell: Tell,
) -> dict[str, Any]:
    """Measures the launch as it is, then with each change."""
    count, seconds = len(changes) + 1, list[float]()

    def progress_of(name: str) -> Tell:
        mean = sum(seconds) / len(seconds) if seconds else 0.0
        left = f", about {mean * (count - len(seconds)) / 60:.0f} min left" if mean else ""
        start = f"{len(seconds) + 1} of {count}{left}: {name}"
        tell(f"{start}: starting")
        return lambda said: tell(f"{start}: {said}")

    found = measure(LAUNCH, given, out, progress_of(LAUNCH))
    seconds.append(found.get("seconds", 0.0))
    swept = [_result_of("", (), found)]
    for change in changes:
        try:
            one = measure(
                change.name, with_change(given, change), out / "sweep" / change.name, progress_of(change.name)
            )
        except ConfigError as error:
            swept.append(SweepResult(change.name, change.overrides, error=str(error)))
        else:
            swept.append(_result_of(change.name, change.overrides, one))
        seconds.append(swept[-1].seconds)
    return {**found, "sweep": [asdict(one) for one in swept]}


def _result_of(name: str, overrides: tuple[str, ...], found: Mapping[str, Any]) -> SweepResult:
    from verl_ext.probe.verdict import ProbeResult

    result, seconds = ProbeResult.read(found), found.get("seconds", 0.0)
    if not result.has("probe_values.finite"):  # k3 over only the finite tokens is not comparable
        return SweepResult(name, overrides, seconds=seconds, error=result.found["probe_values"].text)
    whole, sampling, rest = result.pairs[:3]  # in the order of probed.PAIRS
    assert whole.k3 is not None and whole.k3_error is not None and sampling.k3 is not None and rest.k3 is not None
    return SweepResult(name, overrides, whole.k3, whole.k3_error, sampling.k3, rest.k3, seconds)
