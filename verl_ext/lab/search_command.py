"""`verl-ext lab search`."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.errors import ConfigError
from verl_ext.lab.arguments import add_common, answered, plugin_overrides, seeds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from verl_ext.lab.cells import Cell
    from verl_ext.lab.search import Standing

SEEDS, CONFIRM = "3", "10-14"
SHOWN = 12
NONE, WINNER = "none", "winner"

SEARCH = """\
Which settings help most against a gap: every combination of the values that are swept runs on one seed, the better half
of them on one more, and so on. The winner has been picked among many, so it then runs on seeds that it was not picked
on, beside the exact rollout and the run without any method: that table says what it is worth.
"""
EXAMPLES = """\
Values are swept as by Hydra's --multirun: KEY=A,B or KEY=range(1,4). Where nothing is swept, what is searched is
  {space}

examples:
  verl-ext lab search stale
  verl-ext lab search stale 'stability.correction=[icepop,geo_mask]' stability.geo_mask.low=0.8,0.9,0.95 \\
    stability.geo_mask.high=1.05,1.1,1.25
  verl-ext lab search quantized+bf16 --seeds 4 --confirm 10-17 actor_rollout_ref.actor.optim.lr=3e-3
"""
SPACE = ("stability=none,r3", "stability.correction=null,tis,tis_sequence,mis,icepop,[icepop,geo_mask]")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "lab search",
        prog="verl-ext lab search",
        description=SEARCH,
        epilog=EXAMPLES.format(space=" ".join(SPACE)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("regime", metavar="REGIME", help="of `verl-ext lab --list`, or several with + between them")
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="swept, or of every run")
    parser.add_argument(
        "--seeds", type=seeds, default=seeds(SEEDS), metavar="N", help=f"to choose on, as in lab (default: {SEEDS})"
    )
    parser.add_argument(
        "--confirm", type=seeds, default=seeds(CONFIRM), metavar="N", help=f"other seeds (default: {CONFIRM})"
    )
    add_common(parser, out=".lab/search/REGIME")
    parser.set_defaults(run=partial(answered, "lab search", _run))


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from verl_ext.lab.arms import arms_of
    from verl_ext.lab.cells import Cell, cells_of
    from verl_ext.lab.collect import collect
    from verl_ext.lab.runs import make_runs
    from verl_ext.lab.search import halving
    from verl_ext.lab.show import console_of, show, status_of
    from verl_ext.lab.space import candidates
    from verl_ext.report.command import errors_are_one_line

    if both := sorted({*arguments.seeds} & {*arguments.confirm}):
        raise ConfigError(f"--confirm: seed {both[0]} is one of --seeds", otherwise="confirm on others")
    points, common = candidates(arguments.overrides, SPACE)
    common = (*plugin_overrides(arguments), *common)
    arms = {arm.name: arm for arm in arms_of(arguments.regime, (), points, common, arguments.steps)}
    out = arguments.out or Path(".lab") / "search" / arguments.regime
    told = Console(stderr=True)
    failed: dict[Cell, str] = {}
    ended: dict[str, str] = {}  # by candidate

    def rewards(names: Sequence[str], seed: int) -> dict[str, float]:
        these = [arms[name] for name in names]
        cells = cells_of(these, [seed])
        told.print(f"seed {seed}: {len(cells)} candidates", highlight=False)
        followed = make_runs(cells, out, arguments.jobs, told)
        if followed.interrupted:
            raise KeyboardInterrupt
        failed.update(followed.failed)
        variants, _ = collect(these, cells, out, followed.failed)
        for variant in variants:
            for step in variant.stopped.values():
                ended[variant.name] = f"the guard ended it at step {step} of seed {seed}"
                told.print(f"out: {variant.name}: {ended[variant.name]}", highlight=False, markup=False, soft_wrap=True)
        return {variant.name: final for variant in variants if (final := variant.of("final").get(seed)) is not None}

    with errors_are_one_line("lab search") as outcome:
        standings = halving(list(points), arguments.seeds, rewards)
        if not standings:
            raise ConfigError(_nothing_left(failed, ended))
        winner = points[standings[0].name]
        if not arguments.json:
            console_of().print(_table(standings, points))
        confirmed = arms_of(arguments.regime, (NONE,), {WINNER: winner}, common, arguments.steps)
        cells = cells_of(confirmed, arguments.confirm)
        told.print(
            f"the winner on seeds that it was not picked on: {winner}", highlight=False, markup=False, soft_wrap=True
        )
        followed = make_runs(cells, out / "confirmed", arguments.jobs, told)
        search = [{"overrides": points[each.name], "rewards": each.rewards} for each in standings]
        show(arguments, confirmed, cells, out / "confirmed", followed, winner=winner, search=search)
        return status_of(followed)
    return outcome.status


def _nothing_left(failed: "Mapping[Cell, str]", ended: Mapping[str, str]) -> str:
    if failed:
        ended_too = " or was ended by the guard" if ended else ""
        return f"every candidate failed{ended_too}; the first: {next(iter(failed.values()))}"
    name, why = next(iter(ended.items()))
    return (
        f"the guard ended every candidate early, which leaves nothing to compare; the first, {name}: {why}; search "
        "without the rules that stop a run, as with stability.batch_skip.threshold=null"
    )


def _table(standings: "Sequence[Standing]", points: dict[str, str]) -> "RenderableType":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for title, side in (("final reward", "right"), ("seeds", "right"), (" settings", "left")):
        drawn.add_column(title, justify=side, overflow="fold")
    for each in standings[:SHOWN]:
        settings = Text(f" {points[each.name]}")  # in which brackets are no markup
        drawn.add_row(f"{each.mean:.2f}", str(len(each.rewards)), settings)
    if len(standings) > SHOWN:
        drawn.caption = f"and {len(standings) - SHOWN} more: results.json"
    return drawn
