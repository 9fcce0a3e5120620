import json
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from verl_ext.guard.guard import Guard
from verl_ext.trainer.checkpoints import (
    SIZES_FILE,
    STATE_FILE,
    TRACKER_FILE,
    CheckpointError,
    _explain_failure,
    damage,
    folder_of,
    forget,
    give_up,
    load_state,
    newest_of,
    newest_whole,
    save_sizes,
    save_state,
)


def saved(root, steps, state):
    """Returns a folder with checkpoints of these steps, the last one the latest."""
    for step in steps:
        folder = folder_of(root, step)
        save_state(folder, state)
        (folder / "actor").mkdir()
        (folder / "actor" / "model.pt").write_bytes(b"x" * 1000)
        save_sizes(folder)
    (root / TRACKER_FILE).write_text(str(steps[-1]))
    return root


@pytest.fixture
def root(tmp_path):
    return saved(tmp_path, (2, 4, 6), Guard().state_dict())


def truncate(root, step, file="actor/model.pt"):
    path = folder_of(root, step) / file
    path.write_bytes(path.read_bytes()[:10])


def test_a_truncated_one_is_passed_over_and_named(root, capsys):
    truncate(root, 6)
    assert newest_whole(root) == folder_of(root, 4)
    out = capsys.readouterr().out
    assert "global_step_6 cannot be resumed from: actor/model.pt has 10 bytes, but 1000 were saved" in out
    assert f"resuming from {folder_of(root, 4)}" in out


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "actor" / "model.pt").unlink(), "actor/model.pt is missing"),
        (lambda folder: (folder / SIZES_FILE).write_text('{"a'), f"{SIZES_FILE} is not JSON"),
    ],
)
def test_what_is_wrong_is_said(root, harm, said):
    harm(folder_of(root, 6))
    assert said in damage(folder_of(root, 6))
    assert newest_whole(root) == folder_of(root, 4)


def test_all_damaged_is_an_error_and_no_silent_new_start(root):
    for step in (2, 4, 6):
        truncate(root, step)
    with pytest.raises(CheckpointError, match=r"global_step_2 cannot be resumed from.*resume_mode=disable"):
        newest_whole(root)


@pytest.mark.parametrize(
    ("tracker", "step", "said"),
    [
        pytest.param("6", 6, "", id="the latest whole one is resumed from"),
        pytest.param("4", 4, "", id="killed while it saved step 6: the tracker names the one before"),
        pytest.param("", 6, "", id="a tracker that was cut off hides nothing"),
        pytest.param("9", 6, "global_step_9 cannot be resumed from: the folder is missing", id="a step that is gone"),
    ],
)
def test_the_checkpoint_that_verls_tracker_names(root, capsys, tracker, step, said):
    (root / TRACKER_FILE).write_text(tracker)
    assert newest_whole(root) == folder_of(root, step)
    out = capsys.readouterr().out
    assert said in out and bool(said) == bool(out)


def test_without_a_tracker_the_newest_complete_one_is_taken(root):
    (root / TRACKER_FILE).unlink()
    save_state(folder_of(root, 8), Guard().state_dict())  # killed while it was saved
    assert newest_whole(root) == folder_of(root, 6)


def test_what_a_rollback_gave_up_is_not_resumed_from(root, capsys):
    give_up(root, after=2)
    assert newest_whole(root) == folder_of(root, 2)
    assert "global_step_6 cannot be resumed from: the guard gave it up" in capsys.readouterr().out
    assert newest_of(root, [2, 4, 6]) == folder_of(root, 2)
    forget(folder_of(root, 6))
    assert newest_whole(root) == folder_of(root, 2), "it is about to be overwritten"
    save_sizes(folder_of(root, 6))
    (root / TRACKER_FILE).write_text("6")
    assert newest_whole(root) == folder_of(root, 6)


def test_without_checkpoints_verl_starts_from_scratch(tmp_path):
    assert newest_whole(tmp_path / "none") is None
    assert newest_whole(tmp_path) is None


def test_checkpoints_of_plain_verl_are_taken_as_they_are(root):
    for file in (SIZES_FILE, STATE_FILE):
        (folder_of(root, 6) / file).unlink()
    assert newest_whole(root) == folder_of(root, 6)
    assert load_state(folder_of(root, 6)) is None


def test_the_newest_good_one_that_still_has_its_model(root):
    assert newest_of(root, [2, 4]) == folder_of(root, 4)
    truncate(root, 4)
    assert newest_of(root, [2, 4]) == folder_of(root, 2)
    (folder_of(root, 2) / "actor" / "model.pt").unlink()
    assert newest_of(root, [2, 4]) is None
    assert newest_of(root, []) is None


def test_state_survives_with_every_digit(tmp_path):
    guard = Guard()
    guard.begin(1)
    guard.foresee({"vllm_kl/k3": 0.1 + 0.2, "vllm_kl/log_ratio_abs_mean": 1e-17 / 3})
    save_state(tmp_path, guard.state_dict())
    other = Guard()
    other.load_state_dict(load_state(tmp_path))
    assert other.state == guard.state
    assert json.loads((tmp_path / STATE_FILE).read_text())["growth"] == [[1, 0.30000000000000004]]


FOLDER = Path("checkpoints/global_step_3")


def in_a_worker(cause):
    return RayTaskError("save_checkpoint", "Traceback", cause)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(30, "Read-only file system"), r"OSError: \[Errno 30\] Read-only file system"),
        (in_a_worker(PermissionError(13, "Permission denied")), r"PermissionError: \[Errno 13\] Permission denied"),
        (in_a_worker(RuntimeError("PytorchStreamWriter failed writing file data/0\nmore")), "writing file data/0"),
        (OSError(), r"OSError: \)"),
    ],
)
def test_one_line_names_the_checkpoint_and_how_to_go_on(error, said):
    with (
        pytest.raises(CheckpointError, match=rf"global_step_3 cannot be written \(.*{said}") as raised,
        _explain_failure(FOLDER),
    ):
        raise error
    assert "resume_mode=auto" in str(raised.value) and "more" not in str(raised.value)


@pytest.mark.parametrize("error", [in_a_worker(RuntimeError("gloo: connection reset")), in_a_worker(AssertionError())])
def test_what_is_no_matter_of_writing_stays_what_it_is(error):
    with pytest.raises(RayTaskError) as raised, _explain_failure(FOLDER):
        raise error
    assert raised.value is error
