import io
import json
from pathlib import Path

import numpy as np
import pytest

from verl_ext.report.figure import draw, write_figure
from verl_ext.report.load import ReportError, find_metrics_file, load_run
from verl_ext.report.summary import summary, summary_notes, summary_rows


def write(file: Path, steps: list[tuple[int, dict]], tail: str = "") -> Path:
    file.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in steps) + tail)
    return file


def full_run(steps: int = 8) -> list[tuple[int, dict]]:
    return [
        (
            step,
            {
                "critic/score/mean": step / 10,
                "vllm_kl/k1": -1e-5 * step,
                "vllm_kl/k3": 1e-5 * step,
                "vllm_kl/prob_diff_max": 1e-3 * step,
                "vllm_kl/prob_diff_mean": 1e-5 * step,
                "correction/dropped": 0.01,
                "correction/dropped_low": 0.004,
                "correction/dropped_high": 0.006,
                "router/agreement": 0.99,
                "router/agreement/layer_00": 0.999,
                "router/agreement/layer_01": 1 - 0.001 * step,
                "router/any_layer_differs": 0.05,
                "guard/skipped": float(step in (4, 6)),
                "guard/threshold": 0.1,
                "timing_s/step": 2.0 * step,
            },
        )
        for step in range(1, steps + 1)
    ]


def panel(figure, title: str):
    (axes,) = [axes for axes in figure.axes if axes.get_title(loc="left").startswith(title)]
    return axes


def test_load_gives_steps_and_values_by_name(tmp_path):
    run = load_run(write(tmp_path / "run.jsonl", [(1, {"a": 1, "b": 0.5}), (2, {"a": 2}), (4, {"b": 0.25})]))
    assert run.steps.tolist() == [1, 2, 4]
    assert run.get("a").steps.tolist() == [1, 2]
    assert run.get("a").values.tolist() == [1.0, 2.0]
    assert run.get("b").steps.tolist() == [1, 4]
    assert run.get("b").values.tolist() == [0.5, 0.25]
    assert run.get("never logged") is None


@pytest.mark.parametrize("tail", ['{"step": 3, "da', '{"step": 3, "data": {"a": 3', "{", "\n\n"])
def test_load_ignores_a_last_line_that_was_cut(tmp_path, tail):
    run = load_run(write(tmp_path / "run.jsonl", [(1, {"a": 1}), (2, {"a": 2})], tail))
    assert run.get("a").values.tolist() == [1.0, 2.0]


def test_load_ignores_a_last_line_cut_inside_a_character(tmp_path):
    file = write(tmp_path / "run.jsonl", [(1, {"a": 1})])
    file.write_bytes(file.read_bytes() + '{"step": 2, "data": {"é'.encode()[:-1])
    assert load_run(file).steps.tolist() == [1]


@pytest.mark.parametrize("broken", ["{oops}", '{"step": "1", "data": {}}', '{"step": 1}', "[1]"])
def test_load_names_the_line_that_is_broken(tmp_path, broken):
    file = tmp_path / "run.jsonl"
    file.write_text(f'{{"step": 1, "data": {{}}}}\n\n{broken}\n{{"step": 2, "data": {{}}}}\n')
    with pytest.raises(ReportError, match=r"run\.jsonl: line 3 ") as error:
        load_run(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "\n", '{"step": 1, "da'])
def test_load_refuses_a_file_without_a_step(tmp_path, content):
    file = tmp_path / "empty.jsonl"
    file.write_text(content)
    with pytest.raises(ReportError, match=r"empty\.jsonl: no complete step"):
        load_run(file)


def test_load_merges_the_lines_of_one_step_and_sorts(tmp_path):
    run = load_run(write(tmp_path / "run.jsonl", [(2, {"a": 2}), (1, {"a": 1}), (2, {"b": 5, "a": 3})]))
    assert run.steps.tolist() == [1, 2]
    assert run.get("a").values.tolist() == [1.0, 3.0]
    assert run.get("b").steps.tolist() == [2]


