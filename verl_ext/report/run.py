"""A run as the report sees it: every numeric metric over its steps, and the guard's decisions."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from verl_ext.base.errors import UserError
from verl_ext.base.printable import printable
from verl_ext.diagnosis.names import VALIDATION, VERLS, Alias, by_quantity, known_metrics, quantity_of
from verl_ext.diagnosis.series import Act, Ending, Readings, Series
from verl_ext.guard.state import Event

LARGEST_WHOLE = 2**53  # from here on, neither a float nor a page's JavaScript distinguishes whole numbers
MOST_MESSAGE = 4000  # characters
ENDED = "ended"  # rule and action of the event of an error that ended a run
FEW_NAMES, LISTED_NAMES = 3, 5
FEW_TRAINERS = 2  # ms-swift logs what TRL logs, and miles what slime logs
METRIC = re.compile(r"\w+(/\w+)+")  # a metric's name in a sentence
LAYER = re.compile(r"[0-9]{1,4}")
DECIDED = {  # what the guard did, as the name of a mark or of a decision
    "skip": "update skipped",
    "lower_lr": "learning rate lowered",
    "tighten": "band narrowed",
    "warn": "warning",
    "resync": "weights sent again",
    "recover": "recovered",
}


class ReportError(UserError, ValueError):
    """The run cannot be read; the message is one line, names the file, and is meant for the user."""

    def __init__(self, message: str, runs: int = 0):
        super().__init__(printable(message, MOST_MESSAGE))  # it quotes names and contents of files
        self.runs = runs  # of which one must be chosen


def is_step(value: object) -> TypeGuard[int]:
    """Returns True for a possible step: a whole number with which steps can be counted, here and on a page."""
    return type(value) is int and abs(value) < LARGEST_WHOLE


def is_validation(name: str) -> bool:
    """Returns True for a score of a validation set."""
    quantity = quantity_of(name)
    return quantity is not None and quantity.name == VALIDATION


def validation_label(name: str) -> str:
    """Returns the name of a validation's score without the common prefix."""
    return name.removeprefix("val-core/").removeprefix("val/test_score/").removeprefix("val/")


