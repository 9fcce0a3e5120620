"""The guard in the loop of a trainer of our own, which calls the hooks in the order of verl's `PPOTrainer.fit`."""

import json
from dataclasses import asdict

import pytest

from tests.support.guarded_training import VerlTrainer
from verl_ext.base.errors import GuardStopError, HookError
from verl_ext.core.answers import Servers
from verl_ext.guard.state import Decision, Event
from verl_ext.trainer import checkpoints
from verl_ext.trainer.checkpoints import CheckpointError
from verl_ext.trainer.trainers import accelerators_of_nodes


def events(name="p/e.guard.jsonl"):
    with open(name) as file:
        return [json.loads(line) for line in file]


def saved_weights(step):
    return int((checkpoints.folder_of("checkpoints", step) / "actor" / "model.pt").read_text().split()[0])


def rule(action, **settings):
    return {"guard": {"rules": {"r": {"signal": "critic/score/mean", "below": 0.5, "action": action} | settings}}}


GOOD, BAD = {"reward": 1.0}, {"reward": 0.0}


def test_warn_writes_one_json_line_and_one_readable_line(train, capsys):
    train(rule("warn"), [GOOD, BAD, BAD, GOOD])
    assert events() == [
        {
            "step": 2,
            "rule": "r",
            "signal": "critic/score/mean",
            "value": 0.0,
            "threshold": 0.5,
            "action": "warn",
            "reason": "critic/score/mean=0 is below stability.guard.rules.r.below=0.5",
        },
        {
            "step": 4,
            "rule": "r",
            "signal": "critic/score/mean",
            "value": 1.0,
            "threshold": 0.5,
            "action": "recover",
            "reason": "critic/score/mean=1, r recovers",
        },
    ]
    out = capsys.readouterr().out
    assert "verl_ext: step 2: warn: critic/score/mean=0 is below stability.guard.rules.r.below=0.5\n" in out


def test_skip_leaves_the_update_out(train):
    trainer = train(rule("skip"), [GOOD, BAD, GOOD])
    assert trainer.synchronised == [1, 1, 2]
    assert [event["action"] for event in events()] == ["skip", "recover"]


def test_rollback_loads_the_last_good_weights_before_they_are_synchronised_and_saved(train):
    trainer = train(rule("rollback"), [GOOD, GOOD, GOOD, BAD, GOOD, GOOD])
    # Checkpoint 3 holds three updates, and step 4 finds them bad: those of checkpoint 2 were measured in step 3.
    assert trainer.synchronised == [1, 2, 3, 2, 3, 4]
    assert saved_weights(4) == 2
    assert [event["action"] for event in events()][:2] == ["rollback", "restored"]
    assert trainer.stability_run.guard.state.rollbacks == 1


def test_a_rollback_asked_for_after_the_step_comes_with_the_next(train):
    late = {"guard": {"rules": {"r": {"signal": "response_length/mean", "above": 9, "action": "rollback"}}}}
    trainer = train(late, [{}, {}, {}, {"length": 10.0}, {}, {}])
    # Step 5 learns nothing more and goes back to 2: what step 4 logged last spoke against the weights of 3.
    assert trainer.synchronised == [1, 2, 3, 4, 2, 3]


def test_a_rollback_that_is_due_survives_a_restart(train):
    late = {"guard": {"rules": {"r": {"signal": "response_length/mean", "above": 9, "action": "rollback"}}}}
    train(late, [{}, {}, {}, {"length": 10.0}])
    resumed = train(late, [{}, {}])
    assert resumed.synchronised == [2, 3]


def test_a_restart_after_a_rollback_does_not_take_up_what_was_given_up(train, capsys):
    # Step 5 finds the weights of 4 bad, and goes back to 2; the run is killed before another checkpoint.
    train(rule("rollback"), [GOOD, GOOD, GOOD, GOOD, BAD], save_freq=2)
    resumed = train(rule("rollback"), [GOOD, GOOD], save_freq=2)
    assert "global_step_4 cannot be resumed from: the guard gave it up" in capsys.readouterr().out
    assert resumed.global_steps == 4 and resumed.synchronised == [3, 4]
    assert checkpoints.newest_whole("checkpoints") == checkpoints.folder_of("checkpoints", 4), "saved anew"


def test_an_undo_takes_back_the_update_that_the_batch_finds_bad(train, capsys):
    trainer = train(rule("undo"), [GOOD, GOOD, GOOD, BAD, BAD, GOOD, GOOD])
    # Step 4 finds the weights of step 3 bad, and takes that update back; so soon after, step 5 is a skip.
    assert trainer.synchronised == [1, 2, 3, 2, 2, 3, 4]
    assert [(event["step"], event["action"]) for event in events()] == [
        (4, "undo"), (4, "restored"), (5, "skip"), (6, "recover"),
    ]  # fmt: skip
    assert logged("guard/undos") == [0, 0, 0, 1, 1, 1, 1]
    resumed = train(rule("undo"), [GOOD])
    assert resumed.synchronised == [5], "the checkpoints since are good"


