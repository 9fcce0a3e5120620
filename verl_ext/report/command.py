"""`verl-ext report` and `verl-ext compare`. What draws is imported when it is needed: --help must not wait for it."""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from verl_ext.report.page import Progress
    from verl_ext.report.run import Run
    from verl_ext.report.verdict import Verdict

TRAJECTORIES = "trajectories.html"
EVERY = 15  # seconds between two looks at a run that goes on
FAILED = 2  # the status of a command that could not do what was asked

RUN_HELP = (
    "verl's metrics file (.jsonl), a TensorBoard folder, a CSV export of W&B, or a folder that holds one of these; the "
    "guard's events and dumped trajectories beside it are read too"
)
REPORT = """\
Say what a run's metrics mean, and draw them: a verdict and a table here, and a folder with one HTML page that needs no
network, the same figures as PNG, and, where the run wrote trajectories, a page of those. Works on any run of verl; what
it could not draw for want of a setting, the page says.
"""
REPORT_EXAMPLES = """\
examples:
  verl-ext report verl_ext/qwen3_30b_a3b.jsonl       the page goes to report/report.html
  verl-ext report tensorboard_log/verl_ext/my_run --out my_report
  verl-ext report RUN --watch                        again every 15 s, until Ctrl-C; the page reloads itself
"""
COMPARE = """\
Put runs side by side: a table of final values that tells which differences from the first run are more than the noise
between steps, and a page with every figure of the report for all of them.
"""
COMPARE_EXAMPLES = """\
examples:
  verl-ext compare bf16.jsonl fp16.jsonl
  verl-ext compare base.jsonl icepop.jsonl r3.jsonl --metric rollout_corr/kl --window 50
"""


def add_parsers(commands) -> None:
    report = _add(
        commands, "report", "what a run's metrics say: a verdict, a table, a page of figures", REPORT, REPORT_EXAMPLES
    )
    report.add_argument("path", metavar="RUN", type=Path, help=RUN_HELP)
    _add_out(report, "report")
    report.add_argument(
        "--run", dest="which", type=_count, metavar="N", help="of several runs in one file, the Nth (default: the last)"
    )
    report.add_argument(
        "--watch",
        nargs="?",
        const=EVERY,
        type=_count,
        metavar="SECONDS",
        help=f"look again every so many seconds (default: {EVERY}) while the run goes on",
    )
    report.set_defaults(run=run_report)
    compare = _add(
        commands, "compare", "final values and figures of several runs, side by side", COMPARE, COMPARE_EXAMPLES
    )
    compare.add_argument(
        "paths", metavar="RUN", type=Path, nargs="+", help=f"two or more; the first is the baseline. {RUN_HELP}"
    )
    _add_out(compare, "comparison")
    compare.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="another metric for the table; may be repeated"
    )
    compare.add_argument(
        "--window", type=_count, metavar="STEPS", help="steps at the end that final values are means over"
    )
    compare.add_argument(
        "--full", action="store_true", help="each run's own end, not the last step that all have reached"
    )
    compare.set_defaults(run=run_compare)


