"""Lines of other trainers: names with numbers, `step: 3, reward: 0.5`, `Step 12 | Loss: 0.1 | Mismatch KL: 1e-4`,
`time: 7.2s   rewards: tensor([1., 0.])`.

Any text has names and numbers somewhere, so a line counts only if one of its names is a known metric's.
"""

import re
from collections.abc import Iterator

from verl_ext.diagnosis.names import quantity_of
from verl_ext.report.sources.text import Row, register_format

NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
PAIR = re.compile(
    rf"(?:^|[|,;\t]|\s\s|\s-\s|\]\s?)\s*([A-Za-z][\w ./@%()-]{{0,60}}?)\s*[:=]\s*"
    rf"(?:({NUMBER})(?![\w.])|({NUMBER})(?=s\b|ms\b|%)|tensor\(\[([^\]]*)\])"
)
STEP = re.compile(r"(?i)(?:^|[\s\[|])(?:global[ _]?)?(?:step|iter|iteration|update|rollout)s?[ :=#]+(\d{1,12})\b")
LIKELY = re.compile(rb"(?i)(?:reward|score|loss|entropy|grad|kl)[\w ./@%()-]{0,40}[:=]\s*(?:[-+]?[\d.]|tensor\(\[)")
REWARDS = ("reward", "rewards", "score", "scores")
LONGEST_LINE = 4000  # characters; a longer one is an answer or a config


@register_format("lines of names and numbers of another trainer")
class Pairs:
    def __init__(self) -> None:
        self._stepped: bool | None = None  # whether the rows of this log have steps

    def sniff(self, text: bytes) -> bool:
        return LIKELY.search(text) is not None

    def rows(self, text: str) -> Iterator[Row]:
        row = self._row(text) if len(text) < LONGEST_LINE else None
        if row is None:
            return
        step, _ = row
        if self._stepped is None:
            self._stepped = step is not None
        if self._stepped == (step is not None):
            yield row

    def _row(self, line: str) -> Row | None:
        values: dict[str, float] = {}
        for name, plain, with_unit, tensor in PAIR.findall(line):
            key = re.sub(r"[ .]+", "_", name.strip().lower())
            if tensor:
                values |= _tensor_values(key, [float(each) for each in re.findall(NUMBER, tensor)])
            else:
                values[key] = float(plain or with_unit)
        known = [name for name in values if quantity_of(name) is not None]
        if not known:
            return None
        found = STEP.search(line)
        return (None if found is None else int(found[1])), values


def _tensor_values(name: str, values: list[float]) -> dict[str, float]:
    """Returns mean, maximum and minimum of a printed tensor; those of rewards under verl's names."""
    if not values:
        return {}
    start = "critic/score" if name in REWARDS else name
    return {f"{start}/mean": sum(values) / len(values), f"{start}/max": max(values), f"{start}/min": min(values)}
