"""Files next to a checkpoint (sizes, the guard's state, verl's tracker) that are half written, or not by verl."""

import copy
import json

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.support.examples import at_most
from tests.unit.trainer.test_checkpoints import saved
from verl_ext.guard.guard import Guard
from verl_ext.guard.rules import Rule
from verl_ext.trainer.checkpoints import (
    SIZES_FILE,
    STATE_FILE,
    TRACKER_FILE,
    CheckpointError,
    damage,
    folder_of,
    load_state,
    newest_whole,
    save_sizes,
    save_state,
)

RULES = (
    Rule("kl", "vllm_kl/k3", 0.5, action="tighten"),
    Rule("reward", "critic/score/mean", 3.0, side="below", action="rollback", zscore_window=8),
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def used_guard():
    guard = Guard(RULES)
    for step in range(1, 13):
        run(guard, step)
    return guard


def run(guard, step):
    """One step, as the trainer takes it."""
    signals = {"vllm_kl/k3": 0.01 * step, "vllm_kl/log_ratio_abs_mean": 0.01, "critic/score/mean": float(step % 3)}
    guard.begin(step)
    guard.foresee(signals)
    guard.count(guard.judge(signals).refusal is not None)
    guard.judge_late({"actor/grad_norm": 1.0})
    guard.close()
    guard.saved(step)


STATE = used_guard().state_dict()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("checkpoints"), (2, 4), STATE)


@pytest.fixture
def last(root):
    """The last checkpoint; whole again after the test."""
    folder = folder_of(root, 4)
    kept = {name: (folder / name).read_bytes() for name in (SIZES_FILE, STATE_FILE)}
    yield folder
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    (root / TRACKER_FILE).write_text("4")


DEEP = "[" * 100_000
ODD = ["", "null", "[]", "7", '"text"', "{", DEEP, '{"a":' * 100_000, b"\xff\xfe", "9" * 5000, "NaN"]


@pytest.mark.parametrize("name", [SIZES_FILE, STATE_FILE])
@pytest.mark.parametrize("content", ODD)
def test_a_file_that_is_none_of_ours_is_one_line_and_the_checkpoint_before(root, last, capsys, name, content):
    (last / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert newest_whole(root) == folder_of(root, 2)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and name in out and f"resuming from {folder_of(root, 2)}" in out and len(out) < 1000


def test_a_folder_in_the_place_of_a_file(root, last, capsys):
    (last / SIZES_FILE).unlink()
    (last / SIZES_FILE).mkdir()
    try:
        assert newest_whole(root) == folder_of(root, 2)
    finally:
        (last / SIZES_FILE).rmdir()


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("skips", None, "skips is not a whole number"),
        ("skips", True, "skips is not a whole number"),
        ("calm_from", 2**63, "calm_from is not a whole number"),
        ("rules", [], "rules is not a mapping"),
        ("rules", {"reward": {"history": ["a"]}}, "rules.reward.history is not a finite number"),
        ("rules", {"reward": {"firing": 1}}, "rules.reward.firing is not true or false"),
        ("rules", {"reward": {"colour": "red"}}, "rules.reward has an unknown entry colour"),
        ("growth", [[1, 0.1], [1, 0.2]], "the steps of growth do not ascend"),
        ("growth", [[1]], "growth is not a pair"),
        ("dropped", [[2, 0.1], [1, 0.2]], "the steps of dropped do not ascend"),
        ("record", {"critic/score/mean": [[2, 0.1], [2, 0.2]]}, "the steps of record.critic/score/mean do not ascend"),
        ("gaps", [float("nan")], "gaps is not a finite number"),
        ("unproven", 3, "unproven is not a list"),
        ("another", 3, "the state has an unknown entry another"),
        ("a\x1b[2Jb", 3, r"the state has an unknown entry a\x1b[2Jb"),
    ],
)
def test_an_entry_of_the_state_that_does_not_fit_is_named(last, entry, value, said):
    save_state(last, STATE | {entry: value})
    assert said in damage(last)
    with pytest.raises(CheckpointError, match="delete it to resume with a fresh guard"):
        load_state(last)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"actor/model.pt": "10"}, "has a size that is not a whole number"),
        ({"actor/model.pt": 11}, "actor/model.pt has 1000 bytes, but 11 were saved"),
        ({"a\x1b]0;title\x07\nb": 1}, r"a\x1b]0;title\x07\nb is missing"),
    ],
)
def test_sizes_that_do_not_fit_are_told_in_printable_text(last, sizes, said):
    (last / SIZES_FILE).write_text(json.dumps(sizes))
    assert said in damage(last)


@given(JSON)
@at_most(50)
def test_any_json_for_the_sizes_is_a_checkpoint_or_a_line(root, sizes):
    (folder_of(root, 4) / SIZES_FILE).write_text(json.dumps(sizes))
    try:
        assert newest_whole(root) in (folder_of(root, 2), folder_of(root, 4))
    finally:
        save_sizes(folder_of(root, 4))


@given(st.sampled_from(sorted(STATE)), JSON)
@example("growth", [[20, 0.1]] * 2)
@example("rules", {"reward": {"signal": "critic/score/mean", "history": [1e308, -1e308] * 4}})
def test_any_state_that_is_taken_can_be_gone_on_with(root, entry, value):
    folder = folder_of(root, 4)
    save_state(folder, STATE | {entry: value})
    wrong = damage(folder)
    saved = None if wrong else load_state(folder)
    save_state(folder, STATE)
    if saved is None:
        assert "\n" not in wrong
        return
    guard = Guard(RULES)
    guard.load_state_dict(saved)
    for step in range(13, 16):
        run(guard, step)
    json.dumps(guard.state_dict(), allow_nan=False)


def test_a_state_that_is_taken_is_taken_whole(root):
    guard = Guard(RULES)
    guard.load_state_dict(copy.deepcopy(load_state(folder_of(root, 4))))
    assert guard.state_dict() == STATE


@given(st.binary(max_size=8) | st.text(max_size=4).map(str.encode) | st.integers().map(lambda step: str(step).encode()))
@example("²".encode())
@example(b"9" * 5000)
@example(b"\xff")
@example(b"0\xc2\x85")
@example(b"[3]")
@at_most(50)
def test_any_tracker_leaves_a_checkpoint_to_resume_from(root, content):
    assume(content.decode(errors="replace").strip() not in ("0", "1"))  # before the first
    (root / TRACKER_FILE).write_bytes(content)
    assert newest_whole(root) in (folder_of(root, 2), folder_of(root, 4))
    (root / TRACKER_FILE).write_text("4")


@pytest.mark.parametrize("content", [b"", b"x", b"\xff", "²".encode()])
def test_a_tracker_that_names_nothing_without_a_checkpoint_is_an_error_with_its_remedy(tmp_path, content):
    (tmp_path / TRACKER_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{TRACKER_FILE} names no step.*delete it to start from the beginning"):
        newest_whole(tmp_path)


def test_folders_that_are_called_almost_like_a_checkpoint_are_none(tmp_path):
    for name in ("global_step_²", "global_step_٣", "global_step_03", "global_step_-1", "global_step_"):
        (tmp_path / name).mkdir()
    assert newest_whole(tmp_path) is None
