"""The dump of single trajectories: reading it, and writing it into a page."""

import json
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import at_most
from tests.unit.report.made_trajectories import dump, line
from verl_ext.report.run import ReportError
from verl_ext.report.trajectories import (
    read_trajectories,
    trajectories_file,
    write_trajectory_page,
)


def test_load_gives_what_was_dumped(tmp_path):
    row = line(3, "a", count=200, total=900)
    (got,) = read_trajectories(dump(tmp_path, [row]))[0]
    for name, value in row.items():
        assert getattr(got, name) == (tuple(value) if isinstance(value, list) else value), name


def test_what_a_run_may_leave_out(tmp_path):
    row = line(1, "a", correction=False, agreement=False, reward=None, advantage=None)
    del row["entropy"]
    (got,) = read_trajectories(dump(tmp_path, [row | {"agreement": None}]))[0]
    assert (got.reward, got.advantage, got.weight, got.agreement, got.entropy) == (None,) * 5
    (empty,) = read_trajectories(dump(tmp_path, [line(1, "a", texts=[], start=[], length=[])]))[0]
    assert empty.text == () and empty.log_k_sizes() == [] and empty.dropped() == 0


def test_gaps_and_what_was_dropped(tmp_path):
    row = line(
        1,
        "a",
        texts=list("abcde"),
        l_infer=[-1.0, -1.0, -1.0, None, None],
        l_old=[-1.5, -0.75, None, -1.0, None],
        weight=[0.0, 1.0, None, 0.0, None],
        kept=[1, 1, 0, 0, 0],
        generated=[1, 1, 1, 1, 0],
    )
    (got,) = read_trajectories(dump(tmp_path, [row]))[0]
    assert got.log_k_sizes() == [0.5, 0.25] and got.dropped() == 3


def test_the_older_file_comes_first_and_a_later_attempt_stands(tmp_path):
    dump(tmp_path, [line(1, "a"), line(2, "b", why="old")], "run.trajectories.1.jsonl")
    file = dump(tmp_path, [line(4, "d", reward=0.25), line(2, "b", why="new"), line(4, "d", reward=0.75)])
    got = read_trajectories(file)[0]
    assert [(one.step, one.key, one.why) for one in got][:2] == [(1, "a", "largest gap"), (2, "b", "new")]
    assert [one.reward for one in got][2:] == [0.75]


def test_what_a_resumed_run_left_behind_is_left_out(tmp_path):
    steps = [(1, "a"), (2, "b"), (3, "c"), (3, "d"), (2, "e"), (2, "f"), (3, "g")]
    got = read_trajectories(dump(tmp_path, [line(step, key) for step, key in steps]))[0]
    assert [one.key for one in got] == ["a", "e", "f", "g"]


def test_trajectories_file(tmp_path):
    metrics = tmp_path / "run.v2.jsonl"
    assert trajectories_file(metrics) is None
    dump(tmp_path, [line(1, "a")], "run.v2.trajectories.1.jsonl")
    file = trajectories_file(metrics)
    assert file == tmp_path / "run.v2.trajectories.jsonl"
    assert [one.key for one in read_trajectories(file)[0]] == ["a"]  # rotated, and not yet written again


@pytest.mark.parametrize("tail", [b'{"step": 3, "ke', b"{", b'{"text": ["\xe4\xbd', b"\n\n", b""])
def test_a_last_line_that_was_cut_is_ignored(tmp_path, tail):
    got, notes = read_trajectories(dump(tmp_path, [line(1, "a")], tail=tail))
    assert len(got) == 1 and notes == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": True}, "step"),
        ({"step": None}, "step"),
        ({"key": 7}, "key"),
        ({"reward": "high"}, "reward has the wrong type"),
        ({"prompt": ["What"]}, "prompt"),
        ({"text": None}, "text is not a list"),
        ({"text": "abc"}, "text is not a list"),
        ({"id": [1.5] * 300}, "an entry of id has the wrong type"),
        ({"id": [1] * 299}, "id has 299 entries, text has 300"),
        ({"weight": [1.0]}, "weight has 1 entries"),
        ({"l_old": [False] * 300}, "an entry of l_old has the wrong type"),
        ({"l_infer": None}, "l_infer is not a list"),
        ({"generated": [2] * 300}, "generated has an entry other than 0 and 1"),
        ({"start": [0, 100]}, "start and length do not describe"),
        ({"length": [299]}, "start and length do not describe 300 tokens"),
        ({"start": [0, 100], "length": [150, 150]}, "do not ascend"),
        ({"start": [-1]}, "do not ascend"),
        ({"tokens": 200}, "a stretch ends at 300"),
    ],
)
def test_odd_lines_are_left_out_and_told(tmp_path, change, said):
    good = line(1, "a")
    got, (note,) = read_trajectories(dump(tmp_path, [good, line(2, "b") | change, {"step": 1}, good | {"key": "c"}]))
    assert [one.key for one in got] == ["a", "c"]
    assert note.startswith("run.trajectories.jsonl: 2 lines left out (line 2: ") and said in note


def test_broken_lines_in_the_middle_are_left_out(tmp_path):
    good = orjson.dumps(line(1, "a"))
    file = tmp_path / "run.trajectories.jsonl"
    file.write_bytes(b'{"step": 1, "ke\n[]\n\xff\xfe\n{"a": NaN}\n' + good)  # a whole last line without its newline
    got, (note,) = read_trajectories(file)
    assert len(got) == 1 and "4 lines left out" in note


def test_nothing_to_show_is_one_line_with_the_remedy(tmp_path):
    missing, empty = tmp_path / "x.trajectories.jsonl", dump(tmp_path, [])
    odd = dump(tmp_path, [{"step": 1}], "odd.trajectories.jsonl")
    for ask in (
        lambda: read_trajectories(missing)[0],
        lambda: read_trajectories(empty)[0],
        lambda: read_trajectories(odd)[0],
        lambda: write_trajectory_page([], tmp_path / "x.html", title="x"),
    ):
        with pytest.raises(ReportError, match=r"stability\.trajectories\.per_step=2") as error:
            ask()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "x.html").exists()


@at_most(50)  # files are slow on a busy machine
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=8), prompt=st.text("<!-/script>\u2028")
)
def test_any_text_survives_the_way_into_the_page(tmp_path_factory, texts, prompt):
    folder = tmp_path_factory.mktemp("page")
    count = len(texts)
    row = line(1, "a", texts=texts, prompt=prompt, start=[0] * bool(count), length=[count] * bool(count))
    page = write_trajectory_page(read_trajectories(dump(folder, [row]))[0], folder / "p.html", title="t").read_bytes()
    # The HTML parser ends a script at the first `</script`, and reads no escapes in it.
    (data,) = re.findall(rb'<script type="application/json" id="trajectory-0">(.*?)</script', page, re.DOTALL)
    assert b"<" not in data and "\u2028".encode() not in data
    got = json.loads(data)
    assert got["text"] == texts and got["prompt"] == prompt