def test_a_restart_after_an_undo_does_not_take_up_what_was_given_up(train, capsys):
    train(rule("undo"), [GOOD, GOOD, GOOD, GOOD, BAD], save_freq=2)  # step 5 takes back what checkpoint 4 has
    resumed = train(rule("undo"), [GOOD], save_freq=2)
    assert "global_step_4 cannot be resumed from: the guard gave it up" in capsys.readouterr().out
    assert resumed.synchronised == [3]


def test_an_undo_by_what_comes_with_the_update_never_reaches_the_rollout(train):
    late = {"guard": {"rules": {"r": {"signal": "actor/grad_norm", "above": 9, "action": "undo"}}}}
    trainer = train(late, [{}, {"grad_norm": 10.0}, {"grad_norm": float("nan")}, {}])
    assert trainer.synchronised == [1, 1, 1, 2]
    assert [event["action"] for event in events()] == ["undo", "restored"] * 2 + ["recover"]
    assert trainer.stability_run.guard.state.in_a_row == 0
    assert saved_weights(3) == 1


def test_an_undo_without_an_update_that_is_kept_says_so(train):
    trainer = train(rule("undo"), [BAD, GOOD])
    assert trainer.synchronised == [0, 1]
    assert [event["action"] for event in events()] == ["undo", "warn", "recover"]


def test_the_learning_rate_is_lowered_for_the_batch_that_asks_for_it(train):
    lowered = rule("lower_lr")
    lowered["guard"]["lower_lr"] = {"hold": 2}
    trainer = train(lowered, [GOOD, BAD, BAD, BAD, GOOD, GOOD, GOOD, GOOD])
    assert trainer.actor_rollout_wg.rates == [1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5]
    assert logged("guard/lr_scale") == [1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5]


def test_rollback_without_a_good_checkpoint_stops(train):
    with pytest.raises(GuardStopError, match="there is no checkpoint to go back to"):
        train(rule("rollback"), [BAD, GOOD])
    assert [event["action"] for event in events()] == ["rollback", "stop"]


def test_stop_ends_the_run_before_the_next_step_with_its_metrics_written(train):
    with pytest.raises(
        GuardStopError, match=r"stopped the run: critic/score/mean=0 is below.*last good checkpoint is .*global_step_1"
    ):
        train(rule("stop"), [GOOD, GOOD, BAD, GOOD])
    with open("p/e.jsonl") as file:
        assert [json.loads(line)["step"] for line in file] == [1, 2, 3]


def test_a_stop_in_the_last_step_is_a_stop(train):
    with pytest.raises(GuardStopError):
        train(rule("stop"), [GOOD, BAD])


def test_ten_steps_in_a_row_without_an_update_stop_the_run(train):
    with pytest.raises(GuardStopError, match="10 steps in a row without an update"):
        train({"batch_skip": {"threshold": 0.1}}, [{"k": 1.0}] * 12)
    assert [event["action"] for event in events()] == ["skip"] * 10 + ["stop"]


def test_tighten_narrows_the_band_of_the_same_batch_until_it_recovers(train):
    stability = rule("tighten") | {"correction": "icepop", "icepop": {"alpha": 0.5, "beta": 1.44}}
    # k = exp(0.3) = 1.35 lies in the band, and outside of its square root.
    trainer = train(stability, [GOOD | {"k": 0.3}, BAD | {"k": 0.3}, BAD | {"k": 0.1}, GOOD | {"k": 0.3}, {"k": 0.3}])
    assert trainer.synchronised == [1, 1, 2, 2, 3]
    with open("p/e.jsonl") as file:
        logged = [json.loads(line)["data"] for line in file]
    assert [step["guard/tightened"] for step in logged] == [0, 1, 1, 1, 0]
    assert [step["correction/dropped"] for step in logged] == [0, 1, 0, 1, 0]


def logged(name):
    with open("p/e.jsonl") as file:
        return [json.loads(line)["data"].get(name) for line in file]


@pytest.mark.parametrize(("correction", "watched"), [("icepop", True), (["icepop", "geo_mask"], True), ("kpop", False)])
def test_a_mask_is_watched_where_its_band_is_fixed(train, correction, watched):
    train({"correction": correction}, [GOOD] * 3)
    assert logged("guard/mask_blind") == ([0.0] * 3 if watched else [None] * 3)


def test_a_run_that_is_dead_is_told_in_its_log(train, capsys):
    train({"metrics": True}, [GOOD] * 8 + [BAD | {"grad_norm": 3.0}] * 25, save_freq=100)
    (event,) = events()
    assert (event["step"], event["rule"], event["action"]) == (32, "collapse", "warn")
    assert "step 32: warn: The reward fell from 1 to 0, from step 9 on, and stays there." in capsys.readouterr().out
    assert logged("guard/collapsed") == [0.0] * 31 + [1.0] * 2


