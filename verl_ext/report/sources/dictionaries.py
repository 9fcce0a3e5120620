"""Dictionaries and JSON objects of names with numbers, in a line or several: TRL and ms-swift `{'loss': '0.1', ...}`;
slime and miles `rollout 3: {'rollout/raw_reward': 0.5}`, with their own number in front.

An evaluation of TRL may have names of the training next to those with `eval_`.

slime counts rollouts and the optimizer steps on them separately. The steps are the axis here: values of a rollout
belong to the first step on it.
"""

import re
from collections.abc import Collection, Iterator, Mapping

from verl_ext.diagnosis.names import is_by_words, quantity_of
from verl_ext.report.sources.lines import BAR, bars_in
from verl_ext.report.sources.numbers import (
    COLON,
    DICTIONARY,
    ENTRY,
    NAME,
    SUMMARY,
    dictionaries_in,
    numbers_of,
    row_of,
    step_counts,
)
from verl_ext.report.sources.table import Row
from verl_ext.report.sources.text import register_format

HAS_NAME = re.compile(rf"""["']{COLON}""")
NUMBERED = re.compile(rf"{NAME}(?=[-+.\d])")
LIKELY = re.compile(rf"(?m)(?:\{{|^[ \t]*){NAME}[\"'\d.+{{n-]".encode())
END_OF_NAME = re.compile(rb"[\w./@ -]{1,200}[\"']\s?:")  # of a line that was broken within it
OF_ROLLOUT = re.compile(r"\b(?:rollout|perf|eval) (\d{1,12}): $")
EVERY = re.compile(r"logging_steps['\"]?\s?[:= ]\s?(\d{1,6})\b")
MOST_LINES = 20  # of a dictionary
OF_EVALUATION = ("eval_loss", "eval_runtime")  # of transformers, in every row of one
# What says how many steps are between two rows of transformers' trainers: a setting, or its bar, which has no title.
UNIT = re.compile(rf"{EVERY.pattern}|{BAR.pattern}".encode())


@register_format(
    "printed dictionaries (TRL, ms-swift, slime, miles)",
    remarks="`{'loss': '0.1', 'reward': 0.5}`, or JSON, in one line or several: rows of TRL have no step, so they are "
    "counted, in units of `logging_steps` if the log has it. `step 3: {...}`: slime's metrics of a rollout are "
    "assigned to the first optimizer step on it",
    order=2,
)
class PrintedDicts:
    def __init__(self) -> None:
        self.every = 1  # steps from one row without a step to the next
        self._counted = self._is_set = False
        self._bar = (0, 0)  # total and count of the longest bar; it runs ahead where the output is buffered
        self._trained: int | None = None  # the last optimizer step, where these are logged apart
        self._open = ""  # lines of a dictionary that is not closed yet
        self._cut = ""  # the same with a last line that has no newline yet
        self._torn = 0  # rows that were never closed, or of which no number could be read

    @property
    def total(self) -> int:
        """The steps of the run by its bar; 0 without one, or if the log has the setting."""
        return 0 if self._is_set else self._bar[0]

    def sniff(self, text: bytes) -> bool:
        goes_on = bool(self._open) and END_OF_NAME.match(text) is not None
        return goes_on or LIKELY.search(text) is not None or (not self._counted and UNIT.search(text) is not None)

    def rows(self, text: str) -> Iterator[Row]:
        if not self._counted:
            if found := EVERY.search(text):
                self.every, self._is_set = int(found[1]) or self.every, self._is_set or int(found[1]) > 0
            bars = (bar for bar in bars_in(text) if not bar.title.strip())
            self._bar = max([self._bar, *((bar.total, bar.at) for bar in bars)])
        # A line without a newline is given again, so that only the end of the dictionary is taken from it.
        is_whole, begins = text.endswith("\n"), DICTIONARY.search(text) is not None
        goes_on = not begins and ("}" in text[:2] or HAS_NAME.search(text) is not None)
        joined = bool(self._open) and goes_on and self._open.count("\n") < MOST_LINES
        if joined:
            text = self._open + text
        elif is_whole or begins or "}" in text:
            yield from (torn := self.torn())
            self._torn += len(torn)
        else:
            return
        end = text.rfind("}") + 1
        self._cut = text[end:] if DICTIONARY.search(text, end) else ""
        if is_whole or not self._cut:
            self._open = self._cut
        rows = [(words, each) for words, each in dictionaries_in(text) if _are_metrics(each) and SUMMARY not in each]
        for words, record in rows:
            if not (joined and _is_config(record)):
                yield self._row(words, record)
        self._torn += is_whole and not rows and _is_of_metrics(NUMBERED.findall(text, 0, end))

    def torn(self) -> list[Row]:
        """Returns the row within which the text so far ends, if it does: what stands before its last comma, because its
        last number may be cut too."""
        record = numbers_of(dict(ENTRY.findall(self._cut, 0, self._cut.rfind(",") + 1)))
        return [self._row(DICTIONARY.split(self._cut)[0], record)] if _is_of_metrics(record) else []

    def notes(self) -> list[str]:
        torn = self._torn + len(self.torn())
        return [f"rows of which a part is missing, so that only the rest counts: {torn}"] if torn else []

    def _row(self, words: str, record: Mapping[str, float]) -> Row:
        step, values = row_of(record)
        if (step := self._step(words, step)) is None and _evaluates(values):
            values = {f"eval_{name.removeprefix('eval_')}": value for name, value in values.items()}
        if step is None and not self._counted:
            self._counted = True
            self.every = max(self.every, self._bar[1])
        return step, values

    def _step(self, words: str, own: int | None) -> int | None:
        """Returns the step that the words in front of a dictionary give it; else its own."""
        if found := OF_ROLLOUT.search(words):
            return int(found[1]) if self._trained is None else self._trained + 1
        if counts := step_counts(words):
            own = self._trained = int(counts[0][1])
        return own


def _evaluates(names: Collection[str]) -> bool:
    """Returns True for the names of an evaluation, of which some lack its prefix; an update may log both."""
    return any(name in names for name in OF_EVALUATION) and not any(f"eval_{name}" in names for name in names)


def _is_config(names: Collection[str]) -> bool:
    """Returns True for names with a learning rate, and without what an update has."""
    found = {quantity.name for quantity in map(quantity_of, names) if quantity}
    return "actor/lr" in found and not found & {"actor/loss", "actor/pg_loss", "actor/grad_norm"}


def _are_metrics(values: Mapping[str, object]) -> bool:
    """Returns True for a row of metrics, False for a printed config, which may have a learning rate."""
    return any("/" in name or name.startswith("eval_") for name in values) or _found_names(values) > 1


def _is_of_metrics(names: Collection[str]) -> bool:
    """Returns True for names that only a row of metrics has, though a part of it is missing."""
    return _found_names(names) > 1 and SUMMARY not in names and not _is_config(names)


def _found_names(names: Collection[str]) -> int:
    return sum(quantity_of(name) is not None and not is_by_words(name) for name in names)
