import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from recipes.cpu_smoke.make_assets import build_tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders with a config and a tokenizer, as check_run reads them: an MoE and a dense model."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("moe", Qwen3MoeConfig(num_experts=8)), ("dense", LlamaConfig())):
        config.save_pretrained(folder / name)
        build_tokenizer().save_pretrained(folder / name)
    LlamaConfig().save_pretrained(folder / "no_tokenizer")
    return folder
