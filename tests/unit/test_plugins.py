"""The cost of loading the plugin in every verl process, and what it registers."""

import os
import subprocess
import sys

import pytest

HEAVY = ("transformers.modeling_utils", "vllm", "verl.workers.engine", "verl.trainer.ppo.core_algos")


@pytest.mark.slow
def test_loading_imports_no_engine_no_model_and_no_vllm():
    """The interpreter has imported nothing but verl."""
    code = "import sys, verl; before = {*sys.modules}; import verl_ext.plugins.verl; print(*{*sys.modules} - before)"
    without = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    without.pop("VERL_PLATFORM", None)
    added = subprocess.check_output([sys.executable, "-c", code], env=without, text=True).split()
    assert "verl_ext.plugins.verl" in added, "and not before"
    for name in HEAVY:
        assert name not in added, f"the plugin imports {name} at load"
    assert not [name for name in added if name.startswith("verl_ext.cpu")], "nothing asks for CPU cores here"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        # Under plain verl, once its registry is there.
        (
            "from verl.trainer.ppo.core_algos import get_policy_loss_fn as f; print(f('icepop').func.__module__)",
            "verl_ext.workers.losses",
        ),
        # Before verl's registry, as Hydra does.
        ("from verl_ext.workers.losses import changed_loss as f; print(f.__name__)", "changed_loss"),
        (
            "from verl_ext.workers.loss_config import build_loss_config as c; print(c(loss_mode='icepop').loss_mode)",
            "icepop",
        ),
    ],
    ids=["registered", "losses first", "settings first"],
)
def test_losses_can_be_imported_in_any_order(fresh_python, code, expected):
    result = fresh_python(code)
    assert result.stdout.split()[-1:] == [expected], result.stderr


def test_a_plugin_that_fails_to_load_says_so(fresh_python):
    # verl itself swallows the failure at DEBUG.
    code = (
        "import sys, verl_ext.cpu.patches as p, torch.distributed as d\n"
        "d.init_process_group = lambda device: None\n"
        "import verl"
    )
    result = fresh_python(code, VERL_PLATFORM="cpu")
    assert "verl_ext could not be loaded" in result.stderr
    assert "PatchError" in result.stderr
