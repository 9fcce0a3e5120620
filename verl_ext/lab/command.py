"""`verl-ext lab`. The code that computes and draws is imported when it is needed: --help must not wait for it."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.base.arguments import INTERRUPTED, add_command, add_own, names, positive
from verl_ext.base.errors import ConfigError
from verl_ext.base.printable import print_text, printable, wide_console

if TYPE_CHECKING:
    from verl_ext.lab.grid import Arm, GridCell, GridResult

SEEDS, VARIANTS = "5", "none,tis,icepop,kpop,mis,geo_mask,r3"
SOME_FAILED = 1  # exit code
WIDTH = 100  # if the output is not a terminal

LAB = """\
Test which method helps against a gap between the engines. The lab trains a mixture of experts small enough for a
laptop, once per method and seed, through the plugin's own code. Its rollout differs from the training engine in a way
that you choose (REGIME). The results are a table, a page with the curves (report.html) and all numbers (results.json).
The exact rollout is always included.
"""
EXAMPLES = """\
Each run is kept in OUT/VARIANT/seedN; `verl-ext report OUT/VARIANT/seedN` reports on it. After Ctrl-C, the same command
continues where it stopped. Runs whose settings have changed are repeated.

examples:
  verl-ext lab --list                                    list the regimes, what each imitates, and the variants
  verl-ext lab stale --seeds 5                           old weights in the rollout; the usual methods
  verl-ext lab stale --variants none,mis --seeds 5-9 lab.stale.lag=64
                                                         other seeds, twice the lag
  verl-ext lab stale+quantized --add both='stability=r3 stability.correction=icepop'
                                                         two gaps at once, and a combination of your own
  verl-ext lab quantized --plugins my_correction --add mine='stability.correction=my_correction'
"""


def add_lab_parser(commands: Any) -> None:
    brief = "compare methods against a gap between the engines, on a small model"
    again = "the same command continues"
    parser = add_command(commands, "lab", brief, LAB, EXAMPLES, codes="0; 1 if runs failed", again=again)
    parser.add_argument("regime", metavar="REGIME", nargs="?", help="a regime of --list, or several joined by +")
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", help="overrides of every run, as for verl_ext.main_ppo"
    )
    parser.add_argument(
        "--variants",
        type=names,
        default=names(VARIANTS),
        metavar="NAME,...",
        help=f"methods to compare (default: {VARIANTS})",
    )
    parser.add_argument(
        "--seeds",
        type=parse_seeds,
        default=parse_seeds(SEEDS),
        metavar="N",
        help=f"number of seeds, or seeds such as 3-7 or 0,2 (default: {SEEDS})",
    )
    add_own(parser, "a variant")
    parser.add_argument("--list", action="store_true", help="print the regimes and the variants, and exit")
    parser.add_argument("--steps", type=positive, metavar="N", help="steps per run (default: 300)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="runs at a time (default: one per core)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default: .lab/REGIME)")
    parser.add_argument(
        "--plugins",
        type=names,
        default=(),
        metavar="MODULE,...",
        help="modules to import first; they register your own methods",
    )
    parser.add_argument("--no-page", action="store_true", help="print the table and write results.json, but no page")
    parser.add_argument("--json", action="store_true", help="print results.json instead of the table")
    parser.set_defaults(run=run_lab)


def run_lab(arguments: argparse.Namespace) -> int:
    """Runs the experiment and shows it. Returns the exit code."""
    from verl_ext.features.stability import import_plugins

    import_plugins("--plugins", arguments.plugins)
    if arguments.list:
        return _list_names()
    from rich.console import Console

    from verl_ext.lab.grid import cells_of, run_missing

    cells = cells_of(_checked_arms(arguments), arguments.seeds)
    out = arguments.out or Path(".lab") / arguments.regime
    result = run_missing(cells, out, arguments.jobs, Console(stderr=True))
    _show_result(arguments, cells, out, result)
    return INTERRUPTED if result.interrupted else SOME_FAILED if result.failed else 0


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parses `5` as the seeds 0 to 4, and `3-7` and `0,2` as these seeds; both can be mixed."""
    if re.fullmatch(r"[1-9]\d{0,5}", text):
        return tuple(range(int(text)))
    seeds: dict[int, None] = {}
    for part in text.split(","):
        if not (found := re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)):
            raise argparse.ArgumentTypeError(
                f"{printable(text)} must be a number of seeds, or seeds such as 3-7 or 0,2"
            )
        seeds |= dict.fromkeys(range(int(found[1]), int(found[2] or found[1]) + 1))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{printable(text)} has no seed")
    return tuple(seeds)


def _list_names() -> int:
    from rich.table import Table

    from verl_ext.lab.arms import variants
    from verl_ext.lab.regimes import REGIMES

    table = Table.grid(padding=(0, 0, 0, 2))
    table.add_row("exact", "a rollout without a gap; always part of an experiment")
    for name, regime in REGIMES.items():
        table.add_row(name, regime.stands_for)
    console = wide_console()
    console.print("regimes (join several by +)", table, sep="\n")
    print_text(console, f"variants: {', '.join(variants())}")
    return 0


def _checked_arms(arguments: argparse.Namespace) -> "list[Arm]":
    """Returns the exact rollout and the variants, with checked settings."""
    from verl_ext.lab.arms import arms_of

    if not arguments.regime:
        raise ConfigError("REGIME is missing; `verl-ext lab --list` lists the regimes")
    added = dict(arguments.add)
    if twice := [name for name in added if name in (*arguments.variants, "exact")]:
        raise ConfigError(f"--add {twice[0]}: a variant has this name already", otherwise="choose another name")
    plugins = (f"stability.plugins=[{','.join(arguments.plugins)}]",) if arguments.plugins else ()
    return arms_of(arguments.regime, arguments.variants, added, (*plugins, *arguments.overrides), arguments.steps)


def _show_result(arguments: argparse.Namespace, cells: "Sequence[GridCell]", out: Path, result: "GridResult") -> None:
    """Prints the table, or its JSON; writes results.json and the page if the grid is complete."""
    from rich.console import Console

    from verl_ext.lab.summary import collect_variants
    from verl_ext.lab.table import Experiment, results_text, write_results
    from verl_ext.report.command import drawing, tell

    variants = collect_variants(cells, out, result.failed)
    if not any(variant.runs for variant in variants):
        return
    seeds = list(dict.fromkeys(cell.seed for cell in cells))
    about = {"regime": arguments.regime, "steps": cells[0].steps, "seeds": seeds, "complete": not result.interrupted}
    experiment = Experiment(variants)
    results = experiment.results(about)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    if arguments.json:
        print(results_text(results))
    else:
        console.print(experiment)
    if result.interrupted:
        print("interrupted: the same command continues with the missing runs", file=sys.stderr)
        return
    written = {"numbers": write_results(results, out)}
    if not arguments.no_page:
        from verl_ext.lab.figures import write_lab_page

        title = f"The lab: {arguments.regime}"
        about_runs = f"{len(variants)} variants, {len(seeds)} seeds, {cells[0].steps} steps each"
        with drawing(console) as progress:
            written["page"] = write_lab_page(title, about_runs, experiment, out, progress)
    if not arguments.json:
        for name, file in written.items():
            tell(console, name, file)
