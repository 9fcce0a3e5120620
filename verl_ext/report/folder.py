"""The folder of a run's report: its page, and a page of its trajectories if it wrote any."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl_ext.base.names import older_part
from verl_ext.report.figures.panels import PANELS
from verl_ext.report.files import is_regular
from verl_ext.report.page import PAGE, PICTURES, TRAJECTORIES, Progress, write_report
from verl_ext.report.run import ReportError, Run, own_steps
from verl_ext.report.trajectories import Trajectory, read_trajectories, trajectories_file, write_trajectory_page
from verl_ext.report.verdict import RunVerdict

MOST_TOKENS = 400_000  # of all trajectories on a page: some 20 MB of HTML
LARGE_DUMP = 20_000_000  # bytes; a larger one is read only when the watch ends


def write_pages(
    run: Run,
    verdict: RunVerdict,
    out: Path,
    *,
    refresh: int | None = None,
    pictures: bool,
    tidy: bool | None = None,
    progress: Progress = lambda what: None,
) -> dict[str, Path]:
    """Writes the pages of a run; returns their paths by name. The options are those of `write_page`.

    Args:
        refresh: seconds after which the page loads itself again; None if the pages are not written again.
    """
    written = {}
    if (dump := trajectories_file(run.sources[0])) is not None:
        progress("trajectories")
        try:
            written["trajectories"] = _write_trajectories(run, dump, out, again=refresh is not None)
        except ReportError as error:  # a dump that cannot be shown must not prevent the report
            run = replace(run, notes=(*run.notes, str(error)))
    link = TRAJECTORIES if written else None
    page = write_report(
        run, verdict, out, trajectories=link, refresh=refresh, pictures=pictures, tidy=tidy, progress=progress
    )
    drawn = pictures and any((out / PICTURES / f"{panel.key}.png").is_file() for panel in PANELS)
    return {"page": page, **({"figures": out / PICTURES} if drawn else {}), **written}


def _write_trajectories(run: Run, dump: Path, out: Path, *, again: bool) -> Path:
    """Writes the page of trajectories; ReportError if there are none, or if a large dump waits for the watch to end."""
    parts = [part for part in (dump, older_part(dump)) if is_regular(part)]
    if run.last and again and sum(part.stat().st_size for part in parts) > LARGE_DUMP:
        raise ReportError(f"{dump.name} is large: the page of trajectories is written when the watch ends")
    own, notes = read_own(run, dump)
    newest = _newest(own)
    more = [f"the newest {len(newest)} of {len(own)} trajectories are shown"] if len(newest) < len(own) else []
    title = f"{run.name}: trajectories"
    return write_trajectory_page(newest, out / TRAJECTORIES, title=title, report=PAGE, notes=[*notes, *more])


def read_own(run: Run, dump: Path) -> tuple[list[Trajectory], list[str]]:
    """Returns this run's trajectories in a dump, at least one, and notes. ReportError if there is none."""
    if not run.last:
        raise ReportError(f"{dump.name} has only trajectories of the file's last run, which is not this one")
    found, notes = read_trajectories(dump)
    own, note = own_steps(found, int(run.steps[-1]), "trajectory", "trajectories")
    if not own:
        raise ReportError(f"{dump.name}: {note[0]}")
    return own, [*notes, *note]


def _newest(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Returns the last trajectories, as many as a browser can show; at least one."""
    start = len(trajectories) - 1
    tokens = len(trajectories[start].text)
    while start and (tokens := tokens + len(trajectories[start - 1].text)) <= MOST_TOKENS:
        start -= 1
    return trajectories[start:]
