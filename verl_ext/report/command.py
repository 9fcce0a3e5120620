"""The commands `verl-ext report` and `verl-ext compare`. The code that draws is imported when it is needed: --help must
not wait for it."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.base.arguments import add_command, positive, run_of, similar_names
from verl_ext.base.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from verl_ext.report.page import Progress
    from verl_ext.report.run import Run
    from verl_ext.report.verdict import RunVerdict

WATCH_SECONDS = 15  # seconds between two reads of a running run

RUN_HELP = (
    "{forms}; or a folder with one of these. - reads a log from the standard input. The guard's events and dumped "
    "trajectories next to it are read too. PATH:N is the Nth of several runs in it, PATH:NAME the one of this name"
)
REPORT = """\
Explain what happened to a run, why, and what to do. The verdict comes first: whether the run collapsed, at which step,
and how many steps earlier something warned. Then come one command to start the run again, all other findings and a
table. It also writes a folder with one HTML page that needs no network, and a page of the trajectories if the run wrote
some. It works on any run of verl; the page names the setting that would log a missing metric.
"""
REPORT_EXAMPLES = """\
examples:
  verl-ext report verl_ext/qwen3_30b_a3b.jsonl       the page goes to report/report.html
  verl-ext report slurm-1.out slurm-2.out            a job that was requeued: several logs of one run
  kubectl logs POD | verl-ext report - --no-page
  verl-ext report run.log --json | jq .sentence      the verdict for a script
  verl-ext report tensorboard_log/verl_ext/my_run --out my_report
  verl-ext report RUN --watch                        repeat every 15 s, until Ctrl-C; the page reloads itself
  verl-ext report RUN --name agent/score=reward      a metric of your own is the reward
"""
COMPARE = """\
Compare runs: a table of final values, which marks differences from the first line that exceed the noise, and a page
with every figure of the report and every logged metric for all runs. Runs that differ only in the seed are one line,
with mean and spread: if each has a config (W&B, Hydra), their configs are compared; else, their names differ only in
"seed" and a number (none/seed0, grpo_seed1.jsonl). --group joins any other runs.
"""
COMPARE_EXAMPLES = """\
examples:
  verl-ext compare bf16.jsonl fp16.jsonl
  verl-ext compare base.jsonl icepop.jsonl r3.jsonl --metric rollout_corr/kl --window 50
  verl-ext compare run.jsonl:1 run.jsonl:2           two runs of one file
  verl-ext compare wandb_export.csv                  all runs of a chart's export
  verl-ext compare lab/none/seed* lab/moe/seed*      two lines, each over its seeds
  verl-ext compare --group base a.jsonl b.jsonl --group icepop c.jsonl d.jsonl
"""


class _FormsHelp(argparse.RawDescriptionHelpFormatter):
    """Puts the forms of a run into a help text when it is printed: other commands must not wait for the readers."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "{forms}" not in text:
            return text
        from verl_ext.report.sources import form_rows

        return text.replace("{forms}", "; ".join(title for title, _, _ in form_rows()))


def add_report_parsers(commands) -> None:
    brief = "explain what happened to a run, why, and what to do; write a page of figures"
    codes = "0, for --watch also after Ctrl-C"
    report = add_command(commands, "report", brief, REPORT, REPORT_EXAMPLES, _FormsHelp, codes=codes)
    report.add_argument(
        "paths", metavar="RUN", type=Path, nargs="+", help=f"a run, or several logs of one run. A run is {RUN_HELP}"
    )
    _add_out(report, "report")
    report.add_argument("--json", action="store_true", help="print the verdict as JSON, and write no page")
    report.add_argument(
        "--causes",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a cause of your own, as TOML (docs/extend.md); may be repeated",
    )
    report.add_argument(
        "--run", dest="which", type=run_of, metavar="RUN", help="of several runs, the Nth or the one of this name"
    )
    report.add_argument(
        "--watch",
        nargs="?",
        const=WATCH_SECONDS,
        type=positive,
        metavar="SECONDS",
        help=f"repeat every SECONDS (default: {WATCH_SECONDS}) while the run continues",
    )
    report.set_defaults(run=run_report)
    brief = "compare final values and figures of several runs"
    compare = add_command(commands, "compare", brief, COMPARE, COMPARE_EXAMPLES, _FormsHelp)
    compare.add_argument(
        "paths",
        metavar="RUN",
        type=Path,
        nargs="*",
        help=f"any number of runs; the first is the baseline. {RUN_HELP}",
    )
    _add_out(compare, "comparison")
    compare.add_argument(
        "--group",
        action="append",
        nargs="+",
        default=[],
        metavar=("NAME", "RUN"),
        help="a line of this name from these runs, behind the others; may be repeated",
    )
    compare.add_argument("--apart", action="store_true", help="keep runs apart that differ only in the seed")
    compare.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="another metric for the table; may be repeated"
    )
    compare.add_argument(
        "--window", type=positive, metavar="STEPS", help="number of last steps over which final values are averaged"
    )
    compare.add_argument(
        "--full", action="store_true", help="use each run's own end, not the last step that all have reached"
    )
    compare.set_defaults(run=run_compare)


