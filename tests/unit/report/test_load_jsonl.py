import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import at_most
from tests.unit.report.made_files import noted, train, values, write
from verl_ext.report.load import Reader, read_run
from verl_ext.report.run import ReportError


def line(step: int, **data) -> str:
    return json.dumps({"step": step, "data": data}) + "\n"


def plain(run) -> dict:
    """Returns a run as nested lists, to compare; NaN becomes text, because it is not equal to itself."""
    return {
        "steps": run.steps.tolist(),
        "metrics": {
            name: (series.steps.tolist(), ["nan" if math.isnan(value) else value for value in series.values])
            for name, series in run.metrics.items()
        },
        "notes": run.notes,
    }


def test_load_gives_steps_and_values_by_name(tmp_path):
    file = write(tmp_path / "run.jsonl", [(1, {"a": 1, "b": 0.5}), (2, {"a": 2}), (4, {"b": 0.25})])
    run = read_run(file)
    assert run.steps.tolist() == [1, 2, 4]
    assert run.steps.dtype == np.int64
    assert values(run) == {1: 1.0, 2: 2.0}
    assert values(run, "b") == {1: 0.5, 4: 0.25}
    assert run.metrics["b"].values.dtype == np.float64
    assert run.get("never logged") is None
    assert (run.name, run.sources, run.events, run.notes) == ("run", (file,), (), ())


def test_a_file_called_metrics_has_the_name_of_its_folder(tmp_path):
    for folder, name in (("icepop", "icepop"), (".quickstart", "quickstart")):
        assert read_run(write(tmp_path / folder / "metrics.jsonl", train(1))).name == name


@pytest.mark.parametrize(
    "broken", ["{oops}", '{"step": "1", "data": {}}', '{"step": 1}', "[1]", "7", '{"step": true, "data": {}}']
)
def test_a_broken_line_is_left_out_and_told(tmp_path, broken):
    file = tmp_path / "run.jsonl"
    file.write_text(line(1, a=1) + f"\n{broken}\n" + line(2, a=2))
    run = read_run(file)
    assert run.steps.tolist() == [1, 2]
    noted(run, "line 3 of run.jsonl")
    file.write_text(line(1, a=1) + f"{broken}\n" + line(2, a=2) + "{oops}\n")
    noted(read_run(file), "2 lines of run.jsonl.*line 2")


@pytest.mark.parametrize(
    ("behind", "found", "notes"),
    [
        # A resumed run wrote a line behind half a line.
        ('{"step": 2, "data": {"a": 2, "tex' + line(2, a=9) + line(3, a=3), {1: 1, 2: 9, 3: 3}, 1),
        ('{"step": 2, "data": {"a": 2, "ü' + line(2, a=9) + line(3, a=3), {1: 1, 2: 9, 3: 3}, 1),
        ("\0\0\0" + line(2, a=9) + line(3, a=3), {1: 1, 2: 9, 3: 3}, 1),
        (line(2, a=2).rstrip() + line(3, a=3), {1: 1, 2: 2, 3: 3}, 0),  # behind a whole one
        (line(2, b=5, a=2) + line(2, c=5, a=3) + line(3, a=1), {1: 1, 2: 3, 3: 1}, 0),  # the later value counts
    ],
)
def test_every_record_of_a_line_is_read_and_those_of_a_step_are_merged(tmp_path, behind, found, notes):
    run = read_run(write(tmp_path / "run.jsonl", train(1), behind))
    assert values(run) == found and len(run.notes) == notes
    assert all(values(run, name) == {2: 5} for name in run.metrics.keys() - {"a"})


@pytest.mark.parametrize("content", ["", "\n", '{"step": 1, "da'])
def test_a_file_without_a_step_is_refused(tmp_path, content):
    file = tmp_path / "empty.jsonl"
    file.write_text(content)
    with pytest.raises(ReportError, match=r"empty\.jsonl: no complete step"):
        read_run(file)


