"""Every panel on every kind of run, and the panels' sentences."""

import io
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.support.examples import slow_cases
from tests.unit.report.made_runs import NAN, changed, full, make, prefix, thinned
from verl_ext.diagnosis.series import Series
from verl_ext.report.figures.columns import HEAT_COLUMNS, OTHER_STAGE, STAGES, share_chart, stage_seconds
from verl_ext.report.figures.panels import PANELS
from verl_ext.report.page import OVERVIEW_COLUMNS, overview, png, spec_of
from verl_ext.report.run import Run

PANEL = {panel.key: panel for panel in PANELS}
RUN = full(40, layers=3)
OF_EACH_SORT = ("vllm_kl", "router_agreement", "step_time")
EMPTY = make({"a/metric/of/no/panel": [1.0]})


def of(value: float) -> Run:
    return changed(RUN, lambda values: np.full_like(values, value))


def alternating(*two: float) -> Run:
    return changed(RUN, lambda values: np.resize(two, len(values)))


KINDS = {
    "one step": prefix(RUN, 1),
    "two steps": prefix(RUN, 2),
    "zeros": of(0.0),
    "negative": changed(RUN, lambda values: -np.abs(values)),
    "huge": of(1e300),
    "tiny": of(1e-300),
    "constant": of(0.5),
    "from tiny to huge": alternating(1e-300, 1e300),
    "half of it NaN": alternating(0.5, NAN),
    "half of it infinite": alternating(0.5, float("inf")),
    "10,000 steps": full(10_000, layers=2),
    "gaps in the steps": thinned(RUN, lambda name, steps: (steps < 4) | (steps % 10 == 0)),
    "every metric in other steps": thinned(RUN, lambda name, steps: steps % (3 + len(name) % 4) != 0),
    "layers missing in some steps": thinned(full(40, layers=94), lambda name, steps: (steps + len(name)) % 3 != 0),
}


def charts(run: Run) -> dict:
    return {panel.key: chart for panel in PANELS if (chart := panel.chart(run)) is not None}


def size(picture: bytes) -> tuple[int, int]:
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", picture[16:24])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", slow_cases(KINDS))
def test_every_panel_is_valid_and_can_be_drawn(kind):
    run = KINDS[kind]
    specs = {key: spec_of(chart) for key, chart in charts(run).items()}  # to_dict() in it validates
    assert specs.keys() == PANEL.keys()
    for key, spec in specs.items():
        assert len(json.dumps(spec, allow_nan=False)) < 1_000_000, key  # a browser's JSON knows no NaN
    for key in OF_EACH_SORT:
        width, height = size(png(specs[key], kind))
        assert width > 1120 and height > 440, key
    for panel in PANELS:
        assert "nan" not in panel.facts(run)


@pytest.mark.slow
def test_pictures_of_a_full_run_show_something_and_the_overview_holds_them_all():
    pictures = {key: png(spec_of(chart), "A title") for key, chart in charts(RUN).items()}
    for key, picture in pictures.items():
        width, height = size(picture)
        assert 1120 <= width <= 1600 and 440 <= height <= 800, key
        with Image.open(io.BytesIO(picture)) as image:
            assert len(image.convert("RGB").getcolors(1 << 20)) > 20, key
    width, height = size(overview(pictures, "A run µ 你"))
    assert width > 560 * OVERVIEW_COLUMNS and height > 220 * len(pictures) / OVERVIEW_COLUMNS
    assert size(overview(dict([*pictures.items()][:1]), "one"))[0] < 900


@pytest.mark.parametrize("run", [EMPTY, of(NAN)], ids=["other metrics", "all NaN"])
def test_nothing_is_drawn_or_said_of_what_was_not_logged(run):
    assert charts(run) == {} and all(panel.facts(run) == "" for panel in PANELS)


def test_a_panel_of_one_metric_among_several_draws_that_one():
    chart = PANEL["prob_diff"].chart(make({"vllm_kl/prob_diff_mean": [0.01, 0.02]}))
    labels = {row["label"] for rows in chart.to_dict()["datasets"].values() for row in rows}
    assert labels == {"mean"}


def rows(chart) -> list[dict]:
    (found,) = chart.to_dict()["datasets"].values()
    return found


def test_the_heat_map_has_the_mean_of_each_column_and_holes_where_nothing_was_logged():
    run = full(3 * HEAT_COLUMNS, layers=4)
    holes = thinned(run, lambda name, steps: (steps > 30) | ("layer_02" not in name))
    cells = {(row["layer"] + 0.5, row["step"] + 0.5): row for row in rows(PANEL["router_agreement"].chart(holes))}
    assert len(cells) == 4 * HEAT_COLUMNS - 10
    calculated = PANEL["router_agreement"].chart(holes).to_dict()["layer"][0]["transform"]
    assert [each["as"] for each in calculated] == ["below", "said"]
    values = run.metrics["router/agreement/layer_03"].values
    for column in (0, 7, HEAT_COLUMNS - 1):
        cell = cells[3, 1 + 3 * column]
        assert cell["value"] == pytest.approx(values[3 * column : 3 * column + 3].mean(), abs=1e-5)
        assert cell["end"] == pytest.approx(3.5 + 3 * column, abs=0.2)
    assert (2, 28) not in cells and (2, 31) in cells


