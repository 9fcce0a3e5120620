"""Contexts for the checks: any installation, any config, without looking at this machine's."""

import json
import math

import pytest
from transformers import DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

from recipes.make_assets import build_tokenizer
from verl_ext.doctor import diagnose  # noqa: F401 (registers the checks)
from verl_ext.doctor.checks import CHECKS, Context
from verl_ext.doctor.hooks import fit_presets

VERSIONS = {
    "python": "3.11.7",
    "verl": "0.9.1",
    "vllm": "0.27.1",
    "torch": "2.13.0",
    "ray": "2.60.0",
    "transformers": "5.10.4",
    "TransferQueue": "0.1.11",
    "megatron-core": "0.16.1",
}
PLUGINS = {"verl.plugins": ("verl_ext",), "vllm.general_plugins": ("verl_ext",)}
MODEL = "actor_rollout_ref.model.path"
# What verl asks of every run; `rollout.name` has no default.
NEEDED = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "algorithm.adv_estimator=grpo",
    "trainer.save_freq=20",
)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders with a config and a tokenizer; `padded` and `slightly_padded` have more rows than their tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = build_tokenizer()
    tokens = len(tokenizer)
    sizes = {"fitting": tokens, "padded": 2 * tokens, "slightly_padded": math.ceil(tokens * 1.005), "short": tokens - 1}
    for name, size in sizes.items():
        LlamaConfig(vocab_size=size, max_position_embeddings=1024).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    other = json.loads((folder / "fitting" / "tokenizer.json").read_text())
    other["model"]["vocab"].popitem()
    (folder / "other").mkdir()
    (folder / "other" / "tokenizer.json").write_text(json.dumps(other))
    DeepseekV3Config(n_routed_experts=8, vocab_size=tokens).save_pretrained(folder / "biased")
    tokenizer.save_pretrained(folder / "biased")
    Qwen3MoeConfig(num_experts=8, vocab_size=tokens).save_pretrained(folder / "moe")
    tokenizer.save_pretrained(folder / "moe")
    return folder


@pytest.fixture
def context(compose, models, tmp_path):
    """context(*overrides, **fields of Context): a dense model that fits its tokenizer, on any installation.

    `disabled` is the default of vLLM's disable_cascade_attn; with None, vLLM's source cannot be found.
    """

    def make(*overrides, disabled=True, **fields):
        if disabled is not None:
            write_vllm(tmp_path / "vllm", disabled)
        packages = {} if disabled is None else {"vllm": tmp_path / "vllm"}
        fields = {"versions": VERSIONS, "plugins": PLUGINS, "folder": packages.get} | fields
        model = () if any("model.path=" in given for given in overrides) else (f"{MODEL}={models}/fitting",)
        config = compose(*NEEDED, *model, *overrides)
        run = Context(config=config, overrides=overrides, **fields)
        fit_presets(run)
        return run

    return make


def write_vllm(folder, disabled):
    """A vLLM package of one file, as the doctor reads it."""
    (folder / "config").mkdir(parents=True, exist_ok=True)
    source = f"class ModelConfig:\n    disable_cascade_attn: bool = {disabled}\n"
    (folder / "config" / "model.py").write_text(source)


@pytest.fixture
def findings(context):
    """findings(check, *overrides, **fields) -> what that check finds."""
    return lambda name, *overrides, **fields: list(CHECKS[name](context(*overrides, **fields)))


@pytest.fixture
def installed():
    """installed(check, **fields) -> what a check of the installation finds, without a config."""

    def make(name, **fields):
        fields = {"versions": VERSIONS, "plugins": PLUGINS, "folder": lambda name: None} | fields
        return list(CHECKS[name](Context(**fields)))

    return make
