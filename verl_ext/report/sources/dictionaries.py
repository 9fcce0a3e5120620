"""Dictionaries and JSON objects of names with numbers, one a line: TRL and ms-swift `{'loss': '0.1', 'reward': 0.5}`;
slime and miles `rollout 3: {'rollout/raw_reward': 0.5}`, with their own number in front.

slime counts rollouts and the optimizer steps on them separately. The steps are the axis here: values of a rollout
belong to the first step on it.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping

from verl_ext.diagnosis.names import quantity_of
from verl_ext.report.sources.cells import SUMMARY, numbers_of, step_in, without_step
from verl_ext.report.sources.table import Row, flat
from verl_ext.report.sources.text import register_format

NAME = r"""["'][\w./@ -]{1,200}["']\s?:\s?"""
DECODER = json.JSONDecoder()
START = re.compile(rf"(?:\b(step|rollout|perf|eval) (\d{{1,12}}): )?(\{{{NAME})")
ROW = re.compile(rf"(?m)(?:\{{|^[ \t]*){NAME}[\"'\d.+{{n-]".encode())
ELIDED = re.compile(r"\.\.\.,?")
FEWEST_BARE = 3  # names of a dictionary whose beginning is cut off
# What says how many steps are between two rows of transformers' trainers: a setting, or its bar, which has no title.
EVERY_TEXT = (
    r"logging_steps['\"]?\s?[:= ]\s?(\d{1,6})\b|^[ \t]{0,80}\d{1,3}%(?:\|[^|\n]{0,200}\|)?\s(\d{1,12})/(\d{1,12})\s\["
)
EVERY, EVERY_BYTES = re.compile(EVERY_TEXT), re.compile(EVERY_TEXT.encode(), re.MULTILINE)
WRAPPED = re.compile(r"\b[A-Za-z_][\w.]*\(([-+.\w]+)(?:, [^()]*)?\)")  # np.float64(0.5), tensor(0.5, device='cuda:0')
BARE = re.compile(r"(?<=[:,\[( ])(nan|inf|-inf)(?=[,\])}])")
LONGEST_DICTIONARY = 1 << 20  # characters of a dictionary
MOST_BROKEN = 100  # beginnings without an end, after which the rest of a line is no dictionary


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
        return ROW.search(text) is not None or (not self._counted and EVERY_BYTES.search(text) is not None)

    def rows(self, text: str) -> Iterator[Row]:
        if not self._counted and (found := EVERY.search(text)):
            setting, count, total = (int(each or 0) for each in found.groups())
            self.every, self._is_set = setting or self.every, self._is_set or setting > 0
            self._bar = max(self._bar, (total, count))
        if len(re.findall(NAME, text)) >= FEWEST_BARE and text.lstrip()[:1] in "'\"":
            text = "{" + text
        broken = 0
        for found in START.finditer(text):
            values = parse(text, found.start(3))
            broken += values is None
            if broken > MOST_BROKEN:
                return
            if values and SUMMARY not in values and _are_metrics(values):
                step = self._step(found[1], found[2], values)
                if step is None and not self._counted:
                    self._counted = True
                    self.every = max(self.every, self._bar[1])
                yield step, without_step(values)

    def _step(self, kind: str | None, number: str | None, values: Mapping[str, object]) -> int | None:
        if kind == "step":
            self._trained = int(number or 0)
            return self._trained
        if kind is not None:
            return int(number or 0) if self._trained is None else self._trained + 1
        return step_in(values)


def _are_metrics(values: Mapping[str, object]) -> bool:
    """Returns True for a row of metrics, False for a printed config, which may have a learning rate."""
    if any("/" in name or name.startswith("eval_") for name in values):
        return True
    return sum(quantity_of(name) is not None for name in values) > 1


def parse(text: str, start: int = 0) -> dict[str, float] | None:
    """Returns the numbers of the dictionary that begins at this place of the text; None if it is cut, or has none.

    Numbers may be strings, as TRL 1.0 prints them. Nothing is evaluated but literals.
    """
    try:
        return numbers_of(dict(flat(DECODER.raw_decode(text, start)[0]))) or None
    except (ValueError, RecursionError):
        pass
    end = text.find("}", start, start + LONGEST_DICTIONARY)
    if end < 0:
        return None
    literal = BARE.sub(r"'\1'", WRAPPED.sub(r"\1", ELIDED.sub("", text[start : end + 1])))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a number that runs into a word
            return numbers_of(ast.literal_eval(literal)) or None
    except (ValueError, SyntaxError, MemoryError, RecursionError, AttributeError):
        return None
