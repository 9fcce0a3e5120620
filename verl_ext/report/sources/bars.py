"""Progress bars with numbers behind them, as OpenRLHF prints its metrics: one bar a rollout, over its micro-batches.

`Train epoch [1/1]: 99%|###| 127/128 [23:32<00:06, 6.63s/it, pg=-0.07, rm=0.5, glen=7.28e+3, kl=0]`
"""

import re
from collections.abc import Iterator

from verl_ext.diagnosis.names import REWARD
from verl_ext.report.sources.lines import bars_in
from verl_ext.report.sources.numbers import named_numbers
from verl_ext.report.sources.table import Row, known_readings
from verl_ext.report.sources.text import register_format

SNIFFED = re.compile(rb"s?/(?:it|s), {1,4}\w{1,40}=[-+.\dn]")
FEWEST_KNOWN = 2  # quantities behind a bar of training, if the reward is not one


@register_format(
    "progress bars with numbers (OpenRLHF)",
    remarks="`Train epoch [1/1]: 100%|##| 128/128 [..., rm=0.5, glen=770, kl=0.1]`: a row is the mean over a bar that "
    "reached its end, and rows are counted from 1",
    order=7,
)
class Bars:
    def __init__(self) -> None:
        self._states: dict[int, dict[str, float]] = {}  # place in the bar -> what stands there
        self._total = 0

    def sniff(self, text: bytes) -> bool:
        return SNIFFED.search(text) is not None

    def rows(self, text: str) -> Iterator[Row]:
        for bar in bars_in(text):
            values = named_numbers(bar.numbers)
            known = known_readings([(None, values)])
            if len(known) < FEWEST_KNOWN and REWARD not in known:
                continue
            at, total = bar.at, bar.total
            again = self._states.get(total) == values  # a bar is printed again when it is closed
            if total != self._total or at < max(self._states, default=0) or (total in self._states and not again):
                self._states, self._total = {}, total
            self._states[at] = values
            if at == total and not again:
                names = dict.fromkeys(name for state in self._states.values() for name in state)
                columns = {name: [state[name] for state in self._states.values() if name in state] for name in names}
                yield None, {name: sum(column) / len(column) for name, column in columns.items()}
