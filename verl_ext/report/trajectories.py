"""Single trajectories, token by token. Reads the trainer's dump and writes the page that shows it.

The page is one HTML file that needs no network. Each trajectory is its own JSON script in it, parsed by the browser
only when it is chosen: templates/trajectories.js.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson
from markupsafe import Markup

from verl_ext.base.names import TRAJECTORIES, older_part
from verl_ext.diagnosis.series import LARGEST
from verl_ext.report.files import is_regular, open_regular
from verl_ext.report.page import asset, script_json, template, write_html
from verl_ext.report.run import LARGEST_WHOLE, ReportError

SCRIPTS = (
    "trajectory_scales.js",
    "trajectory_tokens.js",
    "trajectory_tooltip.js",
    "trajectories.js",
    "trajectory_events.js",
)
MOST_HELD = 2_000_000  # tokens, at some 300 bytes each; the page shows fewer
MOST_LINE = 256 << 20  # bytes: more than two million tokens
REMEDY = "add stability.trajectories.per_step=2 to the run to get some"

Numbers = tuple[float | None, ...]  # None if the number is missing or was not finite


@dataclass(frozen=True)
class Trajectory:
    """One line of the dump. The lists from `text` on have one entry per token that was written down.

    Attributes:
        step, key: identify the trajectory; a pair is unique in the result of `read_trajectories`.
        why: the reason why it was written: "largest gap" or "at random".
        skipped: the reason why the step's whole update was skipped, "" if it was not.
        tokens: number of tokens of the whole response. `start` and `length` are the stretches of it that were written.
        text: decoded pieces, "" if a character of several tokens is not complete yet.
        generated: 0 for text that the model did not write; it has no numbers.
        weight: the correction's weight, 0 if it dropped the token; None without a correction.
        kept: 1 if the token takes part in the loss after the filters.
        agreement: share of the experts that both engines chose; None if the run did not compare them; a list of None if
            they were not compared in this trajectory.
    """

    step: int
    key: str
    tokens: int
    start: tuple[int, ...]
    length: tuple[int, ...]
    text: tuple[str, ...] = field(repr=False)
    id: tuple[int, ...] = field(repr=False)
    generated: tuple[int, ...] = field(repr=False)
    l_infer: Numbers = field(repr=False)
    l_old: Numbers = field(repr=False)
    kept: tuple[int, ...] = field(repr=False)
    weight: Numbers | None = field(default=None, repr=False)
    agreement: Numbers | None = field(default=None, repr=False)
    entropy: Numbers | None = field(default=None, repr=False)
    why: str = ""
    prompt: str = field(default="", repr=False)
    skipped: str = ""
    reward: float | None = None
    advantage: float | None = None

    def log_k_sizes(self) -> list[float]:
        """Returns |log k| of every token that has both log-probs."""
        pairs = zip(self.l_infer, self.l_old, strict=True)
        return [abs(old - infer) for infer, old in pairs if infer is not None and old is not None]

    def dropped(self) -> int:
        """Returns the number of the model's own tokens that take no part in the loss."""
        weights = self.weight or (None,) * len(self.kept)
        rows = zip(self.generated, self.kept, weights, strict=True)
        return sum(bool(generated and (not kept or weight == 0)) for generated, kept, weight in rows)


def trajectories_file(metrics_file: Path) -> Path | None:
    """Returns the dump that belongs to a metrics file, even if only its older part exists; None if there is none."""
    file = metrics_file.with_suffix(TRAJECTORIES)
    return file if is_regular(file) or is_regular(older_part(file)) else None


def read_trajectories(file: Path) -> tuple[list[Trajectory], tuple[str, ...]]:
    """Returns the trajectories of a dump by step, its older part (`X.trajectories.1.jsonl`) included, and notes on the
    lines that were left out.

    A last line without a newline that cannot be read was cut by a crash, or is being written: no note. If the steps go
    back to an earlier one, the run was resumed there: the earlier lines of this step and of later ones are left out.
    """
    files = [part for part in (older_part(file), file) if is_regular(part)]
    if not files:
        raise ReportError(f"{file}: no trajectories here; {REMEDY}")
    found: dict[tuple[int, str], Trajectory] = {}
    notes, last, held, forgotten = [], 0, 0, 0
    for part in files:
        bad = []
        for number, line in _dump_lines(part):
            try:
                trajectory = _parse_trajectory(line)
            except ValueError as error:  # orjson raises a ValueError too
                if line.endswith(b"\n"):
                    bad.append(f"line {number}: {error}")
                continue
            if trajectory.step < last:
                while found and next(reversed(found))[0] >= trajectory.step:
                    held -= _token_count(found.popitem()[1])
            last, at = trajectory.step, (trajectory.step, trajectory.key)
            held += _token_count(trajectory) - (_token_count(found[at]) if at in found else 0)
            found[at] = trajectory  # in the order of steps
            while held > MOST_HELD and len(found) > 1:
                held -= _token_count(found.pop(next(iter(found))))
                forgotten += 1
        if bad:
            notes.append(f"{part.name}: {'1 line' if len(bad) == 1 else f'{len(bad)} lines'} left out ({bad[0]})")
    if forgotten:
        notes.append(f"{file.name}: the oldest {forgotten} trajectories are left out to save memory")
    if not found:
        raise ReportError("; ".join([f"{file}: no complete trajectory in this file", *notes, REMEDY]))
    return list(found.values()), tuple(notes)


def _token_count(trajectory: Trajectory) -> int:
    """Returns a trajectory's size in tokens; the other fields take the memory of a few tokens."""
    return len(trajectory.text) + len(trajectory.start) + 10