def _add(commands, name: str, brief: str, description: str, examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=brief,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_out(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--out", type=Path, default=Path(default), help="folder of the page (default: %(default)s/)")
    parser.add_argument("--no-page", action="store_true", help="the text alone")
    parser.add_argument("--no-pictures", action="store_true", help="the page without PNG files")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def run_report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from verl_ext.report.load import load_run
    from verl_ext.report.terminal import dashboard
    from verl_ext.report.verdict import judge

    with _errors_are_one_line("report") as outcome:
        if arguments.watch:
            return _watch(arguments, Console())
        console = Console()
        run = load_run(arguments.path, arguments.which)
        verdict = judge(run)
        console.print(dashboard(run, verdict))
        if not arguments.no_page:
            _write(run, verdict, arguments, console)
    return outcome.status


def _watch(arguments: argparse.Namespace, console: "Console") -> int:
    """The same again and again; PNG files once, at the end."""
    from rich.live import Live
    from rich.text import Text

    from verl_ext.report.load import Reader
    from verl_ext.report.run import ReportError, Run
    from verl_ext.report.terminal import dashboard
    from verl_ext.report.verdict import judge

    reader = Reader(arguments.path, which=arguments.which)
    run: Run | None = None
    try:
        with Live(Text(f"waiting for {arguments.path}"), console=console, auto_refresh=False) as live:
            while True:
                try:
                    now = reader.refresh()
                except ReportError as error:  # it may just not have begun
                    live.update(Text(f"waiting: {error}"), refresh=True)
                else:
                    if now is not run:
                        run = now
                        live.update(dashboard(run, judge(run)), refresh=True)
                        if not arguments.no_page:
                            _pages(run, judge(run), arguments.out, refresh=arguments.watch, pictures=False)
                time.sleep(arguments.watch)
    except KeyboardInterrupt:
        if not console.is_terminal:
            console.line()  # Live ends without one there
        if run is None:
            raise ReportError(f"{arguments.path}: nothing to report on yet") from None
        if not arguments.no_page:
            _write(run, judge(run), arguments, console)
    return 0


def _write(run: "Run", verdict: "Verdict", arguments: argparse.Namespace, console: "Console") -> None:
    with _progress(console) as progress:
        pages = _pages(run, verdict, arguments.out, pictures=not arguments.no_pictures, progress=progress)
    for name, page in pages.items():
        _tell(console, name, page)


def _tell(console: "Console", name: str, page: Path) -> None:
    console.print(f" {name}: {page}", highlight=False, soft_wrap=True, markup=False, emoji=False)


def _pages(
    run: "Run",
    verdict: "Verdict",
    out: Path,
    *,
    refresh: int | None = None,
    pictures: bool,
    progress: "Progress | None" = None,
) -> dict[str, Path]:
    """Write the pages of a run; what each is called."""
    from verl_ext.report.page import PAGE, PICTURES, write_report
    from verl_ext.report.run import ReportError
    from verl_ext.report.trajectories import read_trajectories, trajectories_file, write_trajectory_page

    tell = progress or (lambda what: None)
    written, link = {}, None
    if (dump := trajectories_file(run.sources[0])) is not None:
        tell("trajectories")
        try:
            trajectories, notes = read_trajectories(dump)
            page = write_trajectory_page(
                trajectories, out / TRAJECTORIES, title=f"{run.name}: trajectories", report=PAGE, notes=notes
            )
            written["trajectories"], link = page, TRAJECTORIES
        except ReportError as error:  # a dump without a whole line must not cost the report
            run = replace(run, notes=(*run.notes, str(error)))
    if link is None:
        (out / TRAJECTORIES).unlink(missing_ok=True)  # an earlier run's
    page = write_report(run, verdict, out, trajectories=link, refresh=refresh, pictures=pictures, progress=tell)
    figures = {"figures": out / PICTURES} if any((out / PICTURES).glob("*.png")) else {}
    return {"page": page, **figures, **written}


def run_compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from verl_ext.report.comparison import compare_runs
    from verl_ext.report.comparison_text import comparison_table
    from verl_ext.report.load import load_run
    from verl_ext.report.page import unique_names, write_comparison

    with _errors_are_one_line("compare") as outcome:
        runs = [load_run(path) for path in arguments.paths]
        runs = [replace(run, name=name) for run, name in zip(runs, unique_names(runs), strict=True)]
        comparison = compare_runs(runs, extra=arguments.metric, window=arguments.window, cut=not arguments.full)
        console = Console()
        console.print(comparison_table(comparison))
        if not arguments.no_page:
            named = {run.name: run for run in runs}
            with _progress(console) as progress:
                page = write_comparison(
                    named, comparison, arguments.out, pictures=not arguments.no_pictures, progress=progress
                )
            _tell(console, "page", page)
    return outcome.status


class _Outcome:
    status = 0


@contextmanager
def _errors_are_one_line(command: str) -> Iterator[_Outcome]:
    """What the user can do something about becomes one line and a status."""
    from verl_ext.report.run import ReportError

    outcome = _Outcome()
    try:
        yield outcome
    except ModuleNotFoundError as error:
        if error.name not in ("altair", "vl_convert", "jinja2", "PIL"):
            raise
        print(f"verl-ext {command}: {error.name} is missing: pip install 'verl-ext[report]'", file=sys.stderr)
        outcome.status = FAILED
    except (ReportError, OSError) as error:
        print(f"verl-ext {command}: {error}", file=sys.stderr)
        outcome.status = FAILED


@contextmanager
def _progress(console: "Console") -> Iterator["Progress"]:
    """A spinner that names what is being drawn; nothing where the output is not a terminal."""
    with console.status("drawing") as status:
        yield lambda what: status.update(f"drawing: {what}")
