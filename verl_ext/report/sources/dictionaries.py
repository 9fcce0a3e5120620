"""Dictionaries of names with numbers. Printed, one a line: TRL and ms-swift `{'loss': '0.1', 'reward': 0.5}`; slime and
miles `rollout 3: {'rollout/raw_reward': 0.5}`, with their own number in front. Saved as JSON by TRL and transformers:
`trainer_state.json`, or a list of its log entries.

slime counts rollouts and the optimizer steps on them separately. The steps are the axis here: values of a rollout
belong to the first step on it.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.diagnosis.names import quantity_of
from verl_ext.report.run import ReportError
from verl_ext.report.sources.table import STEP_NAMES, whole_step
from verl_ext.report.sources.text import Row, register_format

START = re.compile(r"(?:\b(step|rollout|perf|eval) (\d{1,12}): )?(\{'[\w./@ -]{1,200}': )")
ROW = re.compile(rb"\{'[\w./@ -]{1,200}': ['\d.+-]")
SUMMARY = "train_runtime"  # TRL's totals of the run, in its last line
WRAPPED = re.compile(r"\b[A-Za-z_][\w.]*\(([-+.\w]+)(?:, [^()]*)?\)")  # np.float64(0.5), tensor(0.5, device='cuda:0')
LIST = re.compile(rb"\[\s*\{")
BARE = re.compile(r"(?<=[:,\[( ])(nan|inf|-inf)(?=[,\])}])")
LONGEST_DICTIONARY = 1 << 20  # characters of a dictionary


@register_format(
    "printed dictionaries (TRL, ms-swift, slime, miles)",
    remarks="`{'loss': '0.1', 'reward': 0.5}`: lines of TRL have no step, so they are counted from 1. `step 3: {...}`: "
    "slime's metrics of a rollout are assigned to the first optimizer step on it",
    order=2,
)
class PrintedDicts:
    def __init__(self) -> None:
        self._trained: int | None = None  # the last optimizer step, where these are logged apart

    def sniff(self, text: bytes) -> bool:
        return ROW.search(text) is not None

    def rows(self, text: str) -> Iterator[Row]:
        for found in START.finditer(text):
            values = parse(text[found.start(3) :])
            if values and SUMMARY not in values and _are_metrics(values):
                yield self._step(found[1], found[2], values), without_step(values)

    def _step(self, kind: str | None, number: str | None, values: Mapping[str, Any]) -> int | None:
        if kind == "step":
            self._trained = int(number or 0)
            return self._trained
        if kind is not None:
            return int(number or 0) if self._trained is None else self._trained + 1
        return step_in(values)


@register_format(
    "trainer_state.json (or a list of its log entries)",
    example="trainer_state.json",
    remarks="TRL and transformers. In a folder of checkpoints, the last checkpoint's file is read",
    document=True,
    endings=("trainer_state.json",),
    order=4,
)
class TrainerState:
    def sniff(self, text: bytes) -> bool:
        text = text.lstrip()
        return (text.startswith(b"{") and b'"log_history"' in text) or LIST.match(text) is not None

    def rows(self, text: str) -> Iterator[Row]:
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReportError(f"this is not whole JSON ({error}); is it still being written?") from None
        entries = read.get("log_history") if isinstance(read, dict) else read
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and SUMMARY not in entry:
                yield step_in(entry), without_step(numbers_of(entry))


def _are_metrics(values: Mapping[str, float]) -> bool:
    """Returns True for a row of metrics, False for a printed config, which may have a learning rate."""
    if any("/" in name or name.startswith("eval_") for name in values):
        return True
    return sum(quantity_of(name) is not None for name in values) > 1


def step_in(values: Mapping[str, Any]) -> int | None:
    """Returns the step among the values."""
    return next((step for name in STEP_NAMES if (step := whole_step(values.get(name))) is not None), None)


def without_step(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name not in STEP_NAMES}


def parse(text: str) -> dict[str, float] | None:
    """Returns the numbers of the dictionary at the beginning of the text; None if it is cut, or has none.

    Numbers may be strings, as TRL 1.0 prints them. Nothing is evaluated but literals.
    """
    end = text.find("}")
    if not 0 < end < LONGEST_DICTIONARY:
        return None
    literal = BARE.sub(r"'\1'", WRAPPED.sub(r"\1", text[: end + 1]))
    try:
        read = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return numbers_of(read) or None


def numbers_of(read: Mapping[Any, Any]) -> dict[str, float]:
    """Returns the entries that are numbers, or strings of numbers."""
    found = {}
    for name, value in read.items():
        if not isinstance(name, str) or isinstance(value, bool):
            continue
        if isinstance(value, str):
            value = value.partition("/")[0] if name in STEP_NAMES else value
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
    return found
