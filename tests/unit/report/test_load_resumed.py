import pytest

from tests.unit.report.made_files import noted, train, values, write
from verl_ext.report.load import read_run


def test_what_a_run_logged_after_the_step_it_was_resumed_at_is_abandoned(tmp_path):
    old = [*train(1, 2, 3, 4, 5), (6, {"a": 6, "gone": 1}), (7, {"a": 7, "gone": 1}), (8, {"a": 8})]
    run = read_run(write(tmp_path / "run.jsonl", [*old, *train(6, 7, 8, value=0.5)]))
    assert values(run) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6.5, 7: 7.5, 8: 8.5}
    assert values(run, "gone") == {6: 1}  # the step itself is merged
    noted(run, "steps 6 to 8 .*twice")


def test_steps_that_the_resumed_run_has_not_come_to_are_left_out(tmp_path):
    run = read_run(write(tmp_path / "run.jsonl", [*train(1, 2, 3, 4, 5, 6), *train(3, 4, value=0.5)]))
    assert values(run) == {1: 1, 2: 2, 3: 3.5, 4: 4.5}
    assert run.steps.tolist() == [1, 2, 3, 4]
    noted(run, "steps 3 to 4 .*twice", "steps 5 to 6 .*left out")


def test_a_run_that_was_resumed_twice(tmp_path):
    rows = [*train(1, 2, 3, 4, 5, 6), *train(5, 6, 7, value=0.1), *train(3, 4, 5, 6, 7, 8, value=0.2)]
    run = read_run(write(tmp_path / "run.jsonl", rows))
    assert values(run) == pytest.approx({1: 1, 2: 2, 3: 3.2, 4: 4.2, 5: 5.2, 6: 6.2, 7: 7.2, 8: 8.2})
    assert "steps 3 to 7 were logged twice" in run.notes[0]


@pytest.mark.parametrize("later", [[], train(6, 7, value=0.5)])
def test_the_validation_of_a_resumed_run_leaves_the_training_of_its_step(tmp_path, later):
    old = [*train(1, 2, 3, 4), (5, {"a": 5, "val-core/x": 1}), *train(6, 7)]
    run = read_run(write(tmp_path / "run.jsonl", [*old, (5, {"val-core/x": 2, "val-aux/y": 3}), *later]))
    assert values(run)[5] == 5
    assert values(run, "val-core/x") == {5: 2}
    assert values(run)[6] == (6.5 if later else 6)
    assert bool(run.notes) == bool(later)  # a validation alone may just be late


def test_a_validation_that_comes_late_abandons_nothing(tmp_path):
    run = read_run(write(tmp_path / "run.jsonl", [*train(1, 2, 3, 4), (2, {"val-core/x": 1}), *train(5, 6)]))
    assert list(values(run)) == [1, 2, 3, 4, 5, 6]
    assert values(run, "val-core/x") == {2: 1}
    assert run.notes == ()
    resumed = [*train(1, 2, 3, 4), (2, {"val-core/x": 1}), *train(5, 6), *train(5, 6, value=0.5)]
    assert values(read_run(write(tmp_path / "run.jsonl", resumed))) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5.5, 6: 6.5}


@pytest.mark.parametrize("first", [[(0, {"val-core/x": 0.5})], [], train(0)])
def test_a_step_that_goes_back_to_the_start_begins_another_run(tmp_path, first):
    file = write(tmp_path / "run.jsonl", [*first, *train(1, 2, 3), *first, *train(1, 2, value=0.5)])
    last, one, two = read_run(file), read_run(file, which=1), read_run(file, which=2)
    assert (values(one)[1], values(last)[1], values(last)[2]) == (1, 1.5, 2.5)
    start = [0] if first else []
    assert one.steps.tolist() == [*start, 1, 2, 3]
    assert last.steps.tolist() == two.steps.tolist() == [*start, 1, 2]
    noted(last, "2 runs.*FILE:1")
    assert one.notes == two.notes == ()


def test_three_runs_the_second_resumed(tmp_path):
    rows = [*train(1, 2, 3), *train(1, 2, 3, 4), *train(3, 4, 5, value=0.5), *train(0, 1)]
    file = write(tmp_path / "run.jsonl", rows)
    noted(read_run(file), "3 runs.*FILE:1 to FILE:2")
    assert values(read_run(file, which=2)) == {1: 1, 2: 2, 3: 3.5, 4: 4.5, 5: 5.5}
    assert read_run(file, which=1).steps.tolist() == [1, 2, 3]
