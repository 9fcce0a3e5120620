from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from tests.unit.report.made_runs import NAN, make
from tests.unit.report.shown import printed
from verl_ext.base.printable import wrap_name
from verl_ext.diagnosis.findings.registry import Finding
from verl_ext.diagnosis.judge import Judged
from verl_ext.diagnosis.series import Series
from verl_ext.guard.state import Event
from verl_ext.report.run import Run
from verl_ext.report.terminal import (
    BLOCKS,
    COLOURS,
    Dashboard,
    dashboard_rows,
    format_value,
    notes,
    sparkline,
)
from verl_ext.report.verdict import NextStep, RunVerdict, State

VERDICT = RunVerdict(
    state="drifting",
    sentence="The reward holds, but k3 went from 1e-4 to 5e-2.",
    learning=Judged("learns", "the reward holds"),
    engines=Judged("growing", "k3 went from 1e-4 to 5e-2", 4),
    facts=(
        Finding("rollouts_old", "old", "rollouts are 2 versions behind"),
        Finding("entropy_moved", "moved", "the entropy went from 1 to 2", 3),
    ),
    steps=(NextStep("stability=icepop", "drops tokens outside the band"), NextStep("precision=fp16", "rounds finer")),
)


def full(steps: int = 8) -> Run:
    at = np.arange(1, steps + 1)
    layers = {f"router/agreement/layer_{layer:02d}": 0.99 - 0.02 * (layer == 17) - 1e-4 * at for layer in range(48)}
    return make(
        {
            "critic/score/mean": at / 10,
            "vllm_kl/k1": -1e-5 * at,
            "vllm_kl/k3": 1e-5 * at,
            "vllm_kl/prob_diff_max": 1e-3 * at,
            "correction/dropped": [0.01] * steps,
            "correction/dropped_low": [0.004] * steps,
            "correction/dropped_high": [0.006] * steps,
            "router/agreement": [0.99] * steps,
            "router/any_layer_differs": [0.05] * steps,
            "actor/entropy": 0.5 - at / 100,
            "response_length/mean": 1000 * at,
            "actor/grad_norm": at % 3,
            "guard/skipped": (at == 4) | (at == 6),
            "timing_s/step": 2.0 * at,
            "val-core/openai/gsm8k_with_a_long_name/acc/mean@1": at / 20,
            **layers,
        },
        [Event(step, "gap", "vllm_kl/k3", 1.0, 0.5, "tighten", f"reason {'long ' * 30}") for step in range(1, 6)],
        notes=("line 3 was left out: cut off",),
    )


def screen(run: Run, **console) -> str:
    return printed(Dashboard(run, VERDICT), **console)


def test_first_now_and_worst():
    table = {row.metric: row for row in dashboard_rows(full())}
    reward = table["critic/score/mean"]
    assert (reward.first, reward.now, reward.worst) == (pytest.approx(0.25), pytest.approx(0.65), None)
    k3, k1 = table["vllm_kl/k3"], table["vllm_kl/k1"]
    assert (k3.first, k3.now, k3.worst) == pytest.approx((2.5e-5, 6.5e-5, 8e-5))
    assert (k1.first, k1.now, k1.worst) == pytest.approx((-2.5e-5, -6.5e-5, -8e-5))
    assert table["timing_s/step"].worst == 16 and table["actor/grad_norm"].worst == 2
    validation = table["val-core/openai/gsm8k_with_a_long_name/acc/mean@1"]
    assert (validation.first, validation.now) == pytest.approx((0.05, 0.4)), "the first and the last reading"


def test_only_the_layer_that_agrees_least_is_shown():
    (layer,) = [row for row in dashboard_rows(full()) if "/layer_" in row.metric]
    assert (layer.label, layer.metric) == ("  lowest now: layer 17", "router/agreement/layer_17")
    assert layer.worst == pytest.approx(0.97 - 8e-4)


