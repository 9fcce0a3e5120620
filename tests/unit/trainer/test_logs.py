"""The file of a run's metrics, as verl's own logger writes it."""

import json

import pytest
from verl.utils import tracking

from verl_ext.trainer.logs import keep_metrics


@pytest.mark.parametrize(("resume", "steps"), [(True, [1, 2]), (False, [2])])
def test_verls_file_logger_goes_on_in_the_file_of_a_resumed_run(monkeypatch, tmp_path, resume, steps):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "data": {}}\n')
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(file))
    monkeypatch.setattr(tracking, "FileLogger", tracking.FileLogger)  # restored after the test
    keep_metrics(resume=resume)
    logger = tracking.Tracking("project", "experiment", default_backend=["file"])
    logger.log({"critic/score/mean": 0.5}, step=2)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == steps
