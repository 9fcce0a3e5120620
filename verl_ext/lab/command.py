"""`verl-ext lab`. What computes and draws is imported when it is needed: --help must not wait for it."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.errors import ConfigError
from verl_ext.lab.arguments import add_common, answered, plugin_overrides, seeds
from verl_ext.launch.arguments import add_own, names

if TYPE_CHECKING:
    from verl_ext.lab.arms import Arm

SEEDS, VARIANTS = "5", "none,tis,icepop,kpop,mis,geo_mask,r3"

LAB = """\
Which method helps against which gap: train a mixture of experts small enough for a laptop, with a rollout that differs
from the training engine in a way of your choice, once with each method and seed, through the plugin's own code. It ends
in a table, a page with the curves (report.html) and all numbers (results.json); the exact rollout is always part of it.
"""
EXAMPLES = """\
Each run stays in OUT/VARIANT/seedN, of which `verl-ext report OUT/VARIANT/seedN` makes a report. After Ctrl-C, the same
command goes on where it stopped; runs whose settings have changed run again.

exit code: 0, or 1 where runs failed; 2 for wrong usage and settings that cannot work; 130 after Ctrl-C.

examples:
  verl-ext lab --list                                    the regimes, what each stands for, the variants
  verl-ext lab stale --seeds 5                           old weights in the rollout; the usual methods
  verl-ext lab stale --variants none,mis --seeds 5-9 lab.stale.lag=64
                                                         other seeds, twice the lag
  verl-ext lab stale+quantized --add both='stability=r3 stability.correction=icepop'
                                                         two gaps at once, and a composition of one's own
  verl-ext lab quantized --plugins my_correction --add mine='stability.correction=my_correction'
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "lab",
        help="which method helps against which gap, tried on a small model",
        description=LAB,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("regime", metavar="REGIME", nargs="?", help="of --list, or several with + between them")
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="of every run, as given to verl_ext.main_ppo")
    parser.add_argument(
        "--variants", type=names, default=names(VARIANTS), metavar="NAME,...", help=f"default: {VARIANTS}"
    )
    parser.add_argument(
        "--seeds", type=seeds, default=seeds(SEEDS), metavar="N", help=f"so many, or 3-7, or 0,2 (default: {SEEDS})"
    )
    add_own(parser, "a variant")
    parser.add_argument("--list", action="store_true", help="print the regimes and the variants")
    add_common(parser, out=".lab/REGIME")
    parser.set_defaults(run=partial(answered, "lab", _run))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return _list()
    from rich.console import Console

    from verl_ext.lab.cells import cells_of
    from verl_ext.lab.runs import make_runs
    from verl_ext.lab.show import show, status_of
    from verl_ext.report.command import errors_are_one_line

    arms = _arms(arguments)
    cells = cells_of(arms, arguments.seeds)
    out = arguments.out or Path(".lab") / arguments.regime
    with errors_are_one_line("lab") as outcome:
        followed = make_runs(cells, out, arguments.jobs, Console(stderr=True))
        show(arguments, arms, cells, out, followed)
        return status_of(followed)
    return outcome.status


def _arms(arguments: argparse.Namespace) -> "list[Arm]":
    """Of the exact rollout, and of the variants; their settings are checked."""
    from verl_ext.lab.arms import arms_of

    if not arguments.regime:
        raise ConfigError("which REGIME? verl-ext lab --list names them")
    added = dict(arguments.add)
    if twice := [name for name in added if name in (*arguments.variants, "exact")]:
        raise ConfigError(f"--add {twice[0]}: there is a variant of this name", otherwise="choose another name")
    overrides = (*plugin_overrides(arguments), *arguments.overrides)
    return arms_of(arguments.regime, arguments.variants, added, overrides, arguments.steps)


def _list() -> int:
    from verl_ext.lab.arms import variants
    from verl_ext.lab.regimes import REGIMES

    width = max(map(len, REGIMES))
    print("regimes; several with + between them")
    print(f"  {'exact':{width}}  a rollout that differs in nothing; always part of it")
    for name, regime in REGIMES.items():
        print(f"  {name:{width}}  {regime.stands_for}")
    print(f"variants\n  {', '.join(variants())}")
    return 0
