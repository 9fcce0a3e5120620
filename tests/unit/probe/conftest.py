"""A model that a probe of a launch finds on this machine."""

import pytest


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
