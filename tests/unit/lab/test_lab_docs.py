"""docs/lab.md names every regime with its settings and defaults."""

import re
from dataclasses import asdict

from tests import ROOT
from verl_ext.lab.regimes import REGIMES

SETTING = re.compile(r"`(?:lab\.\w+\.)?(\w+)=([\w.]+)`")


def test_the_table_of_regimes_is_the_codes():
    lines = [line.strip("|").split("|") for line in (ROOT / "docs" / "lab.md").read_text(encoding="utf-8").splitlines()]
    rows = {cells[0].strip(" `"): cells[1:] for cells in lines if len(cells) == 3}
    shown = {name: (dict(SETTING.findall(rows[name][0])), rows[name][1].strip()) for name in REGIMES}
    usual = {
        name: ({key: str(value).lower() for key, value in asdict(regime.settings()).items()}, regime.stands_for)
        for name, regime in REGIMES.items()
    }
    assert shown == usual