def write_trajectory_page(
    trajectories: Sequence[Trajectory], out: Path, *, title: str, report: str | None = None, notes: Sequence[str] = ()
) -> Path:
    """Writes one self-contained HTML page, which links back to `report` and begins with `notes`."""
    if not trajectories:
        raise ReportError(f"{out}: no trajectory to show; {REMEDY}")
    page = template("trajectories.html.j2").stream(
        title=title,
        report=report,
        notes=notes,
        style=asset("trajectories.css"),
        script=Markup("\n").join(asset(name) for name in SCRIPTS),
        index=script_json([_summary(trajectory) for trajectory in trajectories]),
        trajectories=(script_json(_tokens(trajectory)) for trajectory in trajectories),
    )
    write_html(page, out)
    return out


def _dump_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    # Bytes: only b"\n" ends a line of the dump, whatever else a response has, and a cut character spoils only one line.
    try:
        lines = open_regular(file)
    except FileNotFoundError:  # the trainer is just moving it aside
        return
    with lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE), b""), start=1):
            if line.strip():
                yield number, line  # a longer line becomes several, none of which can be read


REQUIRED_LISTS: dict[str, type] = {"start": int, "length": int, "text": str, "id": int, "generated": int, "kept": int}
NUMBER_LISTS = {"l_infer": True, "l_old": True, "weight": False, "agreement": False, "entropy": False}  # required?
FLAGS = ("generated", "kept")  # 0 or 1
REQUIRED: dict[str, type] = {"step": int, "key": str, "tokens": int}
NUMBER = (int, float)
OPTIONAL: dict[str, Any] = {"why": str, "prompt": str, "skipped": str, "reward": NUMBER, "advantage": NUMBER}
NAMES = {entry.name for entry in fields(Trajectory)}


def _parse_trajectory(line: bytes) -> Trajectory:
    """Parses a line; raises ValueError with the reason if it is not a trajectory."""
    record = orjson.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not an object")
    values: dict[str, Any] = {name: value for name, value in record.items() if name in NAMES and value is not None}
    for name, kinds in REQUIRED.items():
        if not _has_type(values.get(name), kinds):
            raise ValueError(f"{name} is missing or has the wrong type")
    for name, kinds in OPTIONAL.items():
        if name in values and not _has_type(values[name], kinds):
            raise ValueError(f"{name} has the wrong type")
    for name, kind in REQUIRED_LISTS.items():
        values[name] = _as_tuple(values.get(name), name, lambda value, kind=kind: _has_type(value, kind))
    for name, required in NUMBER_LISTS.items():
        if required or name in values:
            listed = _as_tuple(values.get(name), name, lambda value: value is None or _has_type(value, NUMBER))
            values[name] = tuple(None if value is None or abs(value) > LARGEST else value for value in listed)
    trajectory = Trajectory(**values)
    _check_stretches(trajectory)
    return trajectory


def _has_type(value: object, kind: type | tuple[type, ...]) -> bool:
    if isinstance(value, bool):  # True is an int for Python, not for the dump
        return False
    return isinstance(value, kind) and (kind is not int or abs(value) < LARGEST_WHOLE)  # type: ignore[arg-type]


def _as_tuple(value: Any, name: str, good: Any) -> tuple:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    if not all(map(good, value)):
        raise ValueError(f"an entry of {name} has the wrong type")
    return tuple(value)


def _check_stretches(trajectory: Trajectory) -> None:
    count = len(trajectory.text)
    for name in ("id", *FLAGS, *NUMBER_LISTS):
        values = getattr(trajectory, name)
        if values is not None and len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries, text has {count}")
    for name in FLAGS:
        if not set(getattr(trajectory, name)) <= {0, 1}:
            raise ValueError(f"{name} has an entry other than 0 and 1")
    if len(trajectory.start) != len(trajectory.length) or sum(trajectory.length) != count:
        raise ValueError(f"start and length do not describe {count} tokens")
    end = 0
    for start, length in zip(trajectory.start, trajectory.length, strict=True):
        if start < end or length < 1:
            raise ValueError("start and length do not ascend")
        end = start + length
    if end > trajectory.tokens:
        raise ValueError(f"tokens={trajectory.tokens}, but a stretch ends at {end}")


def _summary(trajectory: Trajectory) -> dict[str, object]:
    """Returns a row of the page's list."""
    sizes = trajectory.log_k_sizes()
    generated = sum(trajectory.generated)
    scalars = ("step", "key", "why", "reward", "advantage", "tokens", "skipped")
    return {name: getattr(trajectory, name) for name in scalars} | {
        "shown": len(trajectory.text),
        "generated": generated,
        "mean": math.fsum(sizes) / len(sizes) if sizes else None,
        "max": max(sizes, default=None),
        "dropped": trajectory.dropped() / generated if generated else None,
    }


def _tokens(trajectory: Trajectory) -> dict[str, object]:
    """Returns the tokens of a trajectory for the page: numbers with the digits of float32, lists of 0 and 1 as text."""
    numbers = {name: getattr(trajectory, name) for name in NUMBER_LISTS}
    return {
        **{name: getattr(trajectory, name) for name in ("prompt", "start", "length", "text", "id")},
        **{name: "".join(map(str, getattr(trajectory, name))) for name in FLAGS},
        **{name: values and [_round(value) for value in values] for name, values in numbers.items()},
    }


def _round(value: float | None) -> float | int | None:
    if value is None:
        return None
    short = round(value, 7)
    # "1" is half as long as "1.0", and most weights are 1. A float cannot have all digits of a larger number.
    return int(short) if abs(short) < LARGEST_WHOLE and short == int(short) else float(short)
