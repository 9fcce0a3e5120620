"""Progress bars with numbers behind them, as OpenRLHF prints its metrics: one bar a rollout, over its micro-batches.
Numbers in front of a bar are trlx's: one bar a run, over its steps.

`Train epoch [1/1]: 99%|###| 127/128 [23:32<00:06, 6.63s/it, pg=-0.07, rm=0.5, glen=7.28e+3, kl=0]`
`[losses/total_loss: 0.80 | losses/policy_loss: 0.73]:   2%|2    | 77/3200 [14:54<5:44:06, 6.61s/it]`
"""

import re
from collections.abc import Iterator

from verl_ext.diagnosis.names import REWARD, quantity_of
from verl_ext.report.sources.lines import bars_in
from verl_ext.report.sources.numbers import named_numbers
from verl_ext.report.sources.table import Row, known_readings
from verl_ext.report.sources.text import register_format

SNIFFED = re.compile(rb"s?/(?:it|s), {1,4}\w{1,40}=[-+.\dn]|[:=] ?[-+.\de]{1,20}\]?: {1,9}\d{1,3}%")
FEWEST_KNOWN = 2  # quantities behind a bar of training, if the reward is not one


@register_format(
    "progress bars with numbers (OpenRLHF, trlx)",
    remarks="`Train epoch [1/1]: 100%|##| 128/128 [..., rm=0.5, glen=770, kl=0.1]`: a row is the mean over a bar that "
    "reached its end, and rows are counted from 1. `[policy_loss: 0.7]: 2%|# | 77/3200`: the bar counts the steps",
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
            above = named_numbers(bar.title.strip(" []:"))
            if any(map(quantity_of, above)) and "epoch" not in bar.title.lower():
                yield bar.at, above
                continue
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
