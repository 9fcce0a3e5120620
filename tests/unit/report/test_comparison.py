import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.report.shown import printed
from verl_ext.diagnosis.noise import CAVEAT
from verl_ext.diagnosis.series import Series
from verl_ext.report.comparison import Comparison, ComparisonTable, MetricCell, compare_runs
from verl_ext.report.run import ReportError, Run
from verl_ext.report.seeds import group_runs, unique_names

STEPS = 300  # a default window of 30 readings


def run(name: str, metrics: dict, steps: int = STEPS, first: int = 1) -> Run:
    at = np.arange(first, first + steps)
    series = {key: Series(at[: len(values)], np.array(values, dtype=np.float64)) for key, values in metrics.items()}
    return Run(name, (Path(f"{name}.jsonl"),), at, series)


def noise(seed: int, level: float = 0.0, scatter: float = 1.0, steps: int = STEPS) -> np.ndarray:
    return level + scatter * np.random.default_rng(seed).normal(size=steps)


def cells(comparison: Comparison, metric: str) -> tuple[MetricCell, ...]:
    (found,) = [cells for each, cells in comparison.rows if each.name == metric]
    return found


def full(name: str, seed: int, shift: float = 0.0) -> Run:
    names = ["vllm_kl/k3", "vllm_kl/prob_diff_max", "vllm_kl/prob_diff_mean"]
    shares = ["correction/dropped", "router/agreement", "router/any_layer_differs", "actor/pg_clipfrac"]
    metrics = {key: np.exp(noise(seed + index, shift - 9, 0.3)) for index, key in enumerate(names)}
    metrics |= {key: noise(seed + index, 0.5 + shift / 100, 0.001) for index, key in enumerate(shares, 10)}
    metrics |= {"critic/score/mean": noise(seed + 20, 0.5 + shift, 0.02), "vllm_kl/k1": noise(seed + 21, 0, 1e-5)}
    metrics |= {"val-core/openai/gsm8k/acc/mean@1": noise(seed + 22, 0.6, 0.01), "timing_s/step": noise(seed, 120)}
    metrics |= {"guard/skipped": np.arange(STEPS) % 100 == 0}
    return run(name, metrics)


def test_the_first_run_is_the_baseline_and_words_follow_the_good_direction():
    a = run("a", {"critic/score/mean": noise(1, 0.5, 0.01), "vllm_kl/k3": np.exp(noise(2, -9, 0.3))})
    b = run("b", {"critic/score/mean": noise(3, 0.7, 0.01), "vllm_kl/k3": np.exp(noise(4, -6, 0.3))})
    comparison = compare_runs([a, b])
    reward, k3 = cells(comparison, "critic/score/mean"), cells(comparison, "vllm_kl/k3")
    assert (*comparison.lines, reward[0].change, reward[0].verdict) == ("a", "b", "", "")
    assert reward[1].verdict == "better" and k3[1].verdict == "worse"
    assert float(reward[1].change) == pytest.approx(0.2, abs=0.01)
    assert float(k3[1].change[1:]) == pytest.approx(math.exp(3), rel=0.3)
    low, high = map(float, reward[1].interval.split(" to "))
    assert low < 0.2 < high
    swapped = compare_runs([b, a])
    assert cells(swapped, "critic/score/mean")[1].verdict == "worse"
    assert cells(swapped, "vllm_kl/k3")[1].verdict == "better"


def test_equal_runs_are_within_the_noise():
    comparison = compare_runs([full("a", 100), full("b", 200)])
    verdicts = {cell.verdict for _, cells in comparison.rows for cell in cells[1:]}
    assert verdicts == {"within noise", ""}, "nothing is said of the skipped updates"
    assert CAVEAT in comparison.notes


def test_a_metric_without_a_good_direction_only_differs():
    runs = [
        run(name, {"actor/entropy": noise(seed, level, 0.01)})
        for seed, (name, level) in enumerate([("a", 1), ("b", 2)])
    ]
    assert cells(compare_runs(runs), "actor/entropy")[1].verdict == "differs"


