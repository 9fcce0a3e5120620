"""Lines of other trainers: names with numbers, `step: 3, reward: 0.5`, `Step 12 | Loss: 0.1 | Mismatch KL: 1e-4`,
`time: 7.2s   rewards: tensor([1., 0.])`, cells of a box, `│ reward/avg │ 0.5 │ entropy/avg │ 0.3 │`; or several such
lines around a line that has the step, `=== Step 3/100 ===`, as NeMo-RL, AReaL and RLinf print them, or YAML, as EasyR1
does.

Any text has names and numbers somewhere. A line counts if one of its names is a known metric's, or if its block has
others; a log, if several of its lines do. A printed sample is no row, and what is below a heading for a validation
belongs to that.

A line with the step has metrics itself, or is a heading, or comes again with a larger step. What is below it belongs to
it; what is directly above it does, if the first of lines that come again stands directly below a metric. All names below a heading count. There
may be anything below the others: only known metrics count, and only those that are once below the first of them. The
reward of a printed sample is there several times.
"""

import re
from collections.abc import Iterable, Iterator

from verl_ext.diagnosis.names import quantity_of
from verl_ext.report.sources.lines import BAR
from verl_ext.report.sources.numbers import BOX, NUMBER, STEP, box_as_pairs, named_numbers, step_counts
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
SECTION = re.compile(r"[^\d:=]{3,60}:\s*$")
VALIDATION = re.compile(r"(?i)\b(?:valid|eval|test)")
YAML = re.compile(rf"( *)([A-Za-z][\w/@.-]*):(?: +({NUMBER}))?\s*$")  # a name above others, or a name with its number
BULLET = re.compile("(?:^|\\s)[-*]\\s|\\s*[\u2022\u25aa\u25b8\u2192]\\s*")
LIKELY = re.compile(
    r"(?m)(?:[:=|]|│|┃) {0,80}[`~]?(?:[-+]?\.?\d|nan|inf|tensor\(\[)|(?:[Ss][Tt][Ee][Pp]|[Ii]ter(?:ation)?)[ :=#]{1,9}\d|: {0,9}\r?$"
    r"|[ \[/]\d{1,9}/\d".encode()
)
SETTINGS = ("actor/lr",)  # quantities that a config has too
MOST_SHAPES = 10_000  # that are remembered
LONGEST_LINE = 4000  # characters; a longer one is an answer or a config


@register_format(
    "names with numbers (prime-rl, NeMo-RL, AReaL, other trainers)",
    remarks="`Step 3 | Reward: 0.5 | Mismatch KL: 1e-4`, a list `Iter 3: Reward 0.5, KL 0.1, Loss 0.2`, a "
    "box of names and numbers, or such lines or YAML under `=== Step 3/100 ===`: lines with a known name",
    fewest=2,
    order=5,  # any text may have names with numbers
)
class Pairs:
    counts = False  # whether rows without a step are rows

    def __init__(self) -> None:
        self._step: int | None = None  # of the last line that has it
        self._heading = True  # whether these lines are headings
        self._shape = ""  # of such a line, if it is known only because it came again
        self._seen: dict[str, tuple[int, dict[str, float]]] = {}  # what may be its shape: its step, what was above
        self._values_above = False
        self._metrics: dict[str, set[float]] = {}  # values of each known name since the last line with a count of steps
        self._names: set[str] | None = None  # those that are once below the first line that has the step
        self._behind_a_metric = False  # whether the line before had one, and no step
        self._section = ""  # of the names below a heading for a validation
        self._known = False  # whether a metric is known since the last heading
        self._held: dict[str, float] = {}  # what stands in the heading itself
        self._above: list[tuple[int, str]] = []  # indentation and name of what the next line of YAML may be in
        self._unknown: set[str] = set()  # shapes of lines without a known name, whatever is above them

    def sniff(self, text: bytes) -> bool:
        return LIKELY.search(text) is not None

    def rows(self, text: str) -> Iterator[Row]:
        if len(text) > LONGEST_LINE:
            return
        shape = DIGITS.sub("0", text)
        if shape in self._unknown and not self._below_a_heading:
            self._behind_a_metric = False
            return
        # A line may be likely by what is in front of it only. A bar's numbers are of its pieces.
        if not self.sniff(text.encode()) or BAR.search(text):
            return
        line = box_as_pairs(BOX.sub("|", BULLET.sub(" | ", text.rstrip())))
        if counts := step_counts(line):
            own, step = counts[0], int(counts[0][1])
            values = named_numbers(f"{line[: own.start()]} | {line[own.end() :]}")
            known = _has_a_metric(values)
            if known or HEADING.match(line[: min(each.start() for each in counts)]):
                yield from self._begin(step, values, known)
                if known:
                    yield step, values
            elif self._step is None or self._shape:
                yield from self._comes_again(shape, step)
            self._metrics = {name: {value} for name, value in values.items()} if known else {}
            self._section = "validation/" if not known and VALIDATION.search(line) else ""
            self._behind_a_metric = False
        elif not STEP.search(line) and not SAMPLE.search(line):
            yield from self._rows_without_words(text, line, shape)

    @property
    def _below_a_heading(self) -> bool:
        return self._heading and self._step is not None

    def _begin(self, step: int, values: dict[str, float], known: bool) -> Iterator[Row]:
        """Takes a line that has the step; yields what the first line of this kind has once below it."""
        if not self._heading and self._names is None:
            self._names = set(once := self._once())
            if once and self._step is not None:
                yield self._step, once
        self._step, self._heading = step, self._heading and not known
        self._known, self._held, self._above = False, values, []

    def _comes_again(self, shape: str, step: int) -> Iterator[Row]:
        """Takes a line with a count of steps and other words; it has the step if it came before, with a smaller one."""
        above = self._once() if self._behind_a_metric else {}
        first, first_above = self._seen.setdefault(shape, (step, above))
        if self._shape == shape or (not self._shape and step > first):
            if not self._shape:
                self._shape, self._heading = shape, False
                self._values_above = bool(first_above)
                if self._values_above:
                    yield first, first_above
            if not self._values_above:
                yield from self._begin(step, {}, known=True)
            elif above:
                yield step, above

    def _once(self) -> dict[str, float]:
        return {name: min(values) for name, values in self._metrics.items() if len(values) == 1}

    def _rows_without_words(self, text: str, line: str, shape: str) -> Iterator[Row]:
        """Yields the row of a line that does not name its step: that of the line above it, or a count."""
        if section := SECTION.match(line.strip(" |=-#*")):
            self._section = "validation/" if VALIDATION.search(line) else ""
        outer = self._outer(text)
        values = {self._full_name(outer, name): value for name, value in named_numbers(line).items()}
        known = _has_a_metric(values)
        found = FRACTION.match(line) if self.counts else None
        if found is None and self._below_a_heading and self._step is not None:
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
        if not (known or section or self._section or YAML.match(text)) and len(self._unknown) < MOST_SHAPES:
            self._unknown.add(shape)

    def _metrics_below(self, values: dict[str, float]) -> Iterator[Row]:
        """Yields the row of a line with metrics that is somewhere below the last line that has the step."""
        for name in filter(quantity_of, values):
            self._metrics.setdefault(name, set()).add(values[name])
        if self._names is not None and self._step is not None:
            self._names -= self._metrics.keys() - self._once().keys()
            if found := {name: value for name, value in values.items() if name in self._names}:
                yield self._step, found

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
