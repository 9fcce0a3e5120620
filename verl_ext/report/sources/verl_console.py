"""The console output of verl, of any version: `step:12 - actor/lr:1e-06 - critic/score/mean:np.float64(0.5) - ...`."""

import re
from collections.abc import Iterator

from verl_ext.report.sources.numbers import WRAPPED
from verl_ext.report.sources.table import Row
from verl_ext.report.sources.text import register_format

STEP = re.compile(r"step:(\d{1,15}) - ")  # begins with plain letters, so that it is searched for fast
STEP_BYTES = re.compile(STEP.pattern.encode())
NUMBER = re.compile(rf"{WRAPPED}\b")
SCALED = re.compile(r"(.+)\((\d+e-?\d+)\)")  # actor/lr(1e-4):0.010, before verl 0.2


@register_format(
    "verl's console output",
    example="run.log, slurm-1.out slurm-2.out, -",
    remarks="of any version, whole or cut; may contain colours, Ray's prefixes, a progress bar and lines of other "
    "processes. Give several logs of one run together, in any order",
    order=1,
)
class VerlConsole:
    def sniff(self, text: bytes) -> bool:
        return STEP_BYTES.search(text) is not None

    def rows(self, text: str) -> Iterator[Row]:
        # Several rows share a line if two processes wrote at once. `training/global_step:12 - ` is a metric.
        found = [each for each in STEP.finditer(text) if not _is_in_a_name(text, each.start())]
        ends = [*(each.start() for each in found[1:]), len(text)]
        for each, end in zip(found, ends, strict=False):
            values = dict(_pairs_of(text[each.end() : end]))
            if any("/" in name for name in values):  # else it is a sentence of a prompt or an answer
                yield int(each[1]), values


def _is_in_a_name(text: str, at: int) -> bool:
    before = text[at - 1 : at]
    return before.isalpha() or before in ("_", "/")


def _pairs_of(pairs: str) -> Iterator[tuple[str, float]]:
    whole = pairs.split(" - ")
    if not pairs.endswith(("\n", "\r")):
        del whole[-1]  # the line was cut, so its last number may be too: 1e-06 would be 1
    for pair in whole:
        name, colon, text = pair.rpartition(":")
        try:
            value = float(text[text.rfind("(") + 1 : -1] if text[-1:] == ")" else text)
        except ValueError:
            if (found := NUMBER.match(text)) is None:
                continue
            value = float(found[1])
        if name[-1:] == ")" and (scaled := SCALED.fullmatch(name)):
            name, value = scaled[1], value * float(scaled[2])
        if colon:
            yield name, value
