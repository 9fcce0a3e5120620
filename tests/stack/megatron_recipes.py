"""Runs as a rank of test_megatron_recipes.py: the engine that verl builds from a recipe for GPUs, at a tiny size.

    python -m tests.stack.megatron_recipes TASK RANK WORLD FOLDER

FOLDER has a folder for each of `MODELS`, as megatron_engine.py wants it, and for each case `CASE.yaml`: what a launch
composed for `actor_rollout_ref`.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf

from tests.stack.megatron_engine import Rank, check_states, expect_of_transformers, main
from tests.support.closeness import close

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
LAYERS = f"{MEGATRON}.override_transformer_config"
OPTIMIZER = f"{ACTOR}.optim.override_optimizer_config"

# What is not a recipe's own on CPU cores, sizes aside. test_megatron_recipes.py compares every override of a recipe,
# these too, with the name and the type of megatron-core's field.
KERNELS = {
    f"{LAYERS}.moe_permute_fusion": "false",  # Transformer Engine's
    f"++{LAYERS}.gradient_accumulation_fusion": "false",  # Apex's; Megatron-Bridge asks for it for latent attention
}
FLOAT32 = {
    f"{MEGATRON}.dtype": "float32",
    f"{OPTIMIZER}.optimizer_cpu_offload": "false",  # torch refuses megatron-core's shards of float32: no leaves
    f"{OPTIMIZER}.use_precision_aware_optimizer": "false",  # is Transformer Engine's Adam without the one above
}

# How far log-probs are from transformers' in float32, in the mean, and the gradient's norm. Seen: 2e-7, 1e-3 and 1e-2;
# 1e-7, 1e-4 and 1e-2.
LOG_PROBS_APART = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}
NORM_APART = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROUTERS_BIAS = "e_score_correction_bias"  # stays in float32
VISIBLE = {f"{ACTOR}.optim.lr": 1e-3}  # the recipes' 1e-6 is rounded away in 16 bits

# Sizes of the fields of each family's published config.json; they have transformers 4's names.
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3 = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 32,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
SIGMOID = {  # sigmoid scores with a bias, shared experts, one dense layer first
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
}
DEEPSEEK = (
    SIZES
    | SIGMOID
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 163840,
        "moe_layer_freq": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,  # as recipes/deepseek_v3_megatron asks for
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
)
MODELS = {
    "qwen3": QWEN3,
    "deepseek_v3": DEEPSEEK,
    "moonlight": DEEPSEEK
    | {
        "aux_loss_alpha": 0.001,
        "max_position_embeddings": 8192,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "q_lora_rank": None,  # rms_norm_eps is 1e-5; transformers takes 1e-6 for the latent's norm all the same
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
    },
    "glm45_air": SIZES
    | SIGMOID
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "head_dim": 32,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 4,  # the recipe has stages of equal length
        "num_nextn_predict_layers": 1,  # its weights are not in our checkpoint
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
}


TP2_EP2 = {"tensor_model": 2, "expert_model": 2}
PP2 = {"pipeline_model": 2}


class Recipe(NamedTuple):
    """A recipe at a tiny size.

    Attributes:
        layouts: of two ranks. The recipes of a model have together each kind of their parallelism but GLM's over the
            context: packed attention has none on CPU cores.
        stages: layers of the first and of the last stage of two, where it gives their numbers.
    """

    model: str
    layouts: tuple[dict[str, int], ...]
    stages: tuple[int, int] | None = None


RECIPES = {
    "qwen3_30b_a3b_megatron": Recipe("qwen3", (TP2_EP2,)),
    "qwen3_235b_a22b_megatron": Recipe("qwen3", (PP2,), stages=(1, 2)),
    "deepseek_v3_megatron": Recipe("deepseek_v3", (TP2_EP2, PP2), stages=(2, 1)),  # TP: its README's 12 nodes
    "moonlight_16b_a3b_megatron": Recipe("moonlight", (TP2_EP2,)),
    "glm45_air_megatron": Recipe("glm45_air", (TP2_EP2, PP2)),
}


def sized(name: str, layout: dict[str, int], folder: Path, **replaced: object) -> list[str]:
    """A launch of a recipe with its sizes and its kernels replaced."""
    recipe = RECIPES[name]
    sizes = dict.fromkeys(("tensor_model", "pipeline_model", "context", "expert_model"), 1) | layout
    found = KERNELS | {f"{MEGATRON}.{kind}_parallel_size": size for kind, size in sizes.items()}
    if recipe.stages:
        layers = recipe.stages if layout == PP2 else ("null", "null")
        ends = zip(("first", "last"), layers, strict=True)
        found |= {f"{LAYERS}.num_layers_in_{end}_pipeline_stage": number for end, number in ends}
    found |= {
        "actor_rollout_ref.model.path": folder / recipe.model / "model",
        f"{ACTOR}.optim.total_training_steps": 20,  # verl's trainer sets it
        **replaced,
    }
    return [f"recipe={name}", "stability=icepop", *(f"{key}={value}" for key, value in found.items())]


def cases(folder: Path) -> dict[str, list[str]]:
    """Returns the launches of test_megatron_recipes.py: each recipe in float32 in each layout, and in the recipe's
    dtype.

    16-bit numbers have the recipe's optimizer too, Adam on the CPU, and a checkpoint of it.
    """
    found = {}
    for name, recipe in RECIPES.items():
        for layout in recipe.layouts:
            parallel = " ".join(f"{kind}={size}" for kind, size in layout.items())
            found[f"{name} {parallel} float32"] = sized(name, layout, folder, **FLOAT32)
        found[f"{name} bfloat16"] = sized(name, recipe.layouts[-1], folder, **VISIBLE)
    name = "qwen3_30b_a3b_megatron"
    found[f"{name} float16"] = [*sized(name, TP2_EP2, folder, **VISIBLE), "precision=fp16_megatron"]
    return found


# What is refused, and with which words. Hydra itself refuses a name without ++, of which a recipe's file needs none.
REFUSED = {
    f"++{LAYERS}.moe_router_dtpye=fp32": "has no attribute 'moe_router_dtpye'",
    f"{LAYERS}.recompute_method=sometimes": 'must be "block" or "uniform"',
    f"++{OPTIMIZER}.optimizer_cpu_ofload=true": "unexpected keyword argument 'optimizer_cpu_ofload'",
    f"++{MEGATRON}.override_ddp_config.grad_reduce_in_fp23=true": "unexpected keyword argument 'grad_reduce_in_fp23'",
    f"++{MEGATRON}.tensor_parallel_size=2": "unexpected keyword argument 'tensor_parallel_size'",
}


def refused(folder: Path) -> dict[str, list[str]]:
    base = sized("qwen3_30b_a3b_megatron", TP2_EP2, folder)
    return {f"refused {index}": [*base, override] for index, override in enumerate(REFUSED)}


def make_model(folder: Path, name: str) -> None:
    """`model/` with random weights and what transformers makes of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from recipes.make_assets import build_tokenizer

    model = folder / "model"
    model.mkdir(parents=True)
    published = json.dumps(MODELS[name])
    (model / "config.json").write_text(published)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if key.endswith("bias"):
                weight.normal_(std=0.1)
            elif weight.dim() > 1:
                weight.mul_(4.0)  # the usual 0.02 leaves every probability near that of any other token
            else:
                weight.add_(0.1 * torch.randn_like(weight))  # norms that are not all one
        for key, bias in made.named_buffers():
            if key.endswith(ROUTERS_BIAS):
                bias.normal_(std=0.1)
    for part in (made, build_tokenizer()):
        part.save_pretrained(model)
    (model / "config.json").write_text(published)  # transformers writes its own names into it
    expect_of_transformers(folder)


