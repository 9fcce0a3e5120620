"""`verl-ext`: the command line of the plugin."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 when it worked, 2 with one line on stderr when the user has to act."""
    parser = argparse.ArgumentParser(
        prog="verl-ext", description="Tools around a verl run that uses the verl_ext plugin."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_report(commands)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def _add_report(commands) -> None:
    description = (
        "Print a table of a run's reward, engine mismatch, corrections, router agreement and skipped "
        "updates, and draw the same over the steps. The run must have `file` in trainer.logger."
    )
    parser = commands.add_parser(
        "report", help="a table and a figure from the metrics of a run", description=description
    )
    parser.add_argument(
        "path", metavar="RUN", type=Path, help="verl's metrics file (.jsonl), or a folder with exactly one"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report.png"), help="where the figure goes (default: %(default)s)"
    )
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    # Imported here, so that --help and the other commands do not wait for matplotlib and rich.
    from rich.console import Console

    from verl_ext.report.figure import write_figure
    from verl_ext.report.load import ReportError, load_run
    from verl_ext.report.summary import summary

    try:
        run = load_run(arguments.path)
        Console().print(summary(run))
        print(f" figure: {write_figure(run, arguments.out)}")
    except (ReportError, OSError) as error:
        print(f"verl-ext report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
