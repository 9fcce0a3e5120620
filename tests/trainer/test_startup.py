"""The table that is printed once the engines stand."""

import pytest

from verl_ext.trainer.startup import Feature, print_table


@pytest.mark.parametrize(
    "setting",
    ["r: warn at val-core/[/math]/acc < 0.5", "r: stop at val-core/[math]/:smile: > 1", "[red]r: warn at a > 1"],
)
def test_what_looks_like_markup_is_printed_as_it_stands(capsys, setting):
    print_table([Feature("guard rule", setting, "log and event log")])
    assert setting in capsys.readouterr().out
