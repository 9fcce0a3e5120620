"""Old names lead to the modules that have moved, in every way in which a user's files name them."""

import sys
from importlib import import_module

import pytest

from verl_ext.moved import GONE, MOVED

OLD, NEW = "verl_ext.rollout.vllm_plugin", "verl_ext.upstream.vllm_plugin"


@pytest.mark.parametrize(
    "code",
    [
        f"from {OLD} import register as found",
        f"from importlib import import_module; found = import_module('{OLD}').register",
        f"from hydra.utils import get_method; found = get_method('{OLD}.register')",
        f"from importlib.metadata import EntryPoint; found = EntryPoint('', '{OLD}:register', '').load()",
    ],
    ids=["import", "import_module", "_target_", "entry point"],
)
def test_one_module_under_both_names_and_one_line_that_says_so(fresh_python, code):
    done = fresh_python(f"{code}\nimport {OLD}\nfrom {NEW} import register\nprint(found is register)")
    assert done.stdout == "True\n", done.stderr
    assert done.stderr == (
        f"verl_ext: {OLD} is {NEW} now; write the new name (in an installed entry point: install verl_ext again)\n"
    )


def test_python_m_runs_what_has_moved(fresh_python):
    code = (
        "import runpy, sys; sys.argv = ['', '--help']; runpy.run_module('verl_ext.routing_cost', run_name='__main__')"
    )
    done = fresh_python(code)
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m verl_ext.plan.routing"), done.stderr
    assert done.stderr.startswith("verl_ext: verl_ext.routing_cost is verl_ext.plan.routing now")


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_every_old_name_is_the_new_module(old, new, monkeypatch):
    for name in (old, *GONE):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert import_module(old) is import_module(new)
    assert sys.modules[new].__name__ == sys.modules[new].__spec__.name == new


@pytest.mark.parametrize("name", ["verl_ext.platform.no_such", "verl_ext.no_such"])
def test_other_names_are_as_unknown_as_before(name):
    with pytest.raises(ModuleNotFoundError, match=rf"No module named '{name}'"):
        import_module(name)