# Two ranks


def build(settings: DictConfig):
    """The engine of the actor, as verl's ActorRolloutRefWorker.init_model and its TrainingWorker build it."""
    import verl  # noqa: F401  its plugins
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry

    model = omega_conf_to_dataclass(settings.model)
    actor = omega_conf_to_dataclass(settings.actor)
    actor.engine.use_remove_padding = model.get("use_remove_padding", False)
    engine = EngineRegistry.new(
        model_type=model.get("model_type", "language_model"),
        backend=actor.engine.strategy,
        model_config=model,
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )
    engine.initialize()
    return engine


@contextlib.contextmanager
def parallel_state() -> Iterator[None]:
    from megatron.core import parallel_state

    yield
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()


def check_settings(engine, actor: DictConfig) -> None:
    """Every override and every size reaches the configs that megatron-core reads."""
    from megatron.core.transformer.enums import AttnBackend

    megatron = actor.megatron
    layers = dict(megatron.override_transformer_config)
    layers["attention_backend"] = AttnBackend[layers["attention_backend"]]
    layers |= {name: size for name, size in megatron.items() if name.endswith("_parallel_size")}
    for owner, given in (
        (engine.tf_config, layers),
        (engine.optimizer.chained_optimizers[0].config, actor.optim.override_optimizer_config),
    ):
        for name, value in given.items():
            assert getattr(owner, name) == value, (name, getattr(owner, name), value)


