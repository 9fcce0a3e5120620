import math
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.unit.report.made_files import noted, values
from verl_ext.report.load import Reader, read_run
from verl_ext.report.run import ReportError


def writer(folder: Path, time: int):
    from torch.utils.tensorboard import SummaryWriter

    made = SummaryWriter(folder, filename_suffix=f".{time}")
    return made


def write(folder: Path, steps, *, time: int = 1, value: float = 0.0, first: dict[int, dict] | None = None) -> Path:
    """Writes the event file of one process, with `a` at every step, as verl's logger does; returns the file."""
    known = set(folder.glob("*")) if folder.exists() else set()
    with writer(folder, time) as log:
        for step, data in (first or {}).items():
            for name, number in data.items():
                log.add_scalar(name, number, step)
        for step in steps:
            log.add_scalar("a", step + value, step)
            log.add_scalar("b/c", -step, step)
    (file,) = set(folder.glob("*")) - known
    # The second in a file's name tells its place; these are all written in one.
    return file.rename(folder / f"events.out.tfevents.{1_700_000_000 + time}.host.1.{time}")


def records(content: bytes) -> list[int]:
    """Returns the start of each record; a record is its length, a checksum, the content, a checksum."""
    starts = [0]
    while starts[-1] < len(content):
        starts.append(starts[-1] + 16 + struct.unpack_from("<Q", content, starts[-1])[0])
    return starts


@pytest.mark.parametrize("of", ["file", "folder", "folder above"])
def test_scalars_by_name_and_step(tmp_path, of):
    folder = tmp_path / "tensorboard_log" / "project" / "experiment"
    file = write(folder, [1, 2, 3], value=0.5)
    run = read_run({"file": file, "folder": folder, "folder above": tmp_path}[of])
    assert (run.name, run.sources, run.notes) == ("experiment", (file,), ())
    assert run.steps.tolist() == [1, 2, 3]
    assert values(run) == {1: 1.5, 2: 2.5, 3: 3.5}
    assert values(run, "b/c") == {1: -1, 2: -2, 3: -3}


def test_values_that_are_not_finite_tensors_and_what_is_no_scalar(tmp_path):
    with writer(tmp_path, 1) as log:
        for step, value in enumerate((math.nan, math.inf, np.float64(0.25)), start=1):
            log.add_scalar("a", value, step)
        log.add_scalar("new", 1.5, 1, new_style=True)
        log.add_scalar("double", 0.1, 1, new_style=True, double_precision=True)
        log.add_text("val/generations", "some text", 1)
        log.add_histogram("h", np.arange(5), 1)
        log.add_tensor("t", __import__("torch").arange(3), 1)
    run = read_run(tmp_path)
    assert values(run) == pytest.approx({1: math.nan, 2: math.inf, 3: 0.25}, nan_ok=True)
    assert (values(run, "new"), values(run, "double")) == ({1: 1.5}, {1: 0.1})
    assert set(run.metrics) == {"a", "new", "double"}


def test_a_later_file_is_the_resumed_run(tmp_path):
    validation = {5: {"val-core/x": 0.5}}
    old = write(tmp_path, range(1, 9), time=9)
    new = write(tmp_path, range(6, 8), time=10, value=0.5, first=validation)
    run = read_run(tmp_path)
    assert run.sources == (old, new)
    assert values(run) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6.5, 7: 7.5}
    assert values(run, "val-core/x") == {5: 0.5}
    noted(run, "steps 6 to 7 .*twice", "step 8 .*left out")


def test_a_later_file_from_the_start_is_another_run(tmp_path):
    write(tmp_path, [1, 2, 3], time=1)
    write(tmp_path, [1, 2], time=2, value=0.5, first={0: {"val-core/x": 1}})
    assert values(read_run(tmp_path)) == {1: 1.5, 2: 2.5}
    assert values(read_run(tmp_path, which=1)) == {1: 1, 2: 2, 3: 3}
    noted(read_run(tmp_path), "2 runs.*FILE:1")


def test_a_file_written_metric_by_metric_is_one_run(tmp_path):
    with writer(tmp_path, 1) as log:
        for name in ("a", "b"):
            for step in (1, 2, 3):
                log.add_scalar(name, step, step)
    run = read_run(tmp_path)
    assert values(run) == values(run, "b") == {1: 1, 2: 2, 3: 3}
    assert run.notes == ()


def test_a_file_cut_at_any_byte_gives_its_whole_events_and_is_read_on(tmp_path):
    content = write(tmp_path / "whole", range(1, 6)).read_bytes()
    whole = values(read_run(tmp_path / "whole"))
    file = tmp_path / "cut" / "events.out.tfevents.1.host"
    file.parent.mkdir()
    file.touch()
    reader, seen, first_scalar = Reader(file.parent), 0, records(content)[2]
    for cut in range(0, len(content) + 1, 3):
        file.write_bytes(content[:cut])
        if cut < first_scalar:
            with pytest.raises(ReportError, match="no scalar in these event files"):
                reader.refresh()
        else:
            run, once = reader.refresh(), read_run(file)
            assert {name: values(run, name) for name in run.metrics} == {
                name: values(once, name) for name in once.metrics
            }
            assert values(run).items() <= whole.items()
            assert run.notes == ()
            assert len(values(run)) >= seen
            seen = len(values(run))
    file.write_bytes(content)
    assert values(reader.refresh()) == whole


def test_what_follows_damage_is_left_out_and_told(tmp_path):
    file = write(tmp_path, range(1, 6))
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0" * 4096)  # what a machine that lost its power leaves
    run = read_run(file)
    assert list(values(run)) == [1, 2, 3, 4, 5]
    noted(run, f"{file.name} .* at byte {len(whole)};")


def test_an_event_that_does_not_parse_is_left_out_and_told(tmp_path):
    file = write(tmp_path, range(1, 6))
    content = bytearray(file.read_bytes())
    for start in records(content)[3:5]:  # behind the version, and a and b/c of step 1
        content[start + 12 : start + 16] = b"\xff" * 4
    file.write_bytes(content)
    run = read_run(file)
    assert list(values(run)) == [1, 3, 4, 5]
    noted(run, "^2 events")


def test_refresh_reads_on_with_new_files_and_starts_over(tmp_path):
    write(tmp_path, [1, 2], time=1)
    reader = Reader(tmp_path)
    first = reader.refresh()
    assert reader.refresh() is first
    write(tmp_path, [3, 4], time=2)
    assert list(values(reader.refresh())) == [1, 2, 3, 4]
    write(tmp_path, [0], time=0)  # comes before what was read
    run = reader.refresh()
    assert list(values(run)) == [0, 1, 2, 3, 4]
    assert run.notes == ()
    for file in tmp_path.iterdir():
        file.unlink()
    write(tmp_path, [7], time=1)
    assert values(reader.refresh()) == {7: 7}