def test_the_verdicts_are_of_the_table_not_of_the_row():
    """A difference that counts by itself does not count among 50 others."""
    steps = 100
    extra = {f"own/{index}": noise(50 + index, steps=steps) for index in range(50)}
    a, b = noise(1, 0, 1, steps), noise(2, 1.2, 1, steps)
    alone = compare_runs([run("a", {"own/x": a}, steps), run("b", {"own/x": b}, steps)], ["own/x"], window=30)
    assert cells(alone, "own/x")[1].verdict == "differs"
    runs = [run("a", {"own/x": a, **extra}, steps), run("b", {"own/x": b, **extra}, steps)]
    assert cells(compare_runs(runs, ["own/x", *extra], window=30), "own/x")[1].verdict == "not certain"
    reward = [run(each, {"critic/score/mean": values, **extra}, steps) for each, values in (("a", a), ("b", b))]
    found = compare_runs(reward, [*extra], window=30)
    assert cells(found, "critic/score/mean")[1].verdict == "better", "the reward is a question of its own"
    more = [run(f"more{seed}", {"critic/score/mean": noise(seed, steps=steps)}, steps) for seed in range(60, 90)]
    found = compare_runs([*reward, *more], window=30)
    pair = cells(found, "critic/score/mean")
    assert pair[1].verdict == "not certain" and any(f"reward of b: {pair[1].change}" in note for note in found.notes)


def test_rows_come_for_what_any_run_has_and_a_dash_where_one_lacks_it():
    a = run("a", {"critic/score/mean": noise(1), "val-core/x/acc/mean@1": noise(2)})
    b = run("b", {"critic/score/mean": noise(3), "own/metric": noise(4), "actor/entropy": [math.nan] * STEPS})
    comparison = compare_runs([a, b], ["own/metric", "own/unknown", "critic/score/mean"])
    assert [metric.name for metric, _ in comparison.rows] == [
        "critic/score/mean",
        "val-core/x/acc/mean@1",
        "own/metric",
    ]
    for metric, lacking in (("val-core/x/acc/mean@1", 1), ("own/metric", 0)):
        pair = cells(comparison, metric)
        assert pair[lacking].value == "-" and pair[1 - lacking].value != "-"
        assert (pair[1].change, pair[1].verdict) == ("", "")
    assert "own/unknown has no finite value in any run" in comparison.notes


def test_runs_are_cut_at_the_last_step_that_all_have():
    rising = np.linspace(0, 10, 400)
    a, b = run("long", {"critic/score/mean": rising}, 400), run("short", {"critic/score/mean": rising[:100]}, 100)
    comparison = compare_runs([a, b])
    assert cells(comparison, "critic/score/mean")[1].verdict == "within noise"
    assert any("at step 100" in line and "long (to 400)" in line for line in comparison.basis)
    assert any("still moving at the end of short: reward" in note for note in comparison.notes)
    ends = compare_runs([a, b], cut=False)
    assert cells(ends, "critic/score/mean")[1].verdict == "worse"
    assert any("different steps: long at 400, short at 100" in line for line in ends.basis)


def test_skipped_updates_are_a_share_of_the_run_and_not_tested():
    runs = [run(name, {"guard/skipped": np.arange(STEPS) < count}) for name, count in (("a", 2), ("b", 7))]
    first, second = cells(compare_runs(runs), "guard/skipped")
    assert (first.value, first.change) == ("0.67 %", "")
    assert (second.value, second.change, second.verdict) == ("2.33 %", "+1.67 points", "")


def test_a_metric_that_ended_early_is_told():
    a, b = run("a", {"actor/entropy": noise(1)}), run("b", {"actor/entropy": noise(2)[:200]})
    notes = compare_runs([a, b]).notes
    assert "b stopped logging before the others' windows begin: actor/entropy" in notes


def test_short_runs_say_that_they_are_too_short():
    runs = [run(name, {"critic/score/mean": noise(seed, steps=3)}, 3) for seed, name in enumerate("ab")]
    comparison = compare_runs(runs)
    value, other = cells(comparison, "critic/score/mean")
    assert "±" not in value.value and other.verdict == "too few readings to tell" and other.interval == ""
    assert any(note.startswith("too few readings to tell:") for note in comparison.notes)