def test_facts_tell_the_last_level_and_the_extremes_with_their_steps():
    values = np.full(30, 2e-4)
    values[[4, 11]] = 5e-3, 1e-6
    text = PANEL["vllm_kl"].facts(make({"vllm_kl/k3": values}))
    assert text.startswith(
        "Rollout KL, k3, nats per token: now 0.0002 (median of the last 5); "
        "highest 0.005 in step 5, lowest 1e-06 in step 12."
    )
    assert PANEL["reward"].facts(make({"critic/score/mean": [0.25]})) == (
        "Reward: now 0.25 (the last reading); highest 0.25 in step 1, lowest 0.25 in step 1."
    )
    dropped = PANEL["dropped"].facts(make({"correction/dropped": [0.01, 0.0123]}))
    assert dropped == "Tokens dropped: now 1.23 % (the last reading); highest 1.23 % in step 2, lowest 1 % in step 1."


def timed(steps: int = 4, **seconds) -> Run:
    metrics = {f"timing_s/{name}": [value] * steps for name, value in seconds.items()}
    return make(metrics)


@pytest.mark.parametrize(("layers", "ticks"), [(1, [0]), (2, [0, 1]), (94, list(range(0, 94, 8)))])
def test_the_layers_axis_has_only_numbers_of_layers(layers, ticks):
    run = make({f"router/agreement/layer_{layer:02d}": [0.99, 0.98] for layer in range(layers)})
    spec = PANEL["router_agreement"].chart(run).to_dict(validate=False)
    assert spec["layer"][0]["encoding"]["y"]["axis"]["values"] == ticks


def test_stages_sum_to_the_step():
    found = stage_seconds(timed(step=100.0, gen=50.0, old_log_prob=12.0, update_actor=20.0))
    assert found == pytest.approx({"rollout": 50, "old log-probs": 12, "update": 20, OTHER_STAGE[0]: 18})
    values = rows(share_chart(timed(step=100.0, gen=50.0, old_log_prob=12.0, update_actor=20.0)))
    for step in range(4):
        assert sum(row["seconds"] for row in values if row["step"] == step + 0.5) == pytest.approx(100)
    assert {row["of"] for row in values} == {100}


def test_a_step_without_an_update_counts_with_no_seconds_of_it():
    run = timed(step=100.0, gen=50.0, update_actor=20.0)
    update = run.metrics["timing_s/update_actor"]
    part = replace(run, metrics={**run.metrics, "timing_s/update_actor": Series(update.steps[:1], update.values[:1])})
    assert stage_seconds(part) == pytest.approx({"rollout": 50, "update": 5, OTHER_STAGE[0]: 45})
    seconds = {(row["step"] + 0.5, row["stage"]): row["seconds"] for row in rows(share_chart(part))}
    assert [seconds[step, "update"] for step in (1, 2, 3, 4)] == [20, 0, 0, 0]
    assert [seconds[step, OTHER_STAGE[0]] for step in (1, 2, 3, 4)] == [30, 50, 50, 50]


def test_stages_that_overlap_leave_no_negative_rest():
    run = timed(step=10.0, gen=9.0, update_actor=8.0)
    assert stage_seconds(run)[OTHER_STAGE[0]] == 0
    assert min(row["seconds"] for row in rows(share_chart(run))) == 0


def test_stages_are_drawn_in_their_order_and_the_facts_tell_their_shares():
    names = [name for name, _ in STAGES.values()]
    values = rows(share_chart(RUN))
    assert [row["stage"] for row in values[:: len(values) // 7]] == [*names, OTHER_STAGE[0]]
    text = PANEL["step_time"].facts(timed(step=100.0, gen=50.0, update_actor=20.0))
    assert text == (
        "Step time, s: now 100 (median of the last 2); highest 100 in step 1, lowest 100 in step 1. "
        "Of all steps together: rollout 50 %, update 20 %, everything else 30 %."
    )
    assert PANEL["step_time"].facts(timed(step=0.0)).endswith("lowest 0 in step 1.")
    assert "Step time, s: now 100 (the last reading)" in PANEL["step_time"].facts(timed(1, step=100.0))


def test_validation_sets_without_a_colour_are_named():
    run = make({f"val-core/set_{place}/acc": [0.1, 0.2] for place in range(8)})
    (panel,) = [panel for panel in PANELS if panel.key == "validation"]
    assert panel.facts(run) == "Not drawn, for lack of colours: set_6/acc, set_7/acc."