def test_the_error_of_a_share_stands_under_the_agreement():
    run = full()
    run.metrics["router/agreement/error"] = run.metrics["router/any_layer_differs"]
    labels = [row.label.strip() for row in dashboard_rows(run)]
    assert labels[labels.index("router agreement") :][:3] == [
        "router agreement",
        "standard error",
        "lowest now: layer 17",
    ]


def test_verls_own_names_stand_in_where_the_plugin_is_off():
    (row,) = dashboard_rows(make({"rollout_corr/k3_kl": [1e-4, 2e-4, NAN]}))
    assert (row.metric, row.first, row.now) == ("vllm_kl/k3", 1e-4, 2e-4)
    (row,) = dashboard_rows(make({"sampling/sampling_logp_difference/mean": [0.01, 0.02, 0.03]}))  # TRL's
    assert (row.metric, row.label, row.now) == ("vllm_kl/log_ratio_abs_mean", "mean |log k|", 0.03)


def test_rows_are_left_out_where_nothing_was_logged():
    assert [row.metric for row in dashboard_rows(make({"critic/score/mean": [0.5]}))] == ["critic/score/mean"]
    assert dashboard_rows(make({"vllm_kl/k3": [NAN]})) == []


def test_validation_metrics_are_those_of_val_core_with_anything_finite():
    assert make(
        {
            **{"val-core/b/acc/mean@1": [1.0], "val-core/a/acc/mean@1": [NAN, 1.0], "val-core/c/acc/mean@1": [NAN]},
            **{"val-aux/d/acc/mean@1": [1.0], "val/test_score/e": [1.0]},
        }
    ).validations() == ["val-core/a/acc/mean@1", "val-core/b/acc/mean@1", "val/test_score/e"]


def test_notes_tell_skips_events_numbers_that_were_none_and_what_is_missing():
    text = list(notes(full()))
    assert "updates skipped: 25 % in 8 steps (guard/skipped)" in text
    assert [note[:22] for note in text if "reason" in note] == [f"guard, step {step}: tighten" for step in (3, 4, 5)]
    assert "line 3 was left out: cut off" in text
    assert not any("not logged" in note or "not a finite" in note for note in text)

    text = list(notes(make({"vllm_kl/k3": [1.0, NAN, float("inf")], **{f"own/{name}": [NAN, 1.0] for name in "abcd"}})))
    assert "vllm_kl/k3 was not a finite number in 2 of 3 steps" in text
    assert "own/b was not a finite number in 1 of 2 steps" in text
    assert "2 more metrics were not finite in some steps" in text
    never = list(notes(make({"vllm_kl/k3": [1.0, 1.0], "own/null": [NAN, NAN], "actor/kl_loss": [NAN, NAN]})))
    assert [note.split()[0] for note in never if "not a finite" in note] == ["actor/kl_loss"]


@pytest.mark.parametrize(
    ("metrics", "advised", "missing"),
    [
        ({"vllm_kl/k3": [1.0]}, (), []),
        ({"critic/score/mean": [1.0]}, (), ["stability.metrics=true"]),
        ({"critic/score/mean": [1.0]}, ("stability.metrics=true",), []),
        ({"vllm_kl/k3": [1.0], "router/any_layer_differs": [0.1]}, (), ["stability.router_agreement=true"]),
    ],
)
def test_notes_tell_what_to_log_unless_it_is_advised_or_a_dense_model_has_none(metrics, advised, missing):
    found = [note for note in notes(make(metrics), advised) if note.startswith("not logged")]
    assert [note.rpartition(" add ")[2] for note in found] == missing


def test_a_sparkline_is_made_of_bucketed_medians():
    values = np.repeat(np.arange(8.0), 10)
    values[5] = 1e9  # one reading in ten does not move a median
    assert sparkline(Series(np.arange(80), values), (0, 79), "number", cells=8) == BLOCKS