def test_a_file_of_which_no_line_can_be_read_is_refused(tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"input": "x"}\n' * 3)
    with pytest.raises(ReportError, match=r"other\.jsonl: no line is a JSON object with a step ") as error:
        read_run(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("nan", ["null", "NaN"])
def test_nan_stands_over_an_earlier_finite_value(tmp_path, nan):
    file = tmp_path / "run.jsonl"
    file.write_text(
        f'{{"step":1,"data":{{"a":1,"b":2}}}}\n{{"step":1,"data":{{"a":{nan}}}}}\n{{"step":2,"data":{{"a":3}}}}\n'
    )
    run = read_run(file)
    assert np.isnan(run.metrics["a"].values).tolist() == [True, False]
    assert run.get("a").steps.tolist() == [2]
    assert run.notes == ()


def test_text_lists_and_objects_are_no_metrics(tmp_path):
    data = {"t": "x", "l": [1], "o": {"p": 1}, "yes": True, "huge": 10**30, "more": 10**400, "a": 1, "none": None}
    run = read_run(write(tmp_path / "run.jsonl", [(1, data), (2, {"t": 5})]))
    assert {name: value for name in run.metrics for value in run.metrics[name].values.tolist()[:1]} == pytest.approx(
        {"yes": 1.0, "huge": 1e30, "more": math.inf, "a": 1.0, "none": math.nan, "t": 5.0}, nan_ok=True
    )
    assert values(run, "t") == {2: 5.0}
    assert run.steps.tolist() == [1, 2]


@pytest.mark.slow
def test_a_long_file_of_short_lines(tmp_path):
    count = 300_000
    file = tmp_path / "run.jsonl"
    file.write_text("".join(f'{{"step":{step},"data":{{"a":{step}.5}}}}\n' for step in range(count)))
    run = read_run(file)
    assert np.array_equal(run.steps, np.arange(count))
    assert np.array_equal(run.metrics["a"].values, np.arange(count) + 0.5)
    assert run.metrics["a"].steps is run.steps


def test_lines_longer_than_a_block_and_names_that_change_every_line(tmp_path):
    rows = [(step, {f"{'x' * 60_000}{step}/{index}": float(index) for index in range(20)}) for step in range(3)]
    rows += [(step, {f"m{step}": 1.0, "a": step}) for step in range(3, 600)]
    run = read_run(write(tmp_path / "run.jsonl", rows))
    assert len(run.metrics) == 60 + 597 + 1
    assert values(run, "m599") == {599: 1.0}
    assert list(values(run)) == list(range(3, 600))


PIECES = st.one_of(
    st.builds(
        lambda step, data: json.dumps({"step": step, "data": data}) + "\n",
        st.integers(0, 6),
        st.dictionaries(
            st.sampled_from(["a", "é/b", "val-core/x"]),
            st.one_of(st.none(), st.floats(-1e3, 1e3), st.text(max_size=2), st.just(float("nan"))),
            max_size=3,
        ),
    ),
    st.sampled_from(
        ["\n", "{oops}\n", '{"step": 3, "data": {"a": 1, "b', '{"step": 2, "data": {}}', "5", '{"a": 1}\n']
    ),
)


@given(st.lists(PIECES, max_size=12), st.lists(st.integers(0, 600), max_size=5))
def test_reading_on_at_any_cut_gives_what_reading_once_gives(pieces, cuts):
    text = "".join(pieces).encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"

        def result(reader: Reader):
            try:
                return plain(reader.refresh())
            except ReportError as error:
                return str(error)

        reader = Reader(file)
        for cut in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
            with open(file, "ab") as opened:
                opened.write(text[opened.tell() : cut])
            grown = result(reader)
            assert grown == result(Reader(file))


@at_most(60)
@given(st.integers(0, 400))
def test_a_file_cut_at_any_byte_gives_its_whole_lines(cut):
    text = "".join(line(step, a=step / 3, é="ü") for step in range(1, 11)).encode()[:cut]
    whole = text.count(b"\n") + (text[-2:] == b"}}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"
        file.write_bytes(text)
        if whole:
            run = read_run(file)
            assert run.steps.tolist() == list(range(1, whole + 1))
            assert run.notes == ()
        else:
            with pytest.raises(ReportError, match="no complete step"):
                read_run(file)


def test_refresh_reads_only_what_is_new(tmp_path):
    file = write(tmp_path / "run.jsonl", train(1, 2))
    reader = Reader(file)
    first = reader.refresh()
    assert reader.refresh() is first
    with open(file, "a") as opened:
        opened.write(line(3, a=3))
    assert values(reader.refresh()) == {1: 1, 2: 2, 3: 3}
    assert values(first) == {1: 1, 2: 2}  # what was given out does not change


def test_refresh_waits_for_a_run_that_has_just_begun(tmp_path):
    reader = Reader(tmp_path)
    with pytest.raises(ReportError, match="no metrics in this folder"):
        reader.refresh()
    file = write(tmp_path / "run.jsonl", [])
    with pytest.raises(ReportError, match=r"run\.jsonl: no complete step"):
        reader.refresh()
    write(file, train(1))
    assert values(reader.refresh()) == {1: 1}


def test_refresh_starts_over_when_the_file_is_another_one(tmp_path):
    file = write(tmp_path / "run.jsonl", [*train(1, 2, 3), (4, {"b": 1})])
    reader = Reader(file)
    reader.refresh()
    write(file, train(1, value=0.5))  # emptied, and shorter
    assert plain(reader.refresh()) == plain(read_run(file))
    write(file, train(1, 2, 3, 4, 5, value=0.25))  # emptied, and longer by now
    assert plain(reader.refresh()) == plain(read_run(file))
    other = write(tmp_path / "other", [(1, {"a": 9.99}), *train(2, 3, 4, 5, 6, value=0.25)])
    assert other.read_bytes()[: file.stat().st_size][-64:] == file.read_bytes()[-64:]  # the same where the old one ends
    os.replace(other, file)
    assert plain(reader.refresh()) == plain(read_run(file))
    file.unlink()
    with pytest.raises(ReportError, match=r"run\.jsonl: No such file"):
        reader.refresh()


def test_importing_the_loader_imports_no_heavy_package():
    code = "import sys, verl_ext.report.load; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "verl", "tensorboard", "matplotlib", "pandas", "ray"} & set(modules)