def listed(names: Sequence[str], most: int) -> str:
    """Returns the first names, with commas, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def sentence_of(clause: str) -> str:
    """Returns a clause as a sentence; a name of a metric keeps its beginning."""
    start = clause if re.match(r"\S*[/_\d]", clause) else clause[:1].upper() + clause[1:]
    return f"{start}." if start else ""


def own_steps(found: Sequence[Any], last: int, one: str, several: str) -> tuple[list[Any], list[str]]:
    """Selects the entries that can belong to a run with this last step, and notes how many others there were.

    The step after it counts too: the metrics of a step at which the guard stops the run may not be logged.

    Args:
        found: anything with a `step`.
        one, several: the name of an entry, and of several.
    """
    own = [each for each in found if each.step <= last + 1]
    others = len(found) - len(own)
    if others == 0:
        return own, []
    if others == 1:
        return own, [f"1 {one} has a later step than the metrics: left out; it belongs to another run"]
    return own, [f"{others} {several} have later steps than the metrics: left out; they belong to another run"]


@dataclass(frozen=True)
class Run:
    """One run; `get` returns None if nothing finite was logged.

    Attributes:
        name: short, for headings; printable, as the names of metrics and the words of events are.
        sources: the files that were read.
        steps: every step that logged anything, ascending.
        metrics: by logged name.
        events: the guard's decisions, by step.
        notes: notes on the files for the reader, one sentence each: lines left out, steps logged twice.
        last: whether it is the last of its file. Other files in the folder count as the last run's.
        ended_in: the trainer in whose code it ended, by a traceback; "" if none is known.
        renamed: the metrics that have these names by `--name`: they say nothing about the trainer.
    """

    name: str
    sources: tuple[Path, ...]
    steps: np.ndarray
    metrics: dict[str, Series] = field(repr=False)
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    last: bool = True
    ended_in: str = ""
    renamed: frozenset[str] = frozenset()

    def get(self, name: str) -> Series | None:
        """Returns the finite values of a quantity, under the first of its names that has any."""
        return next((finite for series in self._named(name) if (finite := series.finite()).steps.size), None)

    def logged(self, name: str) -> Series | None:
        """Returns the series of `get`, including values that are not finite; of the first name, if none is finite."""
        named = list(self._named(name))
        return next((series for series in named if np.isfinite(series.values).any()), named[0] if named else None)

    def _named(self, name: str) -> Iterator[Series]:
        """Yields the series of a quantity under each of its names, in this run's order of preference."""
        own = {name: Alias(name)} if name in self.metrics else {}  # asked for by another name than the canonical one
        for logged, alias in self._quantities.get(name, own).items():
            yield self.metrics[logged].converted(alias)

    @property
    def span(self) -> tuple[int, int]:
        """The first step and the last."""
        return int(self.steps[0]), int(self.steps[-1])

    @property
    def of_verl(self) -> bool:
        """Whether verl logged it: a metric has the beginning of a name of verl's or of this package; without metrics,
        whether it ended in verl's code."""
        return (
            any(name.startswith(VERLS) for name in self.metrics.keys() - self.renamed)
            if self.metrics
            else self.ended_in == "verl"
        )

    @property
    def end(self) -> Event | None:
        """The error after which nothing was logged; None if there is none."""
        last = self.events[-1] if self.events else None
        return last if last is not None and last.rule == ENDED and last.step >= self.steps[-1] else None

    @cached_property
    def trainer(self) -> str:
        """The trainer that gives most of the names which few trainers give, the first of names.toml if several do; ""
        if none does."""
        if self.of_verl:
            return "verl"
        logged = (alias.frameworks for names in self._quantities.values() for alias in names.values())
        found = Counter(each for frameworks in logged if len(frameworks) <= FEW_TRAINERS for each in frameworks)
        return found.most_common(1)[0][0] if found else self.ended_in

    @cached_property
    def _quantities(self) -> dict[str, dict[str, Alias]]:
        return by_quantity(self.metrics)

    @cached_property
    def readings(self) -> Readings:
        """The run as the diagnosis sees it, with the guard's decisions and the last error that ended a process."""
        ending = next((Ending(each.step, each.reason) for each in reversed(self.events) if each.rule == ENDED), None)
        acts = [Act(each.step, each.rule, each.action, each.reason) for each in self.events if each.rule != ENDED]
        logged = {name: series for name in self._quantities if (series := self.logged(name)) is not None}
        return Readings(logged, ending, acts)

    def own_name(self, name: str) -> str:
        """Returns the name under which this run logs a quantity, as in `get`; the quantity's own, if it does not."""
        return next((each for each in self._quantities.get(name, ()) if self.metrics[each].finite().steps.size), name)

    def in_own_names(self, text: str) -> str:
        """Returns a text with the metrics that this run logs under the names that it gives them."""
        return METRIC.sub(lambda found: self.own_name(found[0]), text)

    def all_notes(self) -> Iterator[str]:
        """Yields the notes on the files, behind one on the names of the metrics if the report knows none or few."""
        yield from self._notes_on_names()
        yield from self.notes

    def _notes_on_names(self) -> Iterator[str]:
        metrics = known_metrics(self.metrics)
        known = [name for name in self.metrics if name in metrics or quantity_of(name) is not None]
        others = [name for name in self.metrics if name not in known]
        if len(known) >= FEW_NAMES or not others:
            return
        listed = ", ".join([*others[:LISTED_NAMES], *(["..."] if len(others) > LISTED_NAMES else [])])
        if known:
            share = f"{len(known)} of the {len(self.metrics)} names in this run"
            yield f"the report knows {share} ({', '.join(known)}), and not {listed}"
        else:
            yield f"none of the {len(others)} names in this run is a metric that the report knows: {listed}"

    def validations(self) -> list[str]:
        """Returns the metrics of validation sets that have a finite value, by their logged names."""
        found = (name for name in self.metrics if is_validation(name))
        return sorted(name for name in found if self.metrics[name].finite().steps.size)

    def layers(self, name: str) -> dict[int, Series]:
        """Returns `name/layer_00`, `name/layer_01`, ... by layer number, without layers that have no finite value."""
        found = self.parts(name, "layer_")
        return {int(number): found[number] for number in sorted(filter(LAYER.fullmatch, found), key=int)}

    def parts(self, name: str, prefix: str) -> dict[str, Series]:
        """Returns the metrics `name/prefix...` that have a finite value, by the rest of their names."""
        start = f"{name}/{prefix}"
        found = {key.removeprefix(start): self.get(key) for key in self.metrics if key.startswith(start)}
        return {part: series for part, series in found.items() if series is not None}
