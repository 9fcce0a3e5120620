"""A model that a probe of a launch finds on this machine, and a stand-in for the process that starts the engines."""

import signal
import sys

import pytest

from verl_ext import cli
from verl_ext.probe import engines


@pytest.fixture(scope="session")
def moe_override(tmp_path_factory):
    """The override that names the folder of a mixture of experts; it has a config only."""
    from transformers import Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("moe")
    Qwen3MoeConfig().save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


@pytest.fixture(scope="session")
def files(moe_override):
    """The overrides of a launch whose files are all on this machine."""
    return ("data.train_files=[]", "data.val_files=[]", moe_override)


@pytest.fixture
def run_probe(tmp_path, monkeypatch, files):
    """run_probe(script, *arguments, interrupted=None) -> exit code. The script runs instead of the engines' process;
    run_probe.ran has the commands, and the one of number `interrupted` is cut short by Ctrl-C."""
    ran, real = [], engines.follow_engines

    def run(script, *arguments, interrupted=None):
        def follow(command, console, tell):
            ran.append(command)
            if len(ran) == interrupted:
                signal.raise_signal(signal.SIGINT)
            return real([sys.executable, "-c", script, *command[3:]], console, tell)

        monkeypatch.setattr(engines, "follow_engines", follow)
        return cli.main(["probe", "--out", str(tmp_path), *files, *arguments])

    run.ran = ran
    return run
