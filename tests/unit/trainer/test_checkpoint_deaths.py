"""A run that dies between any two writes of its checkpoints, and what the next one continues from."""

import os
from itertools import count
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

from verl_ext.base.errors import GuardStopError
from verl_ext.diagnosis.judge import RunningDiagnosis
from verl_ext.guard.guard import Guard
from verl_ext.guard.rules import LrState
from verl_ext.guard.state import GuardState
from verl_ext.trainer import checkpoints

COOLDOWN = 3
ROLLBACK = {
    "guard": {
        "rules": {"r": {"signal": "critic/score/mean", "below": 0.5, "action": "rollback"}},
        "rollback_cooldown": COOLDOWN,
        "stop_after": 100,
    }
}
GOOD, BAD = {"reward": 1.0}, {"reward": 0.0}
LATER = {"save_freq": 2, "experiment_name": "later"}  # a restart writes its metrics elsewhere


class Death(BaseException):
    """A kill, which no handler of errors sees."""


@pytest.fixture
def dying(monkeypatch):
    """dying(number, run) -> False if `run` dies at its write of this number, which leaves an empty file; True if it
    has fewer."""

    def run_until(number, run):
        done = count()
        with monkeypatch.context() as patched:
            for owner, name in ((Path, "write_text"), (Path, "touch"), (Path, "unlink"), (os, "replace")):
                patched.setattr(owner, name, _dies_at(number, done, getattr(owner, name)))
            try:
                run()
            except Death:
                return False
        return True

    return run_until


def _dies_at(number, done, write):
    def write_or_die(path, *args, **kwargs):
        if next(done) == number:
            if write.__name__ == "write_text":
                open(path, "w").close()
            raise Death
        return write(path, *args, **kwargs)

    return write_or_die


@pytest.fixture
def deaths(dying, tmp_path, monkeypatch):
    """deaths(begin, run, look) -> how many writes `run` makes.

    `begin` trains in a new folder, the process of `run` dies at each of its writes in turn, and `look(finished)` sees
    what is left.
    """

    def die_everywhere(begin, run, look):
        for number in count():
            folder = tmp_path / f"death_{number}"
            folder.mkdir()
            monkeypatch.chdir(folder)
            begin()
            finished = dying(number, run)
            look(finished)
            if finished:
                return number

    return die_everywhere


def begin_with_three_checkpoints(train):
    """Checkpoints of steps 2, 4 and 6, with as many updates. Only that of 2 is good: gradients were NaN since."""
    train(ROLLBACK, [GOOD] * 4 + [GOOD | {"grad_norm": float("nan")}] * 2, save_freq=2)


def resume(train, series=(), **trainer):
    """Resumes; returns the step, the weights and the guard's state with which a run begins."""
    resumed = train(ROLLBACK, series, **LATER | trainer)
    return resumed.global_steps, resumed.actor_rollout_wg.weights, resumed.stability_run.guard.state


def test_writing_a_step_again_leaves_the_old_or_the_new_checkpoint(train, deaths):
    def begin():
        begin_with_three_checkpoints(train)
        train(ROLLBACK, [BAD], **LATER)  # step 7 goes back to 2

    def run():
        resume(train, [BAD, GOOD, GOOD, GOOD])  # the first is skipped: step 4 has 3 updates, step 6 has 5

    def look(finished):
        step, weights, state = resume(train)
        outcomes.append((step, weights))
        assert state.rollbacks == 1 and state.calm_from == 2 + 1 + COOLDOWN

    outcomes = []
    assert deaths(begin, run, look) > 15
    assert outcomes[-1] == (6, 5)
    assert set(outcomes) == {(2, 2), (4, 3), (6, 5)}, "never the 4 or 6 updates that were given up"


def test_a_step_that_verl_names_the_latest_is_written_again(train, deaths):
    def begin():
        begin_with_three_checkpoints(train)

    def run():  # it branches off before the latest, whose step it reaches at its first checkpoint
        start = {"resume_mode": "resume_path", "resume_from_path": "checkpoints/global_step_4"}
        resume(train, [GOOD | {"k": float("nan")}, GOOD], **start)

    def look(finished):
        outcomes.append(resume(train)[:2])

    outcomes = []
    deaths(begin, run, look)
    assert outcomes[0] == (6, 6) and outcomes[-1] == (6, 5)
    assert set(outcomes) == {(6, 6), (4, 4), (6, 5)}


def test_a_step_that_was_cut_off_is_not_taken_after_later_ones(train, deaths):
    """The process after the death saves at other steps, and its own checkpoint is then damaged."""

    def begin():
        begin_with_three_checkpoints(train)
        train(ROLLBACK, [BAD], **LATER)

    def look(finished):
        step = resume(train)[0]
        resume(train, [GOOD] * (7 - step), save_freq=7)
        checkpoints.folder_of("checkpoints", 7).joinpath("actor", "model.pt").write_text("")
        outcomes.add(resume(train)[:2])

    outcomes = set()
    deaths(begin, lambda: resume(train, [BAD, GOOD]), look)
    assert outcomes == {(2, 2), (4, 3)}


