"""The needs of each hook: the installed verl meets them, and a verl in which something moved does not. Also how a
package's source is read."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ROOT
from tools import needs as tool
from verl_ext.base import needs
from verl_ext.base.changes import TABLE, VERL
from verl_ext.base.needs import Source, mentioned, parameters
from verl_ext.cpu import changes as cpu

BASE = "verl.trainer.ppo.v1.trainer_base"
WORKERS = "verl.workers.engine_workers"
EVERY = (*tool.HOOKS, *needs.imports())


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
    assert needs.broken(verl, EVERY) == {}


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
    lacks = needs.broken(Edited(verl, module, old, new), EVERY)
    assert hook in lacks and any(said in what for what in lacks[hook]), lacks


def test_every_method_of_verls_that_our_trainers_override_is_a_need():
    tree = ast.parse((needs.PACKAGE / "trainer" / "trainers.py").read_text(encoding="utf-8"))
    (mixin,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "StabilityMixin"]
    overridden = {node.name for node in mixin.body if isinstance(node, ast.FunctionDef)}
    text = " ".join(need for hook in tool.HOOKS for need in hook.needs)
    assert [name for name in sorted(overridden) if f".{name}(" not in text] == []


def test_every_change_of_verl_has_its_needs():
    without = {change.name for change in (*TABLE, *cpu.TABLE) if change.versions == VERL and not change.needs}
    assert without == {"answer_for_vllm_cpu"}, "whose target is Python's"


@pytest.mark.parametrize("hook", tool.HOOKS, ids=lambda hook: hook.name)
def test_the_file_of_a_hook_is_there(hook):
    assert (needs.PACKAGE / hook.file).is_file()


def test_a_checkout_is_read_and_nothing_of_it_is_run(tmp_path):
    package = tmp_path / "verl"
    (package / "version").mkdir(parents=True)
    (package / "version" / "version").write_text("9.9.9\n")
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    command = [sys.executable, "tools/needs.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("verl 9.9.9: "), done.stderr
    assert "verl.trainer.main_ppo" not in done.stderr and "    verl.trainer is missing" in done.stdout
    assert tool.main([str(tmp_path / "nowhere")]) == 2


FILES = {
    "__init__.py": (
        "raise RuntimeError('imported')\n"
        "from . import parts\n"
        "from .parts import *\n"
        "from .parts.deep import Deep as Renamed\n"
    ),
    "parts/__init__.py": "from .deep import Deep\nfrom torch import nn\n",
    "parts/deep.py": (
        "from pkg.base import Base\n"
        "if True:\n    NUMBER = 1\n"
        "try:\n    import fast\nexcept ImportError:\n    fast = None\n"
        "class Deep(Base):\n"
        "    kind: str = 'deep'\n"
        "    def __init__(self, size, *more, colour=None, **others): self.engine = size\n"
        "    async def own(self, a, /, b): return await self.inherited(a, key='text', other=b)\n"
    ),
    "base.py": "class Base:\n    def inherited(self, a): ...\n",
}


@pytest.fixture
def source(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "pkg" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Source(tmp_path / "pkg")


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("pkg.parts.deep.Deep", "size, *more, colour, **others"),
        ("pkg.parts.deep.Deep.own", "self, a, b"),
        ("pkg.parts.Deep.own", "self, a, b"),
        ("pkg.Deep.own", "self, a, b"),
        ("pkg.Renamed.inherited", "self, a"),
        ("pkg.Deep.kind", ""),
        ("pkg.parts.deep.NUMBER", ""),
        ("pkg.parts.deep.fast", ""),
        ("pkg.parts.nn", ""),
        ("pkg.parts", ""),
        ("pkg", ""),
    ],
)
def test_what_is_there_and_what_it_takes(source, name, taken):
    assert parameters(source.find(name)) == taken


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pkg.parts.deep.Shallow", "pkg.parts.deep.Shallow is missing"),
        ("pkg.Deep.gone", "pkg.Deep.gone is missing"),
        ("pkg.parts.gone.Deep", "pkg.parts.gone is missing"),
        ("pkg.parts.deep.NUMBER.real", "pkg.parts.deep.NUMBER is no class"),
        ("other.Deep", "other is missing"),
    ],
)
def test_what_is_missing_is_named(source, name, said):
    with pytest.raises(LookupError) as found:
        source.find(name)
    assert found.value.args == (said,)


def test_what_a_body_names(source):
    assert {"inherited", "key", "text", "b"} <= mentioned(source.find("pkg.Deep.own"))
    assert "engine" in mentioned(source.find("pkg.Deep")) and "gone" not in mentioned(source.find("pkg.Deep"))
    assert mentioned(None) == set()
