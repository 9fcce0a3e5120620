"""`verl-ext lab`. What computes and draws is imported when it is needed: --help must not wait for it."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.errors import ConfigError, UserError
from verl_ext.printable import printable

if TYPE_CHECKING:
    from verl_ext.lab.arms import Arm
    from verl_ext.lab.cells import Cell
    from verl_ext.lab.follow import Followed

SEEDS, VARIANTS = "5", "none,tis,icepop,kpop,mis,geo_mask,r3"
SOME_FAILED, REFUSED, INTERRUPTED = 1, 2, 130
WIDTH = 100  # where the output is not a terminal
NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")

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
        "--variants", type=_names, default=_names(VARIANTS), metavar="NAME,...", help=f"default: {VARIANTS}"
    )
    parser.add_argument(
        "--seeds", type=_seeds, default=_seeds(SEEDS), metavar="N", help=f"so many, or 3-7, or 0,2 (default: {SEEDS})"
    )
    parser.add_argument("--steps", type=_count, metavar="N", help="of a run (default: 300)")
    parser.add_argument("--jobs", type=_count, metavar="N", help="runs at a time (default: one a core)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: .lab/REGIME")
    parser.add_argument(
        "--add",
        type=_added,
        action="append",
        default=[],
        metavar="NAME='OVERRIDES'",
        help="a variant of your own; may be repeated",
    )
    parser.add_argument(
        "--plugins",
        type=_names,
        default=(),
        metavar="MODULE,...",
        help="modules to import first, which register methods of your own",
    )
    parser.add_argument("--list", action="store_true", help="print the regimes and the variants")
    parser.add_argument("--no-page", action="store_true", help="the table and results.json alone")
    parser.add_argument("--json", action="store_true", help="print results.json in place of the table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        _import(arguments.plugins)
        return _list() if arguments.list else _run(arguments)
    except UserError as error:
        print(f"verl-ext lab: {printable(' '.join(str(error).split()), 4000)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:  # before the first run, or while the page is drawn
        print("verl-ext lab: interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from verl_ext.lab.arms import run_arm, setup_of
    from verl_ext.lab.cells import Cell, left_to_do
    from verl_ext.lab.follow import follow
    from verl_ext.lab.grid import run_grid
    from verl_ext.report.command import errors_are_one_line

    arms = _arms(arguments)
    steps = setup_of(arms[0], 0).config.trainer.total_training_steps
    out = arguments.out or Path(".lab") / arguments.regime
    cells = [Cell(arm, seed, steps) for seed in arguments.seeds for arm in arms]
    told = Console(stderr=True)
    with errors_are_one_line("lab") as outcome:
        out.mkdir(parents=True, exist_ok=True)
        left, changed = left_to_do(cells, out)
        for name, keys in changed.items():
            told.print(f"{name} runs again: changed since are {', '.join(keys)}", highlight=False, markup=False)
        if done := len(cells) - len(left):
            told.print(f"{done} of {len(cells)} runs are done already, in {out}", highlight=False, markup=False)
        jobs = arguments.jobs or len(os.sched_getaffinity(0))
        with closing(run_grid(left, out, run_arm, jobs)) as events:
            followed = follow(events, len(left), len(cells), steps, told)
        _show(arguments, arms, cells, out, followed)
        if followed.interrupted:
            told.print("interrupted: the same command goes on with what is not done yet")
            return INTERRUPTED
        return SOME_FAILED if followed.failed else 0
    return outcome.status


def _show(
    arguments: argparse.Namespace, arms: "Sequence[Arm]", cells: "Sequence[Cell]", out: Path, followed: "Followed"
) -> None:
    """The table, or its JSON; the page of a grid that has come to its end."""
    from rich.console import Console

    from verl_ext.lab.collect import collect
    from verl_ext.lab.results import as_text, results, write_results
    from verl_ext.lab.table import table
    from verl_ext.lab.words import findings
    from verl_ext.report.command import drawing, tell

    variants, runs = collect(arms, cells, out, followed.failed)
    if not any(variant.runs for variant in variants):
        return
    words = findings(variants)
    about = {"regime": arguments.regime, "steps": cells[0].steps, "seeds": list(arguments.seeds)}
    found = results(about | {"complete": not followed.interrupted}, variants, words)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    if arguments.json:
        print(as_text(found))
    else:
        console.print(table(variants, words))
    if followed.interrupted:
        return
    written = {"numbers": write_results(found, out)}
    if not arguments.no_page:
        from verl_ext.lab.page import write_lab_page

        title = f"The lab: {arguments.regime}"
        stand = f"{len(variants)} variants, {len(arguments.seeds)} seeds, {cells[0].steps} steps each"
        with drawing(console) as progress:
            written["page"] = write_lab_page(title, stand, variants, runs, words, out, progress)
    if not arguments.json:
        for name, file in written.items():
            tell(console, name, file)


def _arms(arguments: argparse.Namespace) -> "list[Arm]":
    """Of the exact rollout, and of the variants; their settings are checked."""
    from verl_ext.lab.arms import arms_of

    if not arguments.regime:
        raise ConfigError("which REGIME? verl-ext lab --list names them")
    added = dict(arguments.add)
    if twice := [name for name in added if name in (*arguments.variants, "exact")]:
        raise ConfigError(f"--add {twice[0]}: there is a variant of this name", otherwise="choose another name")
    plugins = (f"stability.plugins=[{','.join(arguments.plugins)}]",) if arguments.plugins else ()
    return arms_of(arguments.regime, arguments.variants, added, (*plugins, *arguments.overrides), arguments.steps)


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


def _import(modules: Sequence[str]) -> None:
    from importlib import import_module

    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(f"--plugins: {module} cannot be imported ({error})") from error


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if wrong := [name for name in names if not NAME.fullmatch(name)]:
        raise argparse.ArgumentTypeError(f"{printable(wrong[0])!r} is no name; names are parted by commas")
    return names


def _added(text: str) -> tuple[str, str]:
    name, equals, overrides = text.partition("=")
    if not equals or not NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{printable(text)} is not NAME='OVERRIDES'")
    return name, overrides


def _seeds(text: str) -> tuple[int, ...]:
    """`5` is 0 to 4; `3-7` and `0,2` are seeds by themselves, and can stand together."""
    if re.fullmatch(r"[1-9]\d{0,5}", text):
        return tuple(range(int(text)))
    seeds: dict[int, None] = {}
    for part in text.split(","):
        if not (found := re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)):
            raise argparse.ArgumentTypeError(f"{printable(text)} is neither a number of seeds, nor 3-7, nor 0,2")
        seeds |= dict.fromkeys(range(int(found[1]), int(found[2] or found[1]) + 1))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{printable(text)} holds no seed")
    return tuple(seeds)


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"{printable(text)} is not a whole number above 0, and below a billion")
    return int(text)
