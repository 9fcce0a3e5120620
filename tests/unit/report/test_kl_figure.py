"""The KL between the engines: signs, thresholds, growth and its prediction, and the guard's actions."""

import math

import numpy as np
import pytest

from tests.unit.report.made_runs import event, full, make
from verl_ext.diagnosis.findings.guard import boundary_of, growth_clause
from verl_ext.report.figures.charts import INK, ORANGE
from verl_ext.report.figures.kl import AHEAD_SHARE, MARK_STRETCHES, kl_chart

RATE = 0.1
GROWING = 1e-4 * np.exp(RATE * np.arange(1, 61))  # passes 0.1 in step 70


def layers(run) -> list[tuple[dict, dict, list[dict]]]:
    """Returns the mark, the encoding and the data of each layer of the figure, of which lines draw a part."""
    spec = kl_chart(run).to_dict()
    found = []
    for layer in spec["layer"]:
        rows = spec["datasets"][layer["data"]["name"]]
        for change in layer.get("transform", ()):
            rows = [row for row in rows if row["label"] in change["filter"]["oneOf"]]
        found.append((layer["mark"], layer["encoding"], rows))
    return found


def line(run, label: str) -> dict[int, float]:
    """Returns the points of the line with this label that is drawn at full strength."""
    strong = [data for mark, _, data in layers(run) if mark["type"] == "line" and mark.get("strokeWidth") == 2]
    found = {row["step"]: row["value"] for data in strong for row in data if row.get("label") == label}
    assert found, label
    return found


def ahead(run) -> list[list[dict]]:
    """Returns the dotted line from the last reading on, and its end point, if they are drawn."""
    dotted = [data for mark, _, data in layers(run) if mark.get("strokeDash") == [2, 3]]
    points = [data for mark, _, data in layers(run) if mark.get("shape") == "diamond" and mark.get("color") == INK]
    return [*dotted, *points]


def marks(run) -> list[dict]:
    found = []
    for _, encoding, data in layers(run):
        if "shape" in encoding:
            found += [{**row, "height": encoding["y"]["value"]} for row in data]
    return found


def domain(run) -> list[int]:
    return layers(run)[0][1]["x"]["scale"]["domain"]


def test_k1_is_drawn_by_its_size_and_hollow_exactly_where_it_is_negative():
    k1 = [1e-4, -2e-4, 0.0, -3e-5, 4e-5]
    run = make({"vllm_kl/k1": k1, "vllm_kl/k3": [1e-4] * 5})
    assert line(run, "|k1|, hollow: negative") == pytest.approx({1: 1e-4, 2: 2e-4, 4: 3e-5, 5: 4e-5})
    ((_, _, hollow),) = [layer for layer in layers(run) if layer[0].get("stroke") == ORANGE]
    assert {row["step"]: row["value"] for row in hollow} == pytest.approx({2: 2e-4, 4: 3e-5})
    positive = make({"vllm_kl/k1": np.abs(k1)})
    assert not [layer for layer in layers(positive) if layer[0].get("stroke") == ORANGE]


def test_k1_alone_and_always_negative():
    run = make({"vllm_kl/k1": [-1e-4, -2e-4, -3e-4]})
    assert line(run, "|k1|, hollow: negative") == pytest.approx({1: 1e-4, 2: 2e-4, 3: 3e-4})
    assert not ahead(run) and growth_clause(run.readings) == ""


def test_growth_is_fitted_and_its_crossing_predicted():
    run = make({"vllm_kl/k3": GROWING})
    fit = line(run, "growth fit")
    assert fit == pytest.approx({29: GROWING[28], 60: GROWING[59]}, rel=1e-5)  # the last 32 readings
    crossing = math.ceil(math.log(0.1 / 1e-4) / RATE)
    way, point = ahead(run)
    assert [row["step"] for row in way] == [60, crossing] == [60, 70]
    assert [row["value"] for row in way] == pytest.approx([GROWING[59], 1e-4 * math.exp(RATE * crossing)], rel=1e-5)
    assert point == [{"step": crossing, "value": 0.1, "label": "step 70"}]
    assert domain(run) == [1, crossing]
    assert "10.5 to 10.5 % per step" in growth_clause(run.readings) and "passes 0.1 in about 9 steps" in growth_clause(
        run.readings
    )


def test_a_far_crossing_is_pointed_at_but_not_drawn():
    run = make({"vllm_kl/k3": GROWING[:30]})
    (way,) = ahead(run)
    assert [row["step"] for row in way] == [30, 30 + math.ceil(AHEAD_SHARE * 30)] and domain(run)[1] == way[1]["step"]
    assert way[1]["value"] == pytest.approx(1e-4 * math.exp(RATE * way[1]["step"]), rel=1e-5)