def test_a_nan_gradient_is_an_event(train):
    train({"metrics": True}, [{}, {"grad_norm": float("nan")}, {}])
    (event,) = events()
    assert (event["rule"], event["signal"], event["value"]) == ("non_finite", "actor/grad_norm", None)
    assert event["reason"] == "actor/grad_norm is nan"


def test_nan_log_probs_and_a_nan_reward_skip(train):
    trainer = train({"metrics": True}, [{}, {"k": float("nan")}, {"reward": float("nan")}, {}])
    assert trainer.synchronised == [1, 1, 1, 2]
    assert events()[0]["reason"] == "old_log_probs has 3 non-finite values"
    assert events()[-1]["reason"] == "critic/score/mean is nan"


def test_a_signal_that_is_never_logged_stops_with_what_is_near(train):
    unknown = {"guard": {"rules": {"r": {"signal": "actor/grad_nrm", "above": 1, "action": "warn"}}}}
    with pytest.raises(HookError, match=r"rules\.r\.signal=actor/grad_nrm was not logged in 3 steps.*actor/grad_norm"):
        train(unknown, [{}] * 5)
    validation = {"guard": {"rules": {"r": {"signal": "val-core/acc", "below": 1, "action": "warn"}}}}
    train(validation, [{}] * 5, default_local_dir="other")


SERIES = [
    {"k": 0.01 * (1 + step % 3), "reward": float(step % 5 > 1), "length": 1 + step % 4 + 9.0 * (step == 11)}
    for step in range(14)
]


def test_a_run_that_is_resumed_decides_and_logs_as_one_that_never_stopped(train):
    stability = {"batch_skip": {"threshold": 0.0003}, "router_agreement": True} | rule("warn", patience=2)
    stability["guard"]["rules"]["late"] = {"signal": "response_length/mean", "above": 2, "zscore_window": 8}
    stability["guard"]["rules"]["late"]["action"] = "warn"
    whole = train(stability, SERIES, save_freq=3, default_local_dir="whole", experiment_name="whole")
    train(stability, SERIES[:9], save_freq=3)
    second = train(stability, SERIES[9:], save_freq=3)
    assert second.stability_run.guard.state == whole.stability_run.guard.state
    assert events() == events("p/whole.guard.jsonl") != []
    with open("p/e.jsonl") as file, open("p/whole.jsonl") as other:
        lines = file.readlines()
        assert lines == other.readlines()
    moved = [json.loads(line)["data"]["router/load_moved"] for line in lines]
    assert moved[0] == 0 < max(moved[9:]), "the resumed run compares with the first step of before"


def test_a_truncated_checkpoint_is_passed_over(train, capsys):
    train({"metrics": True}, [{}] * 4)
    (checkpoints.folder_of("checkpoints", 4) / "actor" / "model.pt").write_text("0")
    trainer = train({"metrics": True}, [{}])
    assert trainer.global_steps == 4 and trainer.synchronised == [4]
    out = capsys.readouterr().out
    assert "global_step_4 cannot be resumed from: actor/model.pt has 1 bytes, but 17 were saved" in out
    (checkpoints.folder_of("checkpoints", 2) / "actor" / "model.pt").write_text("0")
    with pytest.raises(CheckpointError, match="global_step_2 is damaged"):
        train({"metrics": True}, [{}], resume_mode="resume_path", resume_from_path="checkpoints/global_step_2")


@pytest.mark.parametrize("stability", [{"sync_check": {}}, {"metrics": True}])
def test_what_is_decided_before_the_run_trains_is_logged(train, monkeypatch, stability):
    """The first weight sync comes before verl's `fit`."""
    first = Event(0, "sync_check", "sync/wrong_tensors", 1.0, 0.0, "stop", "a tensor is wrong")
    load = VerlTrainer._load_checkpoint

    def load_and_sync(trainer):
        load(trainer)
        trainer.stability_run.actions.record_decision(Decision((first,)))

    monkeypatch.setattr(VerlTrainer, "_load_checkpoint", load_and_sync)
    with pytest.raises(GuardStopError, match="a tensor is wrong"):
        train(stability, [GOOD])
    assert events() == [asdict(first)]


def test_with_nothing_switched_on_there_is_no_event_file(train, tmp_path):
    trainer = train({}, [{}, BAD])
    assert trainer.synchronised == [1, 2]
    assert not (tmp_path / "p" / "e.guard.jsonl").exists()


def test_servers_with_different_accelerators_are_an_event_once(train, monkeypatch):
    mixed = Servers(["a:1", "b:1"], {"a": "H100", "b": "H20"})
    monkeypatch.setattr("verl_ext.trainer.run.Servers", lambda: mixed)
    train({"metrics": True}, [GOOD, GOOD])
    (event,) = [event for event in events() if event["rule"] == "servers"]
    assert event["step"] == 0 and mixed.mixed in event["reason"]


def test_rays_nodes_know_their_accelerators(monkeypatch):
    nodes = [
        {"NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "GPU": 8.0, "accelerator_type:H100": 1.0}},
        {"NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 8.0}},
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert accelerators_of_nodes() == {"10.0.0.1": "H100"}