def test_runs_of_one_name_are_called_after_what_tells_them_apart(tmp_path):
    def named(*files):
        one = run("x", {"critic/score/mean": [0.1]}, 1)
        return unique_names([replace(one, name=file.split("/")[-1], sources=(tmp_path / file,)) for file in files])

    assert named("a/one", "a/two") == ["one", "two"]
    assert named("a/x", "b/x") == ["a", "b"] and named("a/same/x", "b/same/x") == ["a", "b"]
    assert named("a/x", "b/x", "b/y") == ["a/x", "b/x", "b/y"]
    assert named("a/x/x", "a/y/y", "b/x/x") == ["a/x", "a/y", "b/x"]
    assert named("a/x", "a/x") == ["x (1)", "x (2)"]


CONFIG = "_wandb:\n    value:\n        start: {start}\ntrainer:\n    value:\n        experiment_name: {name}\n"
CONFIG += "        lr: {lr}\n        epochs: 1\nseed:\n    value: {seed}\nbatch:\n    value: 8\n"


@pytest.mark.parametrize(
    ("files", "groups"),
    [
        (("none/seed0", "none/seed1", "moe/seed0", "moe/seed1"), {"none": 2, "moe": 2}),
        (("grpo_seed1", "grpo_seed22", "grpo_lr2_seed1"), {"grpo": 2, "grpo_lr2_seed1": 1}),
        (("seed_1-qwen", "Seed=2-qwen", "moe"), {"qwen": 2, "moe": 1}),
        (("a_seed1", "a_seed2", "a"), {"a_seed1": 2, "a": 1}),
        (("seed0", "seed1"), {"seed0": 1, "seed1": 1}),  # one setting: its runs are compared with each other
        (("s1", "s2", "seedling"), {"s1": 1, "s2": 1, "seedling": 1}),
    ],
)
def test_runs_whose_names_differ_only_in_the_seed_are_one_line(tmp_path, files, groups):
    runs = [replace(run(file.split("/")[-1], {"a": [1.0]}, 1), sources=(tmp_path / file / "x",)) for file in files]
    assert {name: len(line) for name, line in group_runs(runs).items()} == groups
    assert len(group_runs(runs, apart=True)) == len(runs)
    joined = {"all": runs, "one": runs[:1]}
    assert {name: len(line) for name, line in group_runs(runs[:1], joined).items()} == {
        runs[0].name: 1,
        "all": len(runs),
        "one": 1,
    }
    with pytest.raises(ReportError, match=runs[0].name):
        group_runs(runs[:1], {runs[0].name: runs})


def test_runs_whose_configs_differ_only_in_the_seed_are_one_line_whatever_their_names(tmp_path):
    def configured(name: str, lr: float, seed: int, place: str = "files/config.yaml") -> Run:
        file = tmp_path / name / place
        file.parent.mkdir(parents=True)
        file.write_text(CONFIG.format(start=name, name=name, lr=lr, seed=seed))
        return replace(run(name, {"a": [1.0]}, 1), sources=(tmp_path / name / "run.wandb",))

    runs = [
        configured("run-7", 1, 1),
        configured("run-8", 1, 2),
        configured("x_seed1", 2, 1),
        configured("x_seed2", 3, 2),
    ]
    again = configured("run-9", 1, 2)
    found = {name: [each.name for each in line] for name, line in group_runs([*runs, again]).items()}
    assert found == {"run": ["run-7", "run-8"], "x_seed1": ["x_seed1"], "x_seed2": ["x_seed2"], "run-9": ["run-9"]}


def seeds(name: str, level: float, count: int, spread: float = 0.1) -> list[Run]:
    return [
        run(f"{name}_seed{seed}", {"own/x": noise(seed, level + spread * (seed - (count - 1) / 2), 1e-3)})
        for seed in range(count)
    ]


