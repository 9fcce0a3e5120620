"""Names with numbers, as programs and people print them: one recogniser for all readers of lines, and the step's words.

| in a line | example |
|---|---|
| pairs | `Loss: 0.1 | kl=2e-4`, `time: 7.2s   rewards: tensor([1., 0.])`, or between commas behind a progress bar |
| a name before its number | `Reward 0.5, KL 0.1, Loss 0.2`; cells of a box by turns, `│ reward/avg │ 0.5 │` |
| a dictionary | `{'loss': '0.1', 'reward': np.float64(0.5)}` |
| a JSON object | `{"train": {"reward": 0.5}}` |
| the step, in words | `Step 3/100`, `iteration=7`, `rollout 3:`; not `micro step 3` |
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.diagnosis.names import normal, quantity_of
from verl_ext.report.sources.table import STEP_NAMES, Row, flat, step_name, whole_step

NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
WRAPPED = rf"(?:[A-Za-z_][\w.]*\()?({NUMBER})"  # np.float64(0.5), tensor(0.5, device='cuda:0')
DECORATION = " *`~$\t"  # of a cell in Markdown
GROUPED = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?"
THOUSANDS, IN_LINE = re.compile(rf"[-+]?{GROUPED}"), re.compile(rf"(?<=[:=|\s])[-+]?{GROUPED}(?![\w.]|,\d)")
# `grad_norm is not finite`, `the KL is NaN`: a word or two and what they are.
NOT_FINITE = re.compile(
    r"(?i)\b((?:[a-z][\w./@-]{0,60} )?[a-z][\w./@-]{0,60}) (?:is|are) (?:not finite|non-?finite|nan|inf(?:inite)?)\b"
    r"(?:\s?[:=]\s?(?:nan|inf)\b)?"
)
TRUTH = {"true": 1.0, "false": 0.0}
BOX = re.compile(r"[|│┃║]")  # the lines between the cells of Markdown, psql and rich
PAIR = re.compile(
    r"(?:^|[|,;\t]|\s\s|\]\s?|\s(?=[A-Za-z][\w./@%]{0,60}[:=]\S))\s*([A-Za-z][\w ./@%()-]{0,60}?)\s*[:=]\s*[`~]?"
    rf"(?:({NUMBER})(?![\w.%])|({NUMBER})(?=m?s\b)|({NUMBER})\s?%|tensor\(\[([^\]]*)\])"
)
CELL = re.compile(rf"([A-Za-z][\w ./@%()-]{{0,60}}?)\s+({NUMBER})(%?)")  # between two `|`: Reward 0.5
FEWEST_LISTED = 3  # such cells between commas; fewer are a sentence
REWARDS = ("reward", "rewards", "score", "scores")
COUNTERS = ("step", "global_step", "iteration", "iter", "update", "rollout", "epoch")
STEP = re.compile(
    r"(?i)(?:^|[\s\[|,(])(?:global[ _]?)?(?:step|iter|iteration|update|rollout)s?[ :=#]+"
    r"(\d{1,12})(?![\dkM%]|[.,]\d)(?:\s?/\s*(\d{1,12}))?:?"
)
# A word in front makes it another count: `Micro Step 3/8`, `best step 12`, `total steps: 100`.
OTHER_COUNT = re.compile(r"(?i)\b(?:micro|mini|sub|inner|best|last|max|total|eval|per|of|every)[ _-]?$")
SUMMARY = "train_runtime"  # TRL's totals of the run, in its last entry
COLON = r"\s{0,40}:\s{0,40}"  # aligned numbers have many blanks; a bound, so that these take linear time
NAME = rf"""["']([\w./@ -]{{1,200}})["']{COLON}"""
DICTIONARY = re.compile(rf"\{{{NAME}")
ENTRY = re.compile(rf"""["']([^"'\n]{{1,200}})["']{COLON}["']?{WRAPPED[:-1]}(?:/\d+)?)(?=["'\s,)}}\]])""")
FEWEST_BARE = 3  # names of a dictionary whose beginning is cut off
# What is below a heading belongs to it: `## val accuracy`, `=== Validation results: ===`.
SECTION = re.compile(r" {0,3}#{1,6}\s|[^\d:=]{3,60}:\s*$")
VALIDATION = re.compile(r"(?i)\b(?:valid|val\b|eval|test)")
LONGEST_DICTIONARY = 1 << 20  # characters
MOST_BROKEN = 100  # dictionaries that cannot be read, after which the rest of a line is left out
DECODER = json.JSONDecoder()


def number_of(text: str) -> float | None:
    """Returns the number that a text is; a percentage as a share; None if it is none."""
    text = text.strip(DECORATION)
    if THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return TRUTH.get(text.lower())


def split_cells(line: str, separator: re.Pattern[str]) -> list[str]:
    """Returns the cells of a line, without the lines of the frame at both ends."""
    cells = separator.split(line.strip())
    if separator is BOX:
        cells = cells[not cells[0].strip() :]
        cells = cells[: len(cells) - (bool(cells) and not cells[-1].strip())]
    return [cell.strip() for cell in cells]


def box_as_pairs(line: str) -> str:
    """Returns a line; as pairs, if it is a row of a box with names and numbers by turns."""
    cells = split_cells(line, BOX)
    names, values = cells[::2], cells[1::2]
    numbers = [number_of(cell) for cell in values]
    if not numbers or len(names) != len(numbers) or None in numbers or any(map(number_of, names)):
        return line
    # A step is a whole number, as it stands.
    pairs = zip(names, values, numbers, strict=True)
    return " | ".join(f"{name}: {value if value.isdigit() else number}" for name, value, number in pairs)


def named_numbers(line: str) -> dict[str, float]:
    """Returns the pairs of a line, and the numbers behind their names in its cells; none that counts steps."""
    values: dict[str, float] = {}
    line = IN_LINE.sub(lambda found: found[0].replace(",", ""), line)
    if " is " in line or " are " in line:
        for words in NOT_FINITE.findall(line):
            values[words if quantity_of(words) else words.rpartition(" ")[2]] = math.nan
        line = NOT_FINITE.sub("", line)
    for name, plain, timed, share, tensor in PAIR.findall(line):
        if tensor:
            values |= _tensor_values(name, [float(each) for each in re.findall(NUMBER, tensor)])
        elif (plain or timed or share) and name.lower().replace(" ", "_") not in COUNTERS:
            values[name] = float(share) / 100 if share else float(plain or timed)
    cells = [found for cell in line.split("|") if (found := CELL.fullmatch(cell.strip()))]
    listed = [found for cell in re.split("[|,]", line) if (found := CELL.fullmatch(cell.strip()))]
    for found in listed if len(listed) >= FEWEST_LISTED else cells:
        values.setdefault(found[1], float(found[2]) / (100 if found[3] else 1))
    return values


def _tensor_values(name: str, values: list[float]) -> dict[str, float]:
    """Returns mean, maximum and minimum of a printed tensor; those of rewards under verl's names."""
    if not values:
        return {}
    start = "critic/score" if name.lower() in REWARDS else name
    return {f"{start}/mean": sum(values) / len(values), f"{start}/max": max(values), f"{start}/min": min(values)}


def is_heading(line: str) -> bool:
    return any(map(SECTION.match, (line, line.strip(" |=-#*"))))


def section_of(heading: str) -> str:
    """Returns what a heading puts in front of the names below it."""
    return "validation/" if VALIDATION.search(heading) else ""


def dictionaries_in(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the words in front of each dictionary or JSON object of a line, and its numbers by name.

    One that is cut is left out. Nothing is evaluated.
    """
    if len(re.findall(NAME, text)) >= FEWEST_BARE and text.lstrip()[:1] in "'\"":
        text = "{" + text
    end = broken = 0
    while (found := DICTIONARY.search(text, end)) and broken <= MOST_BROKEN:
        start, words, record = found.start(), text[end : found.start()], None
        if found[0][1] == '"':
            try:
                record, end = DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                broken += 1
        if record is None and (end := text.find("}", start, start + LONGEST_DICTIONARY) + 1):
            record = dict(ENTRY.findall(text, start, end))
        end = end or found.end()
        if numbers := numbers_of(dict(flat(record or {}))):
            yield words, numbers
        else:
            broken += 1


def row_of(record: Mapping[Any, Any]) -> Row:
    """Returns the step of a record, None without one, and its other numbers."""
    name = step_name(each for each in record if isinstance(each, str))
    numbers = {name: value for name, value in numbers_of(record).items() if normal(name) not in STEP_NAMES}
    return None if name is None else whole_step(record[name]), numbers


def numbers_of(record: Mapping[Any, Any]) -> dict[str, float]:
    """Returns the entries that are numbers, or strings of numbers; of a step such as "12/200", the 12."""
    found = {}
    for name, value in record.items():
        if not isinstance(name, str) or isinstance(value, bool):
            continue
        if isinstance(value, str) and normal(name) in STEP_NAMES:
            value = whole_step(value)
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
    return found


def step_counts(line: str) -> list[re.Match[str]]:
    """Returns where a line has a step in words; the run's is the first, of several that count within each other."""
    counts = [each for each in STEP.finditer(line) if not OTHER_COUNT.search(line[: each.start()].rstrip())]
    return sorted(counts, key=lambda each: ("global" not in each[0].lower(), -int(each[2] or 0)))