def check(rank: Rank, dtype: torch.dtype) -> None:
    """Exported weights, log-probs and the gradient's norm are those of transformers; steps follow the learning rate."""
    found, expected = rank.weights(), rank.expected["weights"]
    assert set(found) == set(expected), set(found) ^ set(expected)
    for name, weight in expected.items():
        kept = weight if name.endswith(ROUTERS_BIAS) else weight.to(dtype).float()
        assert torch.equal(found[name], kept), name
    if (read := rank.infer()) is not None:
        apart = [row.float() - rank.expected["log_probs"][index] for index, row in zip(rank.mine, read, strict=True)]
        assert torch.cat(apart).abs().mean() < LOG_PROBS_APART[dtype], torch.cat(apart).abs().mean()
    if dtype == torch.float32:
        check_states(rank)
    close(rank.step(), rank.expected["norm"], rtol=NORM_APART[dtype], name="gradient norm")
    # The first step of the warm-up has a learning rate of 0; megatron-core's own default moves the routers' bias in it.
    before = rank.weights()
    for name, weight in found.items():
        assert torch.equal(before[name], weight), name
    (rate,) = {group["lr"] for group in rank.engine.optimizer.param_groups}
    assert rate > 0 and torch.isfinite(torch.tensor(rank.step()))
    moved = max((weight - before[name]).abs().max() for name, weight in rank.weights().items())
    assert rate / 2 < moved and (moved < rate * 2 or dtype != torch.float32), (moved, rate)


def check_checkpoint(rank: Rank, folder: Path) -> None:
    """Checks that a running engine can load a checkpoint: it has the saved weights, and the next step is the one that
    followed them, at the same learning rate."""
    engine = rank.engine
    engine.save_checkpoint(str(folder), global_step=2)
    saved, norm, after = rank.weights(), rank.step(), rank.weights()
    engine.load_checkpoint(str(folder), del_local_after_load=False)
    loaded = rank.weights()
    assert rank.step() == norm
    for name, weight in rank.weights().items():
        assert torch.equal(loaded[name], saved[name]) and torch.equal(weight, after[name]), name
    assert any(not torch.equal(after[name], weight) for name, weight in saved.items())


def run(folder: Path) -> None:
    """Checks every case, and every refusal with its message, in one process."""
    for name in cases(folder):
        settings = OmegaConf.load(folder / f"{name}.yaml")
        with parallel_state():
            rank = Rank(Path(settings.model.path).parent, build(settings))
            check_settings(rank.engine, settings.actor)
            check(rank, dtype := getattr(torch, settings.actor.megatron.dtype))
            if dtype != torch.float32:  # test_megatron_engine.py has float32's
                check_checkpoint(rank, folder / "checkpoints" / name)
            print(f"checked: {name}", flush=True)
    for name in refused(folder):
        with parallel_state():
            try:
                build(OmegaConf.load(folder / f"{name}.yaml"))
            except Exception as error:
                print(f"checked: {name}: {' '.join(str(error).split())}", flush=True)


if __name__ == "__main__":
    main({"run": run}, *sys.argv[1:])
