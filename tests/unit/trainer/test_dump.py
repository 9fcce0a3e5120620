"""Which steps' trajectories are written."""

from verl_ext.settings.trajectories import TrajectoryDump
from verl_ext.trainer import dump
from verl_ext.trainer.dump import Dump


def test_of_a_step_with_several_updates_the_first_is_dumped(monkeypatch):
    told = []
    monkeypatch.setattr(dump, "choose", lambda batch, count, step: [batch])
    monkeypatch.setattr(dump, "write_step", lambda *given, **about: told.append((about["step"], given[3])))
    writing = Dump(object(), TrajectoryDump(1, every=2))
    for place, step in enumerate((7, 8, 8, 9, 10)):
        writing.look_at(place, step)
        writing.write(None, None, skipped="")
    assert told == [(8, [1]), (10, [4])]