def test_load_keeps_null_and_nan_as_nan_and_leaves_out_text(tmp_path):
    file = write(tmp_path / "run.jsonl", [(1, {"a": None, "t": "x"}), (2, {"a": float("nan")}), (3, {"a": 3})])
    run = load_run(file)
    assert np.isnan(run.metrics["a"].values).tolist() == [True, True, False]
    assert run.get("a").steps.tolist() == [3]
    assert "t" not in run.metrics


def test_layers_are_ordered_by_number(tmp_path):
    data = {f"router/agreement/layer_{layer:02d}": layer for layer in (100, 2, 10)}
    run = load_run(write(tmp_path / "run.jsonl", [(1, {**data, "router/agreement": 0.5})]))
    assert list(run.layers("router/agreement")) == [2, 10, 100]


def test_a_folder_stands_for_its_only_file(tmp_path):
    with pytest.raises(ReportError, match=r"no \.jsonl file"):
        find_metrics_file(tmp_path)
    one = write(tmp_path / "one.jsonl", [(1, {})])
    write(tmp_path / "one.guard.jsonl", [])  # the guard's events beside it
    assert find_metrics_file(tmp_path) == one
    write(tmp_path / "two.jsonl", [(1, {})])
    with pytest.raises(ReportError, match=r"one\.jsonl, two\.jsonl"):
        find_metrics_file(tmp_path)
    with pytest.raises(ReportError, match="nothing: no such file"):
        find_metrics_file(tmp_path / "nothing")


def test_summary_numbers(tmp_path):
    run = load_run(write(tmp_path / "run.jsonl", full_run()))
    rows = {row.metric: row for row in summary_rows(run)}
    reward = rows["critic/score/mean"]
    assert (reward.first, reward.last, reward.worst) == (pytest.approx(0.2), pytest.approx(0.7), None)
    k3, k1 = rows["vllm_kl/k3"], rows["vllm_kl/k1"]
    assert (k3.first, k3.last, k3.worst) == pytest.approx((2e-5, 7e-5, 8e-5))
    assert (k1.first, k1.last, k1.worst) == pytest.approx((-2e-5, -7e-5, -8e-5))
    layer = rows["router/agreement/layer_01"]
    assert (layer.first, layer.last, layer.worst) == pytest.approx((0.998, 0.993, 0.992))
    assert rows["correction/dropped_high"].cells()[1:4] == ("0.60 %", "0.60 %", "0.60 %")
    notes = " | ".join(summary_notes(run))
    assert "steps 1 to 8" in notes
    assert "updates skipped: 2 of 8" in notes
    assert "mean step time: 9.0 s" in notes


def test_summary_leaves_out_what_was_not_logged(tmp_path):
    run = load_run(write(tmp_path / "run.jsonl", [(1, {"critic/score/mean": 0.5})]))
    assert [(row.metric, row.first, row.last) for row in summary_rows(run)] == [("critic/score/mean", 0.5, 0.5)]
    assert len(summary_notes(run)) == 1


def test_summary_says_where_values_were_not_finite(tmp_path):
    steps = [(1, {"vllm_kl/k3": 1.0}), (2, {"vllm_kl/k3": None}), (3, {"vllm_kl/k3": float("inf")})]
    run = load_run(write(tmp_path / "run.jsonl", steps))
    (row,) = summary_rows(run)
    assert (row.first, row.last, row.worst) == (1.0, 1.0, 1.0)
    assert summary_notes(run)[-1] == "vllm_kl/k3 was not a finite number in 2 of 3 steps"


def test_summary_reports_a_metric_that_was_never_finite(tmp_path):
    run = load_run(write(tmp_path / "run.jsonl", [(1, {"vllm_kl/k3": None})]))
    assert summary_rows(run) == []
    assert "1 of 1 steps" in summary_notes(run)[-1]


