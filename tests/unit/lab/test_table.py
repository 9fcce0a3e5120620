import io
import json

import pytest
from rich.console import Console

from tests.unit.lab.made_variants import summary, variant
from verl_ext.lab.summary import Variant
from verl_ext.lab.table import Experiment, results_text

NONE = Variant(
    "none",
    ("stability=none",),
    {
        0: summary(
            0.2, peak=0.6, collapsed=100, k3_start=1e-3, k3_before=0.7, warned=60, warning=25, grad_norm_max=30.0
        ),
        1: summary(0.4, peak=0.5, k3_start=3e-3, k3_before=0.5, grad_norm_max=10.0),
        2: summary(0.3, peak=0.6, collapsed=120, k3_start=2e-3, k3_before=0.6, warned=100, warning=15),
    },
)
WIDE = 148  # columns that all of the table fits in
VARIANTS = [
    NONE,
    variant("tis", [0.7, 0.71, 0.69], {3: "the experts are gone"}, dropped=0.0, warned=5),
    variant("exact", [0.9, 0.92, 0.91], k3_start=0.0),
    variant("a_rather_long_name+icepop", [0.6, 0.3], dropped=0.021),
]


def drawn(width: int, encoding: str = "utf-8", variants=VARIANTS) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width).print(Experiment(variants))
    file.flush()
    return raw.getvalue().decode(encoding)


def texts(variants) -> dict[str, dict[str, str]]:
    """Returns the cells by the variant's name and the column's title."""
    experiment = Experiment(variants)
    titles = [column.title for column in experiment.columns]
    return {row.name: dict(zip(titles, (cell.text for cell in row.cells), strict=True)) for row in experiment.rows}


def cells(name: str) -> dict[str, str]:
    return texts(VARIANTS)[name]


def test_cells_of_a_variant_that_collapsed():
    none = cells("none")
    assert none["final reward"].startswith("0.30 ±0.2") and none["against none"] == "-"
    assert none["against exact"].startswith("-0.61 ±") and none["against exact"].endswith("*")
    assert none["collapsed"] == "2/3 @110" and none["warning"] == "+20"
    assert none["k3, start"] == "2.0e-03" and none["k3, before"] == "6.0e-01"
    assert none["grad norm, max"] == "20" and none["dropped"] == none["skipped"] == "-"


def test_cells_of_variants_that_lived():
    tis = cells("tis")
    assert tis["collapsed"] == "0/3" and tis["warning"] == "3 false" and tis["dropped"] == "0.0 %"
    assert tis["against none"].startswith("+0.40 ±") and cells("exact")["k3, start"] == "0.0e+00"
    assert cells("exact")["warning"] == "-"


def test_rows_stand_in_order_the_baseline_marked_and_failures_told():
    found = Experiment(VARIANTS).rows
    assert [row.label for row in found] == ["exact", "tis; 1 failed", "a_rather_long_name+icepop", "none, baseline"]
    verdicts = [cell.verdict for row in found for cell in row.cells[1:2]]
    assert verdicts == ["better", "better", "", ""]


@pytest.mark.parametrize("width", [80, 100, WIDE, 200])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width):
    text = drawn(width)
    assert max(map(len, text.splitlines())) <= width and "\x1b" not in text and "…" not in text
    for part in ("0.30 ±0.2", "2/3 @110", "2.0e-03", "3 false"):
        assert part in text
    assert ("rollbacks" in text.split("collapsed: runs")[0]) == (width >= WIDE)
    assert text.index("exact") < text.index("tis") < text.index("none, base")


def test_in_ascii_where_the_terminal_has_no_utf8():
    assert drawn(80, "ascii").isascii() and "+/-" in drawn(80, "ascii")


def test_a_variant_without_any_run_has_a_row():
    failed = [*VARIANTS, Variant("gone", (), {}, {0: "no", 1: "no"})]
    assert "2 failed" in drawn(80, variants=failed)


def test_the_json_holds_the_table_and_every_seed():
    found = json.loads(results_text(Experiment(VARIANTS).results({"regime": "stale"})))
    assert found["regime"] == "stale" and found["findings"] == Experiment(VARIANTS).findings
    by_name = {each["name"]: each for each in found["variants"]}
    assert list(by_name) == ["exact", "tis", "a_rather_long_name+icepop", "none"]
    none = by_name["none"]
    assert none["collapsed"] == {"share": pytest.approx(2 / 3), "of": 3, "at": {"0": 100, "2": 120}}
    assert none["ended_early"] == {"share": 0, "of": 3, "at": {}, "reward_then": None}
    mean = none["means"]["final"]
    assert mean["low"] < 0.3 < mean["high"] and mean["mean"] == pytest.approx(0.3) and mean["seeds"] == 3
    assert none["runs"]["1"]["final"] == 0.4 and none["runs"]["1"]["collapsed"] is None
    assert none["means"]["dropped"] is None and none["overrides"] == ["stability=none"]
    assert none["final_against_exact"]["high"] < 0
    assert by_name["tis"]["failed"] == {"3": "the experts are gone"}
    assert by_name["tis"]["final_against_none"]["seeds"] == 3 and none["final_against_none"] is None


ENDED = Variant("guard", (), {0: summary(0.9), 1: summary(None, last=0.6, stopped=38), 2: summary(None, stopped=60)})
ALL_ENDED = Variant("skip", (), {0: summary(None, last=0.3, stopped=50)})


def test_runs_that_the_guard_ended_early_are_an_outcome_of_their_own():
    variants = [*VARIANTS, ENDED, ALL_ENDED]
    by_name = texts(variants)
    assert list(by_name) == ["exact", "tis", "a_rather_long_name+icepop", "none", "guard", "skip"]
    guard, skip = by_name["guard"], by_name["skip"]
    assert guard["ended early"] == "2/3 @49" and guard["reward then"] == "0.60" and guard["collapsed"] == "0/1"
    assert skip["ended early"] == "1/1 @50" and skip["collapsed"] == "-", "never 0 of 1"
    for row in (guard, skip):
        assert row["final reward"] == row["against none"] == row["against exact"] == "-"
    assert by_name["tis"]["ended early"] == "0/3"
    for width in (80, 100, 200):
        text = drawn(width, variants=variants)
        assert max(map(len, text.splitlines())) <= width and "2/3 @49" in text
        assert "such a run has no final reward" in " ".join(text.lower().split())
    assert "ended early" not in drawn(200)
