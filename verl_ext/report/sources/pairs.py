"""Lines of other trainers: names with numbers, `step: 3, reward: 0.5`, `Step 12 | Loss: 0.1 | Mismatch KL: 1e-4`,
`time: 7.2s   rewards: tensor([1., 0.])`, cells of a box, `│ reward/avg │ 0.5 │ entropy/avg │ 0.3 │`; or several such
lines around a line that has the step, `=== Step 3/100 ===`, as NeMo-RL, AReaL and RLinf print them, or YAML, as EasyR1
does.

Any text has names and numbers somewhere. A line counts if one of its names is a known metric's, or if its block has
others; a log, if several of its lines do. A printed sample is no row, and what is below a heading for a validation
belongs to that.

A line with the step is a heading, or has metrics itself, or comes again with a larger step. All names below a heading
are its own. There may be anything between two of the others: known metrics below such a line are its own, but only what
is once below the first of them, because the reward of printed samples is there several times. If the first is directly
below a metric, those above are its own instead.
"""

import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from verl_ext.diagnosis.names import is_by_words, quantity_of
from verl_ext.report.sources.lines import BAR
from verl_ext.report.sources.numbers import (
    BOX,
    NUMBER,
    STEP,
    box_as_pairs,
    is_heading,
    named_numbers,
    section_of,
    step_counts,
)
from verl_ext.report.sources.table import Row
from verl_ext.report.sources.text import register_format

FRACTION = re.compile(
    r"\W{0,9}(?:\[[^\]\n]{1,60}\])?\W{0,9}(\d{1,9})\s?/\s?\d{1,9}\b"
)  # the step, in a line of a log without the word
SAMPLE = re.compile(
    r"(?i)\b(?:sample|example|prompt|answer|completion|generation|trajectory|question|problem)s?\W{0,2}"
    r"(?:(?:idx|id|no|index)\W)?\d"
)
# What may be in front of a heading's step: an epoch, or anything after a line of `===`.
HEADING = re.compile(r"(?i)[\W_]*(?:epoch[ :]*\d+(?:\s?/\s?\d+)?)?[\W_]*$|\s*[=*#~-]{3}.{0,60}$")
DIGITS = re.compile(r"\d+")
YAML = re.compile(rf"( *)([A-Za-z][\w/@.-]*):(?: +({NUMBER}))?\s*$")  # a name above others, or a name with its number
BULLET = re.compile("(?:^|\\s)[-*]\\s|\\s*[\u2022\u25aa\u25b8\u2192]\\s*")
LIKELY = re.compile(
    r"(?m)(?:[:=|]|│|┃) {0,80}[`~]?(?:[-+]?\.?\d|nan|inf|tensor\(\[)"
    r"|(?:[Ss][Tt][Ee][Pp]|[Ii]ter(?:ation)?)[ :=#]{1,9}\d|: {0,9}\r?$|[ \[/]\d{1,9}/\d".encode()
)
SETTINGS = ("actor/lr",)  # quantities that a config has too
MOST_SHAPES = 10_000  # that are remembered
LONGEST_LINE = 4000  # characters; a longer one is an answer or a config
Values: TypeAlias = dict[str, float]  # by name