@pytest.mark.parametrize(
    ("counts", "levels", "verdict"),
    [
        ((5, 5), (1, 1.1), "within noise"),  # the seeds differ more
        ((5, 5), (1, 3), "differs"),
        ((5, 1), (1, 1.1), "within noise"),  # one run is one more seed
        ((1, 5), (1, 5), "differs"),
        ((1, 1), (1, 1.1), "differs"),  # and between two runs there is only the noise within each
        ((2, 2), (1, 3), "too few readings to tell"),
    ],
)
def test_lines_of_several_seeds_are_judged_by_the_scatter_between_them(counts, levels, verdict):
    runs = [each for name, count, level in zip("ab", counts, levels, strict=True) for each in seeds(name, level, count)]
    comparison = compare_runs(runs, ["own/x"])
    pair = cells(comparison, "own/x")
    assert [cell.seeds for cell in pair] == list(counts) and pair[1].verdict == verdict
    for cell, count, level in zip(pair, counts, levels, strict=True):
        assert cell.final.mean == pytest.approx(level, abs=0.01)
        if count > 1:
            assert cell.spread == pytest.approx(0.1 * np.std(np.arange(count), ddof=1), rel=0.05)
            assert f"±{cell.spread:.3f}" in cell.value
        else:
            assert ("±" in cell.value) == (counts == (1, 1)), "one meaning in a table"
    assert (CAVEAT in comparison.notes) == (counts == (1, 1))


def test_a_run_that_begins_after_another_ends_is_refused():
    one = run("a", {"critic/score/mean": noise(1)})
    with pytest.raises(ReportError, match="b begins after step 300"):
        compare_runs([one, run("b", {"critic/score/mean": noise(1)}, first=400)])


@pytest.mark.parametrize("count", [2, 3, 6, 20])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_table_fits_a_hundred_columns_uncut(count, encoding):
    runs = [full(f"qwen3-30b-a3b_icepop_experiment_{index}_µ", 100 * index, shift=index) for index in range(count)]
    text = printed(ComparisonTable(compare_runs(runs)), 100, encoding)
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    flat = "".join(text.split())
    for part in ("router/any_layer_", "+0.", "worse", "better", "gsm8k/acc/", "Holm's", "prob_diff_"):
        assert part in flat
    for index in range(count):
        assert f"experiment_{index}" in flat or f"{index}_" in flat
    assert ("±" in text) == (encoding == "utf-8")


@pytest.mark.parametrize("values", [np.zeros(STEPS), 1e-14 * (np.arange(STEPS) % 2)], ids=["none", "next to none"])
def test_engines_that_agree_exactly_are_below_the_floor_of_the_logarithm(values):
    exact, usual = run("exact", {"vllm_kl/k3": values}), run("usual", {"vllm_kl/k3": np.exp(noise(1, -9, 0.3))})
    comparison = compare_runs([exact, usual])
    value, other = cells(comparison, "vllm_kl/k3")
    assert value.value == "below 1e-12" and other.value.startswith("1.")
    assert "below 1e-12" in printed(ComparisonTable(comparison), 100)


def test_a_log_metric_gives_its_error_in_percent_and_a_share_its_change_in_points():
    pairs = [(1, -9.0, 0.985), (2, -9.0, 0.905)]
    runs = [
        run(f"{seed}", {"vllm_kl/k3": np.exp(noise(seed, k3, 0.3)), "router/agreement": noise(seed, share, 0.001)})
        for seed, k3, share in pairs
    ]
    comparison = compare_runs(runs)
    assert cells(comparison, "vllm_kl/k3")[0].value.endswith(" %")
    agreement = cells(comparison, "router/agreement")
    assert agreement[0].value.startswith("98.5") and agreement[1].change.startswith("-8.0")
    assert agreement[1].change.endswith(" points") and agreement[1].verdict == "worse"


@pytest.mark.parametrize("width", [30, 45, 60, 80, 250])
@pytest.mark.parametrize("count", [2, 6, 20])
def test_numbers_are_whole_at_every_width(count, width):
    comparison = compare_runs([full(f"r{index}", index) for index in range(count)])
    said = printed(ComparisonTable(comparison), width)
    words = set(said.split())
    first = [cells[index].value.split()[0] for _, cells in comparison.rows for index in range(count)]
    assert all(value.rstrip("%") in {word.rstrip("%s") for word in words} for value in first)
    assert max(map(len, said.splitlines())) <= width
