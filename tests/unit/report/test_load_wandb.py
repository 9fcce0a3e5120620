import math
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from tests.unit.report.made_files import noted, values
from tests.unit.report.made_stores import BLOCK, field, log, wandb_file, wandb_row, wandb_run
from verl_ext.report.load import Reader, read_run
from verl_ext.report.run import ReportError


def train(*steps: int, value: float = 0.0, **more):
    return [(step, {"training/global_step": step, "a": step + value, **more}) for step in steps]


@pytest.mark.parametrize("of", ["file", "its folder", "latest-run", "folder of runs", "folder above"])
def test_rows_by_step(tmp_path, of):
    folder = tmp_path / "wandb"
    file = wandb_run(folder, [(0, {"val-core/x": 0.5}), *train(1, 2)])
    (folder / "latest-run").symlink_to(file.parent.name)
    named = {"file": file, "its folder": file.parent, "latest-run": folder / "latest-run", "folder of runs": folder}
    run = read_run(named.get(of, tmp_path))
    assert (run.name, [source.name for source in run.sources], run.notes) == ("exp", [file.name], ())
    assert run.steps.tolist() == [0, 1, 2]
    assert values(run) == {1: 1, 2: 2}
    assert values(run, "val-core/x") == {0: 0.5}
    assert "_step" not in run.metrics


def test_numbers_and_what_is_none(tmp_path):
    table = {"_type": "table-file", "nrows": 3, "columns": {"n": 2}}
    row = {"nan": math.nan, "inf": math.inf, "ninf": -math.inf, "yes": True, "none": None, "text": "1", "list": [1]}
    file = wandb_run(tmp_path, train(1, **row, val=table, nested={"x": 1, "deep": {"y": 2}}, empty={}))
    run = read_run(file)
    assert set(run.metrics) == {
        *("training/global_step", "a", "nan", "inf", "ninf", "yes", "none", "nested.x", "nested.deep.y")
    }
    found = {name: series.values[0] for name, series in run.metrics.items()}
    assert (found["inf"], found["ninf"], found["yes"], found["nested.deep.y"]) == (math.inf, -math.inf, 1, 2)
    assert math.isnan(found["nan"]) and math.isnan(found["none"])


def test_what_older_versions_wrote(tmp_path):
    rows = [field(2, wandb_row(step, data, old=True)) for step, data in train(1, 2)]
    file = tmp_path / "run-x.wandb"
    nested = field(1, field(1, "d") + field(16, '{"x": 1.5, "image": {"_type": "image-file", "width": 7}}'))
    file.write_bytes(log([*rows, field(2, nested + wandb_row(3, {"a": 3}, old=True))]))
    run = read_run(file)
    assert (run.name, values(run), values(run, "d.x")) == ("x", {1: 1, 2: 2, 3: 3}, {3: 1.5})
    assert set(run.metrics) == {"training/global_step", "a", "d.x"}


def test_verls_step_goes_before_wandbs_own(tmp_path):
    rows = [(10, {"training/global_step": 1, "a": 1}), (11, {"training/global_step": 2, "a": 2}), (3, {"b": 1})]
    run = read_run(wandb_run(tmp_path, rows))
    assert (values(run), values(run, "b")) == ({1: 1, 2: 2}, {3: 1})
    noted(run, "run-abc.wandb .*: 2; training/global_step")


def test_a_row_without_a_step_is_left_out_and_told(tmp_path):
    run = read_run(wandb_run(tmp_path, [*train(1), (2**60, {"a": 5}), *train(2)]))
    assert values(run) == {1: 1, 2: 2}
    noted(run, "run-abc.wandb .*: 1;")


# Rows that reach over two blocks each, of few values.
LONG = [(step, {"a": step, "text": "x" * (BLOCK + 1000), "b": -step}) for step in range(1, 9)]


def test_a_file_cut_at_any_byte_gives_its_whole_rows_and_is_read_on(tmp_path):
    content = wandb_file(LONG)
    file = tmp_path / "run-cut.wandb"
    file.touch()
    reader, seen = Reader(file), 0
    for cut in [*range(0, 300, 7), *range(300, len(content), 3001), len(content)]:
        file.write_bytes(content[:cut])
        if cut < BLOCK:
            with pytest.raises(ReportError, match="no step in this file; has the run finished its first step"):
                reader.refresh()
        elif cut > 2 * BLOCK:
            run = reader.refresh()
            assert run.notes == () and len(values(run)) >= seen
            assert values(run) == {step: step for step in range(1, len(values(run)) + 1)}
            seen = len(values(run))
    assert seen == 8 and values(run, "b")[8] == -8


