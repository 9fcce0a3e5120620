"""SGLang's engine on CPU cores against transformers, in float32, and the reasons that failing processes leave."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid

import pytest

from tests import ROOT
from tests.stack.running import CPU, MARK, RETRACTS, kill_all
from tests.stack.sglang_engine import FP4
from tests.stack.small_models import FAR_APART, save_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang")
    save_model(folder / "model", scale=FAR_APART)
    return folder


def in_background():
    """Ignores SIGQUIT, by which SGLang ends its parent, as a shell script does in its background commands."""
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)


@pytest.fixture
def ended(tmp_path, folder):
    """ended(python, environment, task) -> exit code and output; no process of it is left."""
    mark = uuid.uuid4().hex
    command = ("-m", "tests.stack.sglang_engine")

    def run(python, environment, task):
        environment = os.environ | CPU | environment | {"HF_HUB_OFFLINE": "1", MARK: mark}
        # A file: what a process that dies leaves behind would keep a pipe open.
        with (tmp_path / "output").open("w") as output:
            code = subprocess.run(
                [python, *command, task, str(folder)],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
                preexec_fn=in_background,
            ).returncode
        return code, (tmp_path / "output").read_text()

    yield run
    kill_all(mark)


@pytest.fixture
def found(sglang_stack, ended):
    """found(task) -> what it printed."""

    def run(task):
        code, output = ended(sglang_stack.python, sglang_stack.environment, task)
        assert code == 0, output[-4000:]
        return json.loads(re.search(r"^found: (.*)$", output, re.MULTILINE)[1])

    return run


@pytest.mark.shows("verl-ext probe", engine="sglang")
def test_log_probs_experts_and_updated_weights_are_those_of_transformers(found):
    readings = found("as_transformers")
    states, report = readings.pop("states"), readings.pop("report")
    assert states["apart"] < 1e-4 and states["error"] < 1e-5
    assert states["points"] == 2 + 4 * 4 and states["tokens"] == 19, "all tokens of the prompts, and no other"
    for when in ("first", "again", "after", "rounded"):
        assert readings[when]["apart"] < 1e-4, "log-probs of some -4"
        assert readings[when]["same_experts"] == 1 and readings[when]["decided"] > 0.3
    assert readings["again"]["cached"] > 0, "prompts that are read again come from the prefix cache"
    assert report == {"settings": FP4, "rounded": {"linear": 4 * (4 + 3 * 16)}}, "as the trainer asks for it"
    assert readings["unrounded"]["apart"] > 0.1
    assert readings["before"]["apart"] > 1 > readings["before"]["same_experts"], "the weights are others"


def test_top_tokens_are_transformers_over_what_was_kept_and_turns_have_all_rows(found):
    """Through verl's server, in float32: log-probs of some -4."""
    readings = found("served")
    turns = readings.pop("turns")
    assert turns["same_experts"] == 1 and turns["rows"] > 100
    for name, reading in readings.items():
        assert reading["own"] < 1e-4 and reading["top"] < 1e-4, name
        assert reading["other_kept"] == 0 and reading["places"] > 30, name
    assert readings["all"]["kept"] == 8 * readings["all"]["places"]
    assert readings["top_k"]["kept"] == 5 * readings["top_k"]["places"]
    assert readings["both"]["kept"] < 7 * readings["both"]["places"]


def test_retractions_are_counted_and_all_stays_at_its_token(found, monkeypatch):
    """The weights are the same in both passes, so in float32 the experts are too."""
    monkeypatch.setenv(*RETRACTS)
    reading = found("retracted")
    assert reading["retractions"] > 0
    assert reading["apart"] < 1e-4 and reading["top_apart"] < 1e-4
    assert reading["other_experts"] == 0 and reading["places"] > 20


def test_a_response_that_syncs_interrupt_has_each_token_of_the_weights_that_sampled_it(found):
    """Log-probs and experts, in float32."""
    reading = found("interrupted")
    assert reading["parts"] > 1
    assert reading["missing"] == 0 and reading["rows"] > 200
    assert reading["apart"] < 1e-4
    assert reading["other_experts"] == 0 and reading["decided"] > 100


def test_two_ranks_agree_with_transformers(found):
    readings = found("parallel")
    assert readings["apart"] < 1e-4 and readings["same_experts"] == 1


def test_without_our_copy_the_overlap_schedule_returns_wrong_experts_and_right_log_probs(found):
    """SGLang reports no error: only `router/agreement` shows it."""
    readings = found("overlapped")
    assert readings["apart"] < 1e-4
    assert readings["same_experts"] < 0.9


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "spawned"])
def test_a_scheduler_that_fails_leaves_its_reason_and_ends_the_process_that_started_it(forked, sglang_stack, ended):
    python, environment = (sglang_stack.python, sglang_stack.environment) if forked else (sys.executable, {})
    code, output = ended(python, environment, "failing")
    assert code == -signal.SIGQUIT, output[-4000:]
    assert "verl_ext: SGLang's scheduler failed: RuntimeError: Not enough memory." in output
