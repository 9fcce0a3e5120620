"""Lines of other trainers: names with numbers, `step: 3, reward: 0.5`, `Step 12 | Loss: 0.1 | Mismatch KL: 1e-4`,
`time: 7.2s   rewards: tensor([1., 0.])`; or under a heading, `=== Step 3/100 ===`, as NeMo-RL prints them.

Any text has names and numbers somewhere. A line counts if one of its names is a known metric's, and if it has a step or
several pairs; a log, if several of its lines do.
"""

import re
from collections.abc import Iterator

from verl_ext.diagnosis.names import quantity_of
from verl_ext.report.sources.ends import BAR
from verl_ext.report.sources.text import Row, register_format

NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
PAIR = re.compile(
    r"(?:^|[|,;\t]|\s\s|\]\s?|\s(?=[A-Za-z][\w./@%]{0,60}=))\s*([A-Za-z][\w ./@%()-]{0,60}?)\s*[:=]\s*"
    rf"(?:({NUMBER})(?![\w.%])|({NUMBER})(?=m?s\b)|({NUMBER})\s?%|tensor\(\[([^\]]*)\])"
)
STEP = re.compile(
    r"(?i)(?:^|[\s\[|,])(?:global[ _]?)?(?:step|iter|iteration|update|rollout)s?[ :=#]+"
    r"(\d{1,12})(?![\dkM%]|[.,]\d)(?:/\d+)?:?"
)
# A word in front makes it another count: `Micro Step 3/8`, `best step 12`, `total steps: 100`.
OTHER_COUNT = re.compile(r"(?i)\b(?:micro|mini|sub|inner|best|last|max|total|train|eval|per|of|every)[ _-]?$")
HEADING = re.compile(rb"(?i)={3,}\s*step\s+\d+")
BULLET = re.compile("\\s-\\s|\\s*[\u2022\u25aa\u25b8\u2192]\\s*")
LIKELY = re.compile(rb"(?i)(?:reward|score|loss|entropy|grad|kl)[\w ./@%()-]{0,40}[:=]\s*(?:[-+]?[\d.]|tensor\(\[)")
REWARDS = ("reward", "rewards", "score", "scores")
COUNTERS = ("step", "global_step", "iteration", "iter", "update", "rollout")
LONGEST_LINE = 4000  # characters; a longer one is an answer or a config


@register_format(
    "names with numbers (prime-rl, NeMo-RL, other trainers)",
    remarks="`Step 3 | Reward: 0.5 | Mismatch KL: 1e-4`, `rewards: tensor([...])`: lines with a known name",
    fewest=2,
    order=5,  # any text may have names with numbers
)
class Pairs:
    def __init__(self) -> None:
        self._stepped: bool | None = None  # whether the rows of this log have steps
        self._heading: int | None = None  # the step of the last heading

    def sniff(self, text: bytes) -> bool:
        return LIKELY.search(text) is not None or HEADING.search(text) is not None

    def rows(self, text: str) -> Iterator[Row]:
        if len(text) > LONGEST_LINE or BAR.search(text):  # a bar's numbers are of its pieces
            return
        line = BULLET.sub(" | ", text.rstrip())
        steps = list(STEP.finditer(line))
        own = next((each for each in steps if not OTHER_COUNT.search(line[: each.start()].rstrip())), None)
        if steps and own is None:
            return
        step = None if own is None else int(own[1])
        rest = line if own is None else f"{line[: own.start()]} | {line[own.end() :]}"
        values = _pair_values(rest)
        if not any(quantity_of(name) is not None for name in values):
            if step is not None and HEADING.search(text.encode()):
                self._heading = step
            return
        step = self._heading if step is None else step
        if step is None and len(values) < 2:  # a line of a config
            return
        if self._stepped is None:
            self._stepped = step is not None
        if self._stepped == (step is not None):
            yield step, values


def _pair_values(line: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, plain, timed, share, tensor in PAIR.findall(line):
        key = re.sub(r"[ .]+", "_", name.strip().lower())
        if tensor:
            values |= _tensor_values(key, [float(each) for each in re.findall(NUMBER, tensor)])
        elif key not in COUNTERS:
            values[key] = float(plain or timed) if plain or timed else float(share) / 100
    return values


def _tensor_values(name: str, values: list[float]) -> dict[str, float]:
    """Returns mean, maximum and minimum of a printed tensor; those of rewards under verl's names."""
    if not values:
        return {}
    start = "critic/score" if name in REWARDS else name
    return {f"{start}/mean": sum(values) / len(values), f"{start}/max": max(values), f"{start}/min": min(values)}