def test_items_without_a_value_cost_no_parsing(tmp_path, monkeypatch):
    parsed = []
    loads = orjson.loads
    monkeypatch.setattr(orjson, "loads", lambda text: parsed.append(text) or loads(text))
    file = tmp_path / "run-x.wandb"
    empty = field(1, b"") * 10_000  # two bytes each: a file of 4 MB holds two million
    file.write_bytes(log([field(2, empty)]))
    with pytest.raises(ReportError, match="no step in this file") as error:
        read_run(file)
    assert "\n" not in str(error.value)
    file.write_bytes(log([field(2, empty + wandb_row(1, {"a": 1})), field(2, empty + field(1, field(2, "b")))]))
    run = read_run(file)
    assert set(run.metrics) == {"a"} and values(run) == {1: 1}
    assert len(parsed) < 10  # a few for each record, none for each item


def test_damage_costs_the_records_of_its_block(tmp_path):
    content = bytearray(wandb_file(LONG))
    content[2 * BLOCK + 100] ^= 1
    file = tmp_path / "run-x.wandb"
    file.write_bytes(content)
    run = read_run(file)
    assert {1, 8} < set(values(run)) < set(range(1, 9))
    assert "could not be read" in run.notes[0]
    file.write_bytes(wandb_file(train(1, 2)) + bytes(4096))  # what a machine that lost its power leaves
    run = read_run(file)
    assert list(values(run)) == [1, 2]
    noted(run, "run-x.wandb .*: 1;")


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "no step in this file"), (b"\x1f\x8b\x08 packed", "not a file of W&B"), (log([]), "no step in this file")],
)
def test_what_holds_no_run_is_told(tmp_path, content, says):
    file = tmp_path / "run-x.wandb"
    file.write_bytes(content)
    with pytest.raises(ReportError, match=rf"run-x\.wandb: .*{says}") as error:
        read_run(file)
    assert "\n" not in str(error.value)


def test_a_record_that_is_not_utf_8_is_left_out_and_told(tmp_path):
    bad = field(2, field(1, field(2, b"caf\xe9") + field(16, "1")))
    file = tmp_path / "run-x.wandb"
    file.write_bytes(log([bad, field(2, wandb_row(1, {"a": 1}))]))
    run = read_run(file)
    assert values(run) == {1: 1}
    noted(run, "run-x.wandb .*: 1;")


def test_json_lines_go_before_wandb_and_wandb_before_tensorboard(tmp_path):
    file = wandb_run(tmp_path / "wandb", train(1))
    (tmp_path / "tensorboard_log").mkdir()
    (tmp_path / "tensorboard_log" / "events.out.tfevents.1.host").touch()
    assert read_run(tmp_path).sources == (file,)
    lines = tmp_path / "proj" / "exp.jsonl"
    lines.parent.mkdir()
    lines.write_text('{"step":1,"data":{"a":1}}\n')
    assert read_run(tmp_path).sources == (lines,)
    (tmp_path / "tensorboard_log" / "other").mkdir()
    (tmp_path / "tensorboard_log" / "other" / "events.out.tfevents.1.host").touch()
    with pytest.raises(ReportError, match=r"several runs .*proj/exp\.jsonl, tensorboard_log"):
        read_run(tmp_path)


REAL = """
import sys
import wandb

run = wandb.init(project="proj", name="exp", dir=sys.argv[1], config={"lr": 1e-6}, mode="offline")
wandb.log({"val-core/x": 0.5}, step=0)
for step in (1, 2, 3):
    wandb.log({"training/global_step": step, "a": step / 3, "nil": float("nan"), "d": {"x": {"y": 1.5}}}, step=step)
    wandb.log({"late": step, "t": wandb.Table(columns=["n"], data=[[1]]), "h": wandb.Histogram([1, 2])}, step=step)
wandb.log({"back": 1}, step=1)
wandb.finish()
"""


@pytest.mark.slow
def test_what_wandb_itself_writes(tmp_path):
    subprocess.run([sys.executable, "-c", REAL, str(tmp_path)], check=True, capture_output=True, timeout=120)
    run = read_run(tmp_path)
    assert (run.name, run.notes, run.steps.tolist()) == ("exp", (), [0, 1, 2, 3])
    assert values(run) == pytest.approx({step: step / 3 for step in (1, 2, 3)}, rel=1e-15)
    assert values(run, "val-core/x") == {0: 0.5}
    assert values(run, "d.x.y") == {1: 1.5, 2: 1.5, 3: 1.5}
    own = {"_runtime", "_timestamp"}
    assert set(run.metrics) == {"val-core/x", "training/global_step", "a", "nil", "d.x.y", "late", *own}
    content = Path(run.sources[0]).read_bytes()
    cut = tmp_path / "run-cut.wandb"
    cut.write_bytes(content[: content.rindex(b"training/global_step")])  # in the last row
    assert read_run(cut).steps.tolist() == [0, 1, 2] and read_run(cut).notes == ()
