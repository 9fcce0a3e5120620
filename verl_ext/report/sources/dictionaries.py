"""Dictionaries and JSON objects of names with numbers, one a line: TRL and ms-swift `{'loss': '0.1', 'reward': 0.5}`;
slime and miles `rollout 3: {'rollout/raw_reward': 0.5}`, with their own number in front.

slime counts rollouts and the optimizer steps on them separately. The steps are the axis here: values of a rollout
belong to the first step on it.
"""

import re
from collections.abc import Iterator, Mapping

from verl_ext.diagnosis.names import quantity_of
from verl_ext.report.sources.lines import BAR, bars_in
from verl_ext.report.sources.numbers import NAME, SUMMARY, dictionaries_in, row_of, step_counts
from verl_ext.report.sources.table import Row
from verl_ext.report.sources.text import register_format

LIKELY = re.compile(rf"(?m)(?:\{{|^[ \t]*){NAME}[\"'\d.+{{n-]".encode())
OF_ROLLOUT = re.compile(r"\b(?:rollout|perf|eval) (\d{1,12}): $")
EVERY = re.compile(r"logging_steps['\"]?\s?[:= ]\s?(\d{1,6})\b")
# What says how many steps are between two rows of transformers' trainers: a setting, or its bar, which has no title.
UNIT = re.compile(rf"{EVERY.pattern}|{BAR.pattern}".encode())


@register_format(
    "printed dictionaries (TRL, ms-swift, slime, miles)",
    remarks="`{'loss': '0.1', 'reward': 0.5}`, or JSON: lines of TRL have no step, so they are counted, in units of "
    "`logging_steps` if the log has it. `step 3: {...}`: slime's metrics of a rollout are assigned to the first "
    "optimizer step on it",
    order=2,
)
class PrintedDicts:
    def __init__(self) -> None:
        self.every = 1  # steps from one row without a step to the next
        self._counted = self._is_set = False
        self._bar = (0, 0)  # total and count of the longest bar; it runs ahead where the output is buffered
        self._trained: int | None = None  # the last optimizer step, where these are logged apart

    @property
    def total(self) -> int:
        """The steps of the run by its bar; 0 without one, or if the log has the setting."""
        return 0 if self._is_set else self._bar[0]

    def sniff(self, text: bytes) -> bool:
        return LIKELY.search(text) is not None or (not self._counted and UNIT.search(text) is not None)

    def rows(self, text: str) -> Iterator[Row]:
        if not self._counted:
            if found := EVERY.search(text):
                self.every, self._is_set = int(found[1]) or self.every, self._is_set or int(found[1]) > 0
            bars = (bar for bar in bars_in(text) if not bar.title.strip())
            self._bar = max([self._bar, *((bar.total, bar.at) for bar in bars)])
        for words, record in dictionaries_in(text):
            if SUMMARY in record or not _are_metrics(record):
                continue
            step, values = row_of(record)
            if (step := self._step(words, step)) is None and not self._counted:
                self._counted = True
                self.every = max(self.every, self._bar[1])
            yield step, values

    def _step(self, words: str, own: int | None) -> int | None:
        """Returns the step that the words in front of a dictionary give it; else its own."""
        if found := OF_ROLLOUT.search(words):
            return int(found[1]) if self._trained is None else self._trained + 1
        if counts := step_counts(words):
            own = self._trained = int(counts[0][1])
        return own


def _are_metrics(values: Mapping[str, object]) -> bool:
    """Returns True for a row of metrics, False for a printed config, which may have a learning rate."""
    if any("/" in name or name.startswith("eval_") for name in values):
        return True
    return sum(quantity_of(name) is not None for name in values) > 1