@pytest.mark.parametrize(
    ("k3", "said"),
    [
        (np.full(40, 1e-3), "no certain growth over the last 32 readings: "),
        (GROWING[::-1], "k3 changes by -9.5 to -9.5 % per step"),
        (GROWING * 1e3, "k3 grows by 10.5 to 10.5 % per step, over the last 32 readings, and is past 0.1"),
        (GROWING[:7], ""),
    ],
)
def test_without_growth_to_the_boundary_nothing_is_predicted(k3, said):
    run = make({"vllm_kl/k3": k3})
    assert ahead(run) == [] and domain(run) == [1, len(k3)]
    assert growth_clause(run.readings).startswith(said) and bool(growth_clause(run.readings)) == bool(said)


def test_thresholds_are_drawn_at_their_heights():
    def drawn(**logged):
        run = make({"vllm_kl/k3": [1e-4] * 20, **{f"guard/{name}": [value] for name, value in logged.items()}})
        rules = [data for mark, _, data in layers(run) if mark.get("strokeDash") == [6, 4]]
        texts = [(mark["dy"], data) for mark, _, data in layers(run) if mark["type"] == "text"]
        assert {row["label"] for row in rules[0]} == {row["label"] for _, data in texts for row in data}
        above = [row["value"] for dy, data in texts if dy < 0 for row in data]  # of two, the upper one's name
        assert above == ([max(row["value"] for row in rules[0])] if len(rules[0]) > 2 else [])
        assert {row["step"] for row in rules[0]} == {1, 20}
        return {row["label"]: row["value"] for row in rules[0]}

    assert drawn() == {"boundary 0.1": 0.1}
    assert drawn(boundary=0.2, threshold=0.05) == {"boundary 0.2": 0.2, "skip threshold 0.05": 0.05}
    assert drawn(boundary=0.1, threshold=0.1) == {"skip threshold = boundary 0.1": 0.1}
    assert boundary_of(make({"guard/boundary": [0.0]})) == 0.1  # one that is none


def test_marks_stand_at_their_steps_with_their_reasons():
    done = {3: "skip", 8: "rollback", 12: "stop", 20: "tighten", 25: "warn", 30: "recover"}
    skipped = np.zeros(40)
    skipped[[2, 32]] = 1  # step 3 is in the event log, 33 is not
    run = make(
        {"vllm_kl/k3": [1e-4] * 40, "guard/skipped": skipped},
        [event(step, action, f"because of {action}") for step, action in done.items()],
    )
    found = {row["step"]: row for row in marks(run)}
    assert {step: row["action"] for step, row in found.items()} == {
        **{step: action for step, action in done.items() if action != "recover"},
        33: "skip",
    }
    assert all(found[step]["reason"] == f"because of {found[step]['action']}" for step in (3, 8, 12, 20, 25))
    assert found[33]["reason"] == "the event log has no reason"
    assert [found[step]["said"] for step in (3, 8, 25)] == [
        "step 3: update skipped",
        "step 8: rollback",
        "step 25: warning",
    ]


def test_several_marks_of_one_step_stand_below_each_other():
    run = make({"vllm_kl/k3": [1e-4] * 40}, [event(5, "skip"), event(5, "warn"), event(5, "warn"), event(9, "skip")])
    heights = {(row["step"], row["action"]): row["height"] for row in marks(run)}
    assert heights[5, "skip"] == heights[9, "skip"] != heights[5, "warn"]
    (twice,) = [row for row in marks(run) if row["action"] == "warn"]
    assert twice["said"] == "step 5: warning (and 1 more nearby)"


def test_thousands_of_skips_are_few_marks_that_count_them():
    steps = 6000
    events = [event(step, "skip", f"step {step}") for step in range(2, steps + 1, 2)]
    run = make({"vllm_kl/k3": np.full(steps, 1e-4), "vllm_kl/k1": np.full(steps, -1e-4)}, events)
    found = marks(run)
    assert 100 <= len(found) <= MARK_STRETCHES and sum(row["count"] for row in found) == len(events)
    assert not [layer for layer in layers(run) if layer[0].get("stroke") == ORANGE]  # hollow points would be a smear


def test_the_axis_is_logarithmic_unless_nothing_is_above_zero():
    def scale(values):
        return layers(make({"vllm_kl/k3": values}))[1][1]["y"]["scale"]

    assert scale([1e-4, 0.0])["type"] == "log" and "type" not in scale([0.0, 0.0])
    assert line(make({"vllm_kl/k3": [1e-4, 0.0, 2e-4]}), "k3") == {1: 1e-4, 3: 2e-4}


def test_a_mark_needs_no_kl_in_its_step():
    run = full(10, layers=0)
    run.metrics["vllm_kl/k3"].values[6] = np.nan
    assert [row["step"] for row in marks(run)] == [7]


def test_the_kl_over_the_top_tokens_is_drawn_where_there_is_one():
    run = make({"vllm_kl/k3": [1e-3, 2e-3, 1e-3], "vllm_kl/head": [1.1e-3, 1.2e-3, 1.1e-3]})
    assert line(run, "over the sampler's top tokens") == {1: 1.1e-3, 2: 1.2e-3, 3: 1.1e-3}
    assert not any(data and data[0].get("label") == "over the sampler's top tokens" for _, _, data in layers(full()))
