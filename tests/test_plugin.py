"""What loading the plugin costs every verl process, and what it registers."""

import os
import subprocess
import sys

HEAVY = ("transformers.modeling_utils", "vllm", "verl.workers.engine", "verl.trainer.ppo.core_algos")


def python(code, **environment):
    """Run code in a fresh interpreter; its standard output."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_loading_imports_no_engine_no_model_and_no_vllm():
    code = "import sys, verl; print(*sys.modules)"
    ours, verls = (set(python(code, VERL_USE_EXTERNAL_PLUGINS=policy).split()) for policy in ("verl_ext", "none"))
    added = ours - verls
    assert "verl_ext.plugin" in added
    for name in HEAVY:
        assert name not in added, f"the plugin imports {name} at load"


def test_losses_are_registered_under_plain_verl_once_its_registry_is_there():
    code = "from verl.trainer.ppo.core_algos import get_policy_loss_fn as f; print(f('icepop').__module__)"
    assert python(code).split()[-1] == "verl_ext.workers.losses"


def test_losses_can_be_imported_before_verls_registry_as_hydra_does():
    code = "from verl_ext.workers.losses import IcePopLossConfig as c; print(c().loss_mode)"
    assert python(code).split()[-1] == "icepop"


def test_their_settings_can_be_imported_before_verls_registry_as_hydra_does():
    code = "from verl_ext.workers.loss_config import IcePopLossConfig as c; print(c().loss_mode)"
    assert python(code).split()[-1] == "icepop"


def test_a_plugin_that_fails_to_load_says_so():
    # verl itself swallows the failure at DEBUG.
    code = (
        "import sys, verl_ext.platform.patches as p, torch.distributed as d\n"
        "d.init_process_group = lambda device: None\n"
        "import verl"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "verl_ext could not be loaded" in result.stderr
    assert "PatchError" in result.stderr