def test_a_rollback_has_happened_or_not(train, deaths):
    def look(finished):
        step, weights, state = resume(train)
        outcomes.append((step, weights, state.rollbacks, state.calm_from))

    outcomes = []
    deaths(lambda: begin_with_three_checkpoints(train), lambda: resume(train, [BAD]), look)
    assert set(outcomes) == {(6, 6, 0, 0), (2, 2, 1, 2 + 1 + COOLDOWN)}
    assert outcomes == sorted(outcomes, reverse=True), "one write decides"


def test_an_undo_of_what_a_checkpoint_holds_has_happened_or_not(train, deaths):
    undo = {"guard": {"rules": {"r": ROLLBACK["guard"]["rules"]["r"] | {"action": "undo"}}}}

    def look(finished):
        resumed = train(undo, [], **LATER)
        outcomes.append((resumed.global_steps, resumed.actor_rollout_wg.weights))

    outcomes = []
    # Step 5 takes back the update of step 4, which checkpoint 4 holds.
    deaths(lambda: train(undo, [GOOD] * 2, save_freq=2), lambda: train(undo, [GOOD, GOOD, BAD], **LATER), look)
    assert outcomes[-1] == (2, 2)
    assert set(outcomes) == {(2, 2), (4, 4)}


def test_processes_that_die_after_each_rollback_go_further_back_and_end(train):
    train(ROLLBACK, [GOOD] * 10, save_freq=2)
    bad_until_the_cooldown_is_over = [BAD] * (COOLDOWN + 1)
    reached = []
    for _ in range(3):
        _, _, state = resume(train, bad_until_the_cooldown_is_over, save_freq=100)
        reached.append((checkpoints.step_of(checkpoints.newest_whole("checkpoints")), state.rollbacks))
    assert reached == [(8, 1), (6, 2), (4, 3)]
    with pytest.raises(GuardStopError, match="after 3 rollbacks"):
        resume(train, bad_until_the_cooldown_is_over, save_freq=100)


def test_a_checkpoint_that_workers_still_write_is_not_whole(tmp_path):
    """Workers that save asynchronously write verl's tracker when their files are complete."""
    config = saves_asynchronously(tmp_path)
    for step in (2, 4, 6):
        with checkpoints.saving(Guard(), RunningDiagnosis(), config, step):
            (checkpoints.folder_of(tmp_path, step) / "actor").mkdir()
        if step < 6:
            (tmp_path / checkpoints.TRACKER_FILE).write_text(str(step))
    assert checkpoints.newest_whole(tmp_path) == checkpoints.folder_of(tmp_path, 4)
    assert checkpoints.newest_of(tmp_path, [2, 4, 6]) == checkpoints.folder_of(tmp_path, 4)
    assert checkpoints.newest_of(tmp_path, [2]) == checkpoints.folder_of(tmp_path, 2)
    (tmp_path / checkpoints.TRACKER_FILE).write_text("6")
    assert checkpoints.newest_whole(tmp_path) == checkpoints.folder_of(tmp_path, 6)


def saves_asynchronously(root):
    actor = {"checkpoint": {"async_save": True}}
    return OmegaConf.create({"trainer": {"default_local_dir": str(root)}, "actor_rollout_ref": {"actor": actor}})


def test_the_state_for_a_restart_waits_as_many_steps_as_the_run():
    state = GuardState(
        skips=7, calm_from=81, given_up=75, lr=LrState(lowered=2, since=70),
        growth=[(59, 0.1), (60, 0.2), (61, 0.3)], record={"critic/score/mean": [(60, 1.0), (74, 0.0)]},
        good=[20, 40], unproven=[(60, 75)],
    )  # fmt: skip
    restarted = state.as_of(60, now=75)
    assert (restarted.calm_from, restarted.lr.since) == (66, 55)
    assert restarted.lr.lowered == 2 and restarted.skips == 7 and restarted.good == [20, 40]
    assert restarted.growth == [(59, 0.1), (60, 0.2)] and restarted.record == {"critic/score/mean": [(60, 1.0)]}
    assert restarted.unproven == [(60, 60)] and restarted.given_up == 60
    assert state.lr.since == 70 and state.unproven == [(60, 75)], "the run's own state stays"


def test_verls_tracker_has_this_name(tmp_path):
    assert get_checkpoint_tracker_filename(str(tmp_path)) == str(tmp_path / checkpoints.TRACKER_FILE)