def _add_out(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--out", type=Path, default=Path(default), help="folder for the page (default: %(default)s/)")
    parser.add_argument("--no-page", action="store_true", help="print the text only, write no page")
    parser.add_argument("--pictures", action="store_true", help="write the figures as PNG files too")
    parser.add_argument(
        "--name",
        type=_named,
        action="append",
        default=[],
        dest="names",
        metavar="OWN=KNOWN",
        help="read a metric of your own as a known one: reward, k3, entropy, grad_norm, policy_staleness_steps, "
        "response_length/mean, answers/cut, and those of docs/report.md; may be repeated",
    )


def _named(text: str) -> tuple[str, str]:
    """Parses OWN=KNOWN; the second is a name that the report reads."""
    from verl_ext.base.metrics import METRICS
    from verl_ext.diagnosis.names import is_by_words, quantities, quantity_of

    own, _, known = map(str.strip, text.rpartition("="))
    if not own:
        raise argparse.ArgumentTypeError(f"{printable(text)} must have the form OWN=KNOWN")
    if known not in METRICS and (is_by_words(known) or quantity_of(known) is None):
        ends = {each.name for each in quantities() if each.name.endswith(f"/{known}")}
        if len(ends) == 1:  # k3 is vllm_kl/k3
            return printable(own), ends.pop()
        near = similar_names(known, [*METRICS, *(alias.name for each in quantities() for alias in each.aliases)])
        raise argparse.ArgumentTypeError(f"{printable(known)} is no metric that the report knows{near}")
    return printable(own), known


def _check_out(arguments: argparse.Namespace) -> None:
    """Raises ReportError if the page could not be written: after the report, an error would be read last. A watch tries
    again each time."""
    from verl_ext.report.run import ReportError

    if arguments.no_page or getattr(arguments, "watch", None):
        return
    try:
        there = next(place for place in (arguments.out, *arguments.out.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b" ")
    except OSError as error:
        reason = error.strerror or error
        raise ReportError(f"cannot write to {arguments.out} ({reason}): choose another --out, or --no-page") from error


def run_report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from verl_ext.report.load import STANDARD_INPUT, read_run
    from verl_ext.report.run import ReportError
    from verl_ext.report.terminal import Dashboard

    if arguments.watch and (arguments.json or STANDARD_INPUT in arguments.paths):
        raise ReportError("--watch shows the report of a file again and again: leave out --json, and name the file")
    console = Console()
    if arguments.watch:
        return _watch(arguments, console)
    run = read_run(arguments.paths[0], arguments.which, arguments.paths[1:], dict(arguments.names))
    verdict = _judge(run, arguments)
    if arguments.json:
        print(json.dumps(verdict.as_json(run), indent=1))
        return 0
    _check_out(arguments)
    console.print(Dashboard(run, verdict), crop=False)  # a command is longer than a narrow terminal
    if not arguments.no_page:
        _write_pages(run, verdict, arguments, console)
    return 0


def _watch(arguments: argparse.Namespace, console: "Console") -> int:
    """Repeats the report while the run continues; PNG files are written at its end, if they were asked for."""
    from rich.live import Live

    from verl_ext.report.load import Reader
    from verl_ext.report.run import ReportError, Run
    from verl_ext.report.terminal import indented

    _check_out(arguments)
    reader = Reader(arguments.paths[0], which=arguments.which, more=arguments.paths[1:], names=dict(arguments.names))
    tidy = False
    if not arguments.no_page:
        from verl_ext.report.page import is_ours

        tidy = is_ours(arguments.out)  # later, the page there is this run's
    run: Run | None = None
    due = False
    try:
        with Live(
            indented(f"waiting for {arguments.paths[0]}", console.options), console=console, auto_refresh=False
        ) as live:
            while True:
                try:
                    now = reader.refresh()
                except ReportError as error:  # the run may not have begun
                    live.update(indented(f"waiting: {error}", console.options), refresh=True)
                else:
                    due = due or now is not run
                    run = now
                    if due:
                        due = not _show_and_write(run, arguments, tidy, live)
                time.sleep(arguments.watch)
    except KeyboardInterrupt:
        if not console.is_terminal:
            console.line()  # there, Live ends without a newline
        if run is None:
            raise ReportError(f"{arguments.paths[0]}: nothing to report on yet") from None
        if not arguments.no_page:
            _write_pages(run, _judge(run, arguments), arguments, console, tidy)
    return 0


def _judge(run: "Run", arguments: argparse.Namespace) -> "RunVerdict":
    from verl_ext.diagnosis.causes import known_causes
    from verl_ext.report.verdict import judge_run

    return judge_run(run, known_causes(tuple(arguments.causes)).values())


def _show_and_write(run: "Run", arguments: argparse.Namespace, tidy: bool, live: "Live") -> bool:
    """Shows the run and writes its pages; returns False if they could not be written, for example on a full disk."""
    from rich.console import Group

    from verl_ext.report.terminal import Dashboard, indented

    verdict = _judge(run, arguments)
    screen = Dashboard(run, verdict)
    live.update(screen, refresh=True)
    if arguments.no_page:
        return True
    from verl_ext.report.folder import write_pages

    try:
        write_pages(run, verdict, arguments.out, refresh=arguments.watch, pictures=False, tidy=tidy)
    except OSError as error:
        failed = f"no page: {error}; the next refresh tries again"
        live.update(Group(screen, indented(failed, live.console.options)), refresh=True)
        return False
    return True


def _write_pages(
    run: "Run", verdict: "RunVerdict", arguments: argparse.Namespace, console: "Console", tidy: bool | None = None
) -> None:
    from verl_ext.report.folder import write_pages

    with drawing(console) as progress:
        pages = write_pages(run, verdict, arguments.out, pictures=arguments.pictures, tidy=tidy, progress=progress)
    for name, page in pages.items():
        tell(console, name, page)


def tell(console: "Console", name: str, page: Path) -> None:
    from verl_ext.report.run import MOST_MESSAGE
    from verl_ext.report.terminal import encodable

    text = encodable(f" {name}: {printable(str(page), MOST_MESSAGE)}", console.options)
    console.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)


def run_compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from verl_ext.report.comparison import ComparisonTable, compare_runs
    from verl_ext.report.load import read_runs
    from verl_ext.report.page import write_comparison
    from verl_ext.report.run import ReportError, Run

    names = dict(arguments.names)
    joined: dict[str, list[Run]] = {}
    for name, *paths in arguments.group:
        if not paths:
            raise ReportError(f"--group {name}: name the line, then its runs: --group NAME RUN...")
        joined.setdefault(printable(name), []).extend(run for path in paths for run in read_runs(Path(path), names))
    comparison = compare_runs(
        [run for path in arguments.paths for run in read_runs(path, names)],
        extra=[printable(name) for name in arguments.metric],  # the names that were read are printable too
        window=arguments.window,
        cut=not arguments.full,
        joined=joined,
        apart=arguments.apart,
    )
    _check_out(arguments)
    console = Console()
    console.print(ComparisonTable(comparison))
    if not arguments.no_page:
        with drawing(console) as progress:
            page = write_comparison(comparison, arguments.out, pictures=arguments.pictures, progress=progress)
        tell(console, "page", page)
    return 0


@contextmanager
def drawing(console: "Console") -> Iterator["Progress"]:
    """Shows a spinner with the current figure; nothing if the output is not a terminal."""
    with console.status("drawing") as status:
        yield lambda what: status.update(f"drawing: {what}")