def test_table_fits_eighty_columns_uncut(tmp_path):
    from rich.console import Console

    run = load_run(write(tmp_path / "run.jsonl", full_run()))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary(run))
    text = console.export_text()
    assert "…" not in text
    assert "router/any_layer_differs" in text
    assert "-8.0e-05" in text
    assert "updates skipped: 2 of 8" in text


def test_figure_is_a_png_with_content(tmp_path):
    from matplotlib.image import imread

    run = load_run(write(tmp_path / "run.jsonl", full_run()))
    out = write_figure(run, tmp_path / "new" / "report.png")
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(out)[..., :3]
    assert pixels.shape[0] > 800
    assert pixels.shape[1] > 1500
    assert 0.02 < (pixels.min(axis=-1) < 0.9).mean() < 0.6


def test_figure_draws_the_values(tmp_path):
    figure = draw(load_run(write(tmp_path / "run.jsonl", full_run())))
    (reward,) = panel(figure, "Reward").lines
    assert reward.get_ydata() == pytest.approx(np.arange(1, 9) / 10)
    kl = panel(figure, "KL")
    assert kl.get_yscale() == "log"
    lines = {line.get_label(): line for line in kl.lines}
    assert lines["update skipped"].get_xdata().tolist() == [4, 6]
    assert lines["update skipped"].get_ydata().tolist() == [1, 1]  # the panel's upper edge
    assert lines["skip threshold"].get_ydata().tolist() == [0.1] * 8
    assert lines["|k1|, hollow where negative"].get_ydata() == pytest.approx(1e-5 * np.arange(1, 9))
    (cells,) = panel(figure, "Router").collections
    assert cells.get_array().shape == (2, 8)
    assert cells.get_array()[1].tolist() == pytest.approx([100 - 0.1 * step for step in range(1, 9)])


def test_figure_leaves_a_hole_where_a_layer_was_not_logged(tmp_path):
    name = "router/agreement/layer_0"
    steps = [(1, {f"{name}1": 0.9, f"{name}3": 0.8}), (5, {f"{name}3": 0.7}), (6, {f"{name}1": None})]
    figure = draw(load_run(write(tmp_path / "run.jsonl", steps)))
    (cells,) = panel(figure, "Router").collections
    assert np.ma.getmaskarray(cells.get_array()).tolist() == [
        [True, True],
        [False, True],
        [True, True],
        [False] * 2,
    ]


def test_figure_says_what_would_add_a_missing_panel(tmp_path):
    figure = draw(load_run(write(tmp_path / "run.jsonl", [(1, {"critic/score/mean": 0.5})])))

    def text(title):
        return " ".join(text.get_text() for text in panel(figure, title).texts)

    assert "stability.metrics=true" in text("KL")
    assert "stability.metrics=true" in text("Probability")
    assert "stability.router_agreement=true" in text("Router")
    assert "correction" in text("Tokens dropped")
    assert panel(figure, "Reward").lines


@pytest.mark.parametrize("k3", [0.0, None, float("inf")])
def test_figure_survives_a_log_axis_without_a_positive_value(tmp_path, k3):
    run = load_run(write(tmp_path / "run.jsonl", [(1, {"vllm_kl/k3": k3, "vllm_kl/k1": 0.0})]))
    assert write_figure(run, tmp_path / "report.png").stat().st_size > 10_000


def test_figure_marks_a_step_that_was_skipped_because_its_kl_was_not_a_number(tmp_path):
    steps = [(1, {"vllm_kl/k3": 1e-4, "guard/skipped": 0.0}), (2, {"vllm_kl/k3": None, "guard/skipped": 1.0})]
    kl = panel(draw(load_run(write(tmp_path / "run.jsonl", steps))), "KL")
    (cross,) = [line for line in kl.lines if line.get_label() == "update skipped"]
    assert cross.get_xdata().tolist() == [2]