@register_format(
    "names with numbers (prime-rl, NeMo-RL, AReaL, other trainers)",
    remarks="`Step 3 | Reward: 0.5 | Mismatch KL: 1e-4`, a list `Iter 3: Reward 0.5, KL 0.1, Loss 0.2`, a "
    "box of names and numbers, or such lines or YAML under `=== Step 3/100 ===`: lines with a known name. Also what is "
    "once between two lines with the step, such as `average reward: 0.5`",
    fewest=2,
    order=5,  # any text may have names with numbers
)
class Pairs:
    counts = False  # whether rows without a step are rows

    def __init__(self) -> None:
        self._step: int | None = None  # of the last line that has it
        self._heading = True  # whether the lines that have the step are headings
        self._held: Values = {}  # what stands in the last of them itself
        self._known = False  # whether a metric is known since the last heading
        self._section = ""  # of the names below a heading for a validation
        self._above: list[tuple[int, str]] = []  # indentation and name of what the next line of YAML may be in
        # Where they are no headings:
        self._shape = ""  # of these lines, if only their coming again shows that they have the step
        self._seen: dict[str, tuple[int, Values]] = {}  # what may be it: the first step, and what was above
        self._metrics: dict[str, set[float]] = {}  # known, on lines without a step, since the last line with one
        self._behind_a_metric = False  # whether the last line was of these
        self._values_above = False  # whether a line with the step belongs to what is above it
        self._names: set[str] | None = None  # what is once below the first one
        self._unknown: set[str] = set()  # shapes of lines without a known name, whatever is above them

    def sniff(self, text: bytes) -> bool:
        return LIKELY.search(text) is not None

    def rows(self, text: str) -> Iterator[Row]:
        if len(text) > LONGEST_LINE:
            return
        shape = DIGITS.sub("0", text)
        if shape in self._unknown and not (self._heading and self._step is not None):
            self._behind_a_metric = False
            return
        # A line may be likely by what is in front of it only. A bar's numbers are of its pieces.
        if not self.sniff(text.encode()) or BAR.search(text):
            return
        line = box_as_pairs(BOX.sub("|", BULLET.sub(" | ", text.rstrip())))
        if counts := step_counts(line):
            own, step = counts[0], int(counts[0][1])
            values = named_numbers(f"{line[: own.start()]} | {line[own.end() :]}")
            above = self._once() if self._behind_a_metric else {}
            known = _has_a_metric(values)
            self._section = "" if known else section_of(line)
            if known or HEADING.match(line[: min(each.start() for each in counts)]):
                yield from self._begin(step, values, above, heading=not known)
                if known:
                    yield step, values
            elif self._step is None or self._shape:
                yield from self._comes_again(shape, step, above)
            self._metrics, self._behind_a_metric = {}, False
        elif not STEP.search(line) and not SAMPLE.search(line):
            yield from self._rows_without_words(text, line, shape)

    def _comes_again(self, shape: str, step: int, above: Values) -> Iterator[Row]:
        """Takes a line with a count of steps and other words; it has the step if it came before, with a smaller one."""
        if len(self._seen) == MOST_SHAPES:
            self._seen.clear()
        first, first_above = self._seen.setdefault(shape, (step, above))
        if not self._shape and step > first:
            self._shape = shape
            yield from self._begin(first, {}, first_above)
        if shape == self._shape:
            yield from self._begin(step, {}, above)

    def _begin(self, step: int, values: Values, above: Values, heading: bool = False) -> Iterator[Row]:
        """Takes a line that has the step; yields what is above it, if that is its own, or what is once below the first
        such line that is no heading."""
        if self._heading and not heading:
            self._heading, self._values_above = False, bool(above)
        elif not (self._heading or self._values_above) and self._names is None and self._step is not None:
            self._names = set(once := self._once())
            if once:
                yield self._step, once
        if self._values_above and above:
            yield step, above
        self._step, self._held, self._known, self._above = step, values, False, []

    def _rows_without_words(self, text: str, line: str, shape: str) -> Iterator[Row]:
        """Yields the row of a line that does not name its step: that of the line above it, or a count."""
        if heading := is_heading(line):
            self._section = section_of(line)
        outer = self._outer(text)
        values = {self._full_name(outer, name): value for name, value in named_numbers(line).items()}
        known = _has_a_metric(name for name in values if not (self.counts and is_by_words(name)))
        found = FRACTION.match(line) if self.counts else None
        if found is None and self._heading and self._step is not None:
            self._known = self._known or known
            if values and self._known:
                yield self._step, self._held | values
                self._held = {}
        elif known and self.counts:
            if found or len(values) > 1:  # one alone is a line of a config
                self._heading = False
                yield int(found[1]) if found else None, values
        elif known:
            yield from self._metrics_below(values)
        self._behind_a_metric = known
        if not (known or heading or self._section or YAML.match(text)) and len(self._unknown) < MOST_SHAPES:
            self._unknown.add(shape)

    def _metrics_below(self, values: Values) -> Iterator[Row]:
        """Yields the row of a line with metrics that is somewhere below the last line that has the step."""
        for name in filter(quantity_of, values.keys() - self._held.keys()):
            self._metrics.setdefault(name, set()).add(values[name])
        if self._names is not None and self._step is not None:
            self._names -= self._metrics.keys() - self._once().keys()
            if found := {name: value for name, value in values.items() if name in self._names & self._metrics.keys()}:
                yield self._step, found

    def _once(self) -> Values:
        return {name: min(values) for name, values in self._metrics.items() if len(values) == 1}

    def _outer(self, text: str) -> str:
        """Returns the names that a line of YAML is in, as `outer/inner/`."""
        if (found := YAML.match(text)) is None:
            return ""
        self._above = [each for each in self._above if each[0] < len(found[1])]
        outer = "".join(f"{name}/" for _, name in self._above)
        if found[3] is None:
            self._above.append((len(found[1]), found[2]))
        return outer

    def _full_name(self, outer: str, name: str) -> str:
        known = quantity_of(name) is not None and quantity_of(outer + name) is None
        return self._section + name if known or not outer else outer + name


@register_format(
    "names with numbers, without a step",
    remarks="`time: 7.2s   rewards: tensor([...])`: rows are counted from 1",
    fewest=2,
    order=6,
)
class CountedPairs(Pairs):
    counts = True


def _has_a_metric(names: Iterable[str]) -> bool:
    return any(quantity and quantity.name not in SETTINGS for quantity in map(quantity_of, names))