def test_a_sparkline_of_a_divergence_is_logarithmic_in_its_size():
    decades = Series(np.arange(8), np.array([-1.0, 1.0] * 4) * 10.0 ** np.arange(8))
    assert sparkline(decades, (0, 7), "small") == BLOCKS
    assert sparkline(Series(np.arange(3), np.array([0.0, 1e-4, 1.0])), (0, 2), "small") == "▁▁█"
    assert sparkline(Series(np.arange(2), np.zeros(2)), (0, 1), "small") == "▄▄"


def test_a_sparkline_has_gaps_where_nothing_finite_was_logged():
    holes = Series(np.arange(1, 5), np.array([1.0, NAN, NAN, 2.0]))
    assert sparkline(holes, (1, 4), "number") == "▁  █"
    assert sparkline(Series(np.array([5]), np.array([1.0])), (1, 6), "number") == "    ▄ "
    assert sparkline(Series(np.array([5]), np.array([NAN])), (1, 6), "number") == ""


def test_mere_noise_is_drawn_nearly_flat():
    values = 0.99 + 1e-4 * np.random.default_rng(0).normal(size=22)
    assert set(sparkline(Series(np.arange(22), values), (0, 21), "share")) <= set("▃▄▅")
    assert set(sparkline(Series(np.arange(22), np.full(22, 3.0)), (0, 21), "number")) == {"▄"}
    assert sparkline(Series(np.arange(2), np.zeros(2)), (0, 1), "share") == "▁▁"


def test_a_sparkline_spans_the_run_not_the_metric():
    late = Series(np.arange(50, 101), np.arange(51.0))
    drawn = sparkline(late, (1, 100), "number", cells=20)
    assert len(drawn) == 20 and drawn.startswith(" " * 9) and drawn.endswith("█")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_dashboard_fits_eighty_columns_uncut(encoding):
    run = replace(full(), name="qwen3_µ-run", notes=("a note — with a dash",))
    text = screen(run, encoding=encoding)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    flat = " ".join(text.split())
    assert all(
        part in flat for part in ("step 8", "-8.0e-05", "lowest now: layer 17", "mean@1", "5.00 %", "6,500", "a note")
    )
    assert f"{VERDICT.sentence} {VERDICT.first_heading} stability=icepop" in flat
    assert ("█" in text) == (encoding == "utf-8")
    assert ("#" in text) == (encoding == "ascii")


def test_the_heading_has_the_colour_of_the_state():
    assert COLOURS.keys() == set(get_args(State))
    heading = screen(full(), force_terminal=True, color_system="standard").splitlines()[0]
    assert "run, step 8: drifting" in heading and ";33m" in heading


def test_markup_in_names_is_text():
    assert "[red]x[/red]" in screen(replace(full(), name="[red]x[/red]"))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.98654, "share", "98.65 %"),
        (1.23e-5, "small", "1.2e-05"),
        (812.4, "count", "812"),
        (12.34, "seconds", "12.3 s"),
        (0.5, "number", "0.500"),
        (1e-4, "number", "1.00e-04"),
        (0.0, "number", "0.000"),
        (2.5e7, "number", "2.50e+07"),
    ],
)
def test_values_have_their_units(value, unit, text):
    assert format_value(value, unit) == text


def test_names_break_behind_their_marks():
    assert wrap_name("val-core/openai/gsm8k/acc/mean@1", 16) == "val-core/openai/\ngsm8k/acc/mean@1"
    assert wrap_name("short", 16) == "short"
    assert wrap_name("x" * 20, 8) == "xxxxxxxx\nxxxxxxxx\nxxxx"


@pytest.mark.parametrize("width", [30, 45, 60, 80, 250])
def test_numbers_are_whole_at_every_width_and_sparklines_go_first(width):
    lines = screen(full(), width=width).splitlines()
    assert all(len(line) <= width or len(line.strip(" -\\").split()) == 1 for line in lines)
    said = {word for line in lines for word in line.split()}
    now = {format_value(row.now, row.unit).split()[0] for row in dashboard_rows(full())}
    assert now <= said
    assert any(block in "".join(lines) for block in BLOCKS) == (width >= 80)
