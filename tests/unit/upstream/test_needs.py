"""What each hook needs of verl: of the installed one, and of one in which something moved."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ROOT
from verl_ext.upstream import needs
from verl_ext.upstream.changes import TABLE, VERL
from verl_ext.upstream.source import Source

BASE = "verl.trainer.ppo.v1.trainer_base"
WORKERS = "verl.workers.engine_workers"


@pytest.fixture(scope="module")
def verl():
    return needs.source_of(Path(find_spec("verl").origin))


class Edited(Source):
    """verl with one text in one module replaced."""

    def __init__(self, verl, module, old, new):
        super().__init__(verl.folder)
        self.verl = verl  # which has read most of it
        text = self.folder.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
        assert old in text
        self.module, self.edited = module, ast.parse(text.replace(old, new))

    def tree(self, module):
        return self.edited if module == self.module else self.verl.tree(module)


def test_the_installed_verl_has_all_that_every_hook_needs(verl):
    assert needs.broken(verl) == {}


TRAINERS = "stability_trainers"
LOSS = "policy losses and the workers' loss"
MOVED = [
    # module, text, what it becomes, the hook that this breaks, what is said
    (
        BASE,
        "_compute_advantage(self, batch",
        "_compute_advantage(self, rows",
        TRAINERS,
        "takes (self, rows, metrics), not",
    ),
    (BASE, "self._update_actor(batch", "self._train(batch", TRAINERS, "_step_once no longer names _update_actor"),
    (BASE, "def _rollout_server_managers", "def _managers", TRAINERS, "_rollout_server_managers is missing"),
    (WORKERS, "class TrainingWorker(", "class Trainer(", "imports of workers/actor.py", ".TrainingWorker is missing"),
    ("verl.utils.tracking", "FileLogger", "LineLogger", "keep_metrics", "tracking.FileLogger is missing"),
    ("verl.workers.utils.losses", "= get_policy_loss_fn(", "= LOSSES.get(", LOSS, "no longer names get_policy_loss_fn"),
]


@pytest.mark.parametrize(("module", "old", "new", "hook", "said"), MOVED)
def test_the_hook_that_a_change_of_verls_breaks_is_told(verl, module, old, new, hook, said):
    lacks = needs.broken(Edited(verl, module, old, new))
    assert hook in lacks and any(said in what for what in lacks[hook]), lacks


def test_every_method_of_verls_that_our_trainers_override_is_a_need():
    tree = ast.parse((needs.PACKAGE / "trainer" / "trainers.py").read_text(encoding="utf-8"))
    (mixin,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "StabilityMixin"]
    overridden = {node.name for node in mixin.body if isinstance(node, ast.FunctionDef)}
    text = " ".join(need for hook in needs.HOOKS for need in hook.needs)
    assert [name for name in sorted(overridden) if f".{name}(" not in text] == []


def test_every_change_of_verl_has_its_needs():
    text = " ".join(hook.name for hook in needs.HOOKS)
    on_cpu = {"answer_for_vllm_cpu", "register_fsdp_engines", "offload_without_pinned_memory"}
    on_cpu |= {"allow_float32", "register_megatron_engines", "install_megatron"}
    assert {change.name for change in TABLE if change.versions == VERL and change.name not in text} == on_cpu


@pytest.mark.parametrize("hook", needs.HOOKS, ids=lambda hook: hook.name)
def test_the_file_of_a_hook_is_there(hook):
    assert (needs.PACKAGE / hook.file).is_file()


def test_a_checkout_is_read_and_nothing_of_it_is_run(tmp_path):
    package = tmp_path / "verl"
    (package / "version").mkdir(parents=True)
    (package / "version" / "version").write_text("9.9.9\n")
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    command = [sys.executable, "-m", "verl_ext.upstream.needs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("verl 9.9.9: "), done.stderr
    assert "verl.trainer.main_ppo" not in done.stderr and "    verl.trainer is missing" in done.stdout
    assert needs.main([str(tmp_path / "nowhere")]) == 2
