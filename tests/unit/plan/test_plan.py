"""`verl-ext plan`, against arithmetic by hand and published figures."""

import json
import re
from dataclasses import replace

import pytest
from omegaconf import OmegaConf, open_dict

from verl_ext.base.errors import ConfigError
from verl_ext.cli import main
from verl_ext.launch.gpus import GPUS
from verl_ext.launch.models import FAMILIES
from verl_ext.plan.memory import ENGINE_RESERVE, plan_memory
from verl_ext.plan.scale import read_plan
from verl_ext.plan.sizes import GIB, GUESSED_MEAN, UNITS, WORKERS, Sizes, read_sizes

ROLLOUT = "actor_rollout_ref.rollout"
FSDP = Sizes(
    shape=FAMILIES["Qwen3-30B-A3B"],
    gpu=GPUS["H100"].sheet,
    gpus=16,
    rollout_gpus=16,
    shared=True,
    megatron=False,
    tensor=1,
    pipeline=1,
    context=1,
    expert=1,
    expert_tensor=1,
    ulysses=1,
    param_offload=True,
    optimizer_offload=True,
    cpu_adam=0.0,
    recompute=("full",),
    fused=False,
    compute_bytes=2,
    shards=16,
    micro_tokens=8192,
    micro_rows=0,
    prompt=2048,
    response=8192,
    mean_prompt=1024,
    mean_response=4096,
    float32_head=False,
    sequences=1024,
    updates=8,
    epochs=1,
    reference=False,
    rollout_tensor=4,
    rollout_data=1,
    rollout_bytes=2,
    cache_bytes=2,
    utilization=0.6,
    max_num_seqs=1024,
)
MEGATRON = replace(
    FSDP, shape=FAMILIES["DeepSeek-V3"], megatron=True, gpus=256, tensor=2, pipeline=16, expert=8, rollout_tensor=32
)


def test_fsdp_keeps_sixteen_bytes_a_parameter_over_all_gpus():
    lines = plan_memory(FSDP).update.lines
    state = sum(lines[name] for name in ("weights", "gradients", "optimizer"))
    assert state == pytest.approx(16 * 30.5e9 / 16, rel=0.01)
    assert lines["logits"] == 8192 * 151936 * 8
    wide = plan_memory(replace(FSDP, float32_head=True)).update.lines
    assert wide == lines | {"logits": 8192 * 151936 * 14}


def test_megatron_splits_experts_and_the_rest_differently():
    shape, lines = MEGATRON.shape, plan_memory(MEGATRON).update.lines
    parameters = (shape.parameters - shape.expert_parameters) / 32 + shape.expert_parameters / (8 * 16)
    assert lines["weights"] == pytest.approx(2 * parameters)
    assert lines["gradients"] == pytest.approx(4 * parameters)
    # All ranks together hold the fp32 weights and moments once.
    assert lines["optimizer"] * 256 == pytest.approx(12 * shape.parameters)
    assert plan_memory(replace(MEGATRON, cpu_adam=1.0)).update.lines["optimizer"] == 0


def test_deepseeks_cache_is_the_published_one():
    assert 2 * FAMILIES["DeepSeek-V3"].cached_numbers(1) == 70272  # "Insights into DeepSeek-V3", table 1: 70.272 KB


# Numbers of a token and layer that each rank of tensor parallelism caches, and the layers; from each config.json. MLA:
# kv_lora_rank + qk_rope_head_dim, whole on every rank. Others: keys and values of at least one head of 128.
CACHED = [
    ("deepseek_v3_megatron", "DeepSeek-V3", 32, 512 + 64, 61),
    ("moonlight_16b_a3b_megatron", "Moonlight-16B-A3B", 4, 512 + 64, 27),
    ("qwen3_235b_a22b_megatron", "Qwen3-235B-A22B", 8, 2 * 1 * 128, 94),  # 4 heads on 8 ranks
    ("qwen3_30b_a3b", "Qwen3-30B-A3B", 4, 2 * 1 * 128, 48),
    (None, "Qwen3-30B-A3B", 2, 2 * 2 * 128, 48),
    (None, "Qwen3-30B-A3B", 1, 2 * 4 * 128, 48),
]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("model", "tensor", "numbers", "layers"), [case[1:] for case in CACHED])
def test_each_gpu_holds_its_heads_and_the_whole_of_a_compressed_cache(model, tensor, numbers, layers, size):
    sizes = replace(FSDP, shape=FAMILIES[model], gpus=256, rollout_gpus=256, rollout_tensor=tensor, cache_bytes=size)
    memory = plan_memory(sizes)
    assert memory.kv_tokens == int(memory.rollout.lines["KV cache"] // (layers * numbers * size))


@pytest.mark.parametrize(("recipe", "tensor", "numbers", "layers"), [(c[0], *c[2:]) for c in CACHED if c[0]])
def test_the_cache_of_a_recipe_has_the_dtype_of_the_rollout_or_its_own(compose, recipe, tensor, numbers, layers):
    dtype = f"++{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype"
    sizes = {}
    for override in (f"{dtype}=auto", f"{dtype}=fp8_e4m3", f"{ROLLOUT}.dtype=float32"):
        sizes[override] = read_sizes(compose(f"recipe={recipe}", override), "H200")
    assert [one.rollout_tensor for one in sizes.values()] == [tensor] * 3
    assert [one.kv_bytes for one in sizes.values()] == [layers * numbers * size for size in (2, 1, 4)]


def test_ranks_of_data_parallel_attention_share_the_experts_and_have_caches_of_their_own(compose):
    ranks = [f"{ROLLOUT}.{name}_parallel_size={size}" for name, size in (("data", 4), ("expert", 16))]
    plan = read_plan(compose("recipe=qwen3_30b_a3b", *ranks), "H100", mean_response=4096)
    shape, served = plan.sizes.shape, plan.memory.rollout.lines["weights of the rollout"]
    dense = shape.parameters - shape.expert_parameters
    assert served == pytest.approx(2 * (dense / 4 + shape.expert_parameters / 16))
    assert plan.sizes.kv_bytes == 48 * 2 * 1 * 128 * 2


def test_the_cache_is_what_vllm_has_left():
    memory = plan_memory(FSDP)
    share = 0.6 * 79.6 * GIB
    assert memory.rollout.lines["KV cache"] == share - 2 * FSDP.shape.parameters / 4 - ENGINE_RESERVE
    assert memory.kv_tokens == int(memory.rollout.lines["KV cache"] // (2 * FSDP.shape.cached_numbers(1) / 4))
    eight = plan_memory(replace(FSDP, rollout_tensor=8))
    per_token = eight.rollout.lines["KV cache"] / eight.kv_tokens
    assert per_token == pytest.approx(2 * FSDP.shape.cached_numbers(1) / 4, rel=1e-3), "four key heads split no further"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"shards": 32}, "weights"),
        ({"shards": 32}, "optimizer"),
        ({"micro_tokens": 4096}, "activations"),
        ({"ulysses": 2}, "logits"),
    ],
)
def test_what_splits_a_line_makes_it_smaller(change, line):
    assert plan_memory(replace(FSDP, **change)).update.lines[line] == plan_memory(FSDP).update.lines[line] / 2


def test_without_recomputation_every_layer_keeps_its_own():
    assert (
        plan_memory(replace(FSDP, recompute=())).update.lines["activations"]
        > 10 * (plan_memory(FSDP).update.lines["activations"])
    )


def test_what_is_not_offloaded_stays_beside_the_rollout():
    kept = plan_memory(replace(FSDP, param_offload=False, optimizer_offload=False))
    assert kept.rollout.lines["training weights"] == kept.update.lines["weights"]
    assert "training weights" not in plan_memory(FSDP).rollout.lines
    apart = plan_memory(replace(FSDP, shared=False, param_offload=False))
    assert "training weights" not in apart.rollout.lines, "the GPUs that generate train nothing"


def test_too_little_for_one_sequence_does_not_fit():
    memory = plan_memory(replace(FSDP, rollout_tensor=1))
    assert memory.kv_tokens == 0 and not memory.fits(FSDP)
    assert plan_memory(FSDP).fits(FSDP)


@pytest.mark.parametrize(
    ("modules", "kept"),
    [
        ((), 34 + 2 * 8 * (2 + 3 * 768 / 2048)),
        (("core_attn",), 34 + 2 * 8 * (2 + 3 * 768 / 2048)),  # flash attention keeps no scores
        (("layernorm",), 30 + 2 * 8 * (2 + 3 * 768 / 2048)),
        (("moe_act",), 34 + 2 * 8 * (2 + 2 * 768 / 2048)),
        (("moe", "moe_act"), 15),
        (("full",), 2),
    ],
)
def test_recomputed_modules_keep_less_and_one_layers_own(modules, kept):
    own = 34 + 2 * 8 * (2 + 3 * 768 / 2048)  # bytes per token and hidden unit: a layer, and eight experts of it
    found = plan_memory(replace(FSDP, megatron=True, recompute=modules)).update.lines["activations"]
    assert found == pytest.approx(8192 * 2048 * (48 * kept + (own if kept < own else 0)))


def test_fused_kernels_keep_the_logits_of_a_few_tokens():
    assert plan_memory(replace(FSDP, fused=True)).update.lines["logits"] == 1024 * 151936 * 8
    assert plan_memory(replace(FSDP, fused=True, micro_tokens=512)).update.lines["logits"] == 512 * 151936 * 8


def test_lengths_recomputation_and_fused_kernels_come_from_the_config(compose):
    config = compose("recipe=qwen3_30b_a3b", "actor_rollout_ref.model.use_fused_kernels=true")
    sizes = read_sizes(config, "H100")
    assert (sizes.mean_prompt, sizes.mean_response) == (2048 * GUESSED_MEAN, 8192 * GUESSED_MEAN)
    assert sizes.fused and sizes.recompute == ("full",) and sizes.updates == 4
    given = read_sizes(config, "H100", mean_prompt=100, mean_response=3000)
    assert (given.mean_prompt, given.mean_response) == (100, 3000)
    layers = "++actor_rollout_ref.actor.megatron.override_transformer_config"
    chosen = f"{layers}.recompute_granularity=selective", f"{layers}.recompute_modules=[moe,layernorm]"
    assert read_sizes(compose("recipe=qwen3_30b_a3b_megatron", *chosen), "H100").recompute == ("moe", "layernorm")
    assert read_sizes(compose("recipe=qwen3_30b_a3b_megatron", chosen[0]), "H100").recompute == ("core_attn",)


def test_sizes_come_from_the_composed_config(compose):
    config = compose("recipe=qwen3_30b_a3b")
    sizes = read_sizes(config, "H100")
    assert (sizes.gpus, sizes.rollout_tensor, sizes.megatron, sizes.param_offload) == (16, 4, False, True)
    assert read_sizes(config, "H100", nodes=4).gpus == 32
    with pytest.raises(ConfigError, match="--gpu=H1 is not known; choose one of: A100, A800"):
        read_sizes(config, "H1")
    with pytest.raises(ConfigError, match=r"model\.path=some/other is not in verl_ext/launch/models.py"):
        read_sizes(compose("recipe=qwen3_30b_a3b", "actor_rollout_ref.model.path=some/other"), "H100")
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=3 .*must divide the rollout"):
        read_sizes(compose("recipe=qwen3_30b_a3b", "actor_rollout_ref.rollout.tensor_model_parallel_size=3"), "H100")


@pytest.fixture
def command():
    return lambda *arguments: main(["plan", *arguments])


def test_the_table_says_whether_it_fits_and_what_is_largest(command, capsys):
    assert command("recipe=qwen3_30b_a3b", "--gpu", "a100") == 0
    printed = capsys.readouterr().out
    assert "16 x A100 train and generate" in printed
    assert "fits: the largest part of the update is optimizer; the KV cache of a replica holds" in printed
    assert "sequences of full length\n" in printed
    assert "generation" in printed
    assert command("recipe=qwen3_30b_a3b_async") == 0
    assert " train and 16 others generate\n" in capsys.readouterr().out


def test_without_the_plugin_there_is_one_line_on_how_to_see_what_it_takes(command, capsys):
    assert command("recipe=qwen3_30b_a3b") == 0
    printed = capsys.readouterr().out
    assert "no feature of the plugin is switched on; to see its cost, add the features" in printed
    assert "costs less" not in printed and "controller" not in printed
    assert command("recipe=qwen3_30b_a3b", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plugin"]["helps"] == []


def test_the_table_of_costs_has_what_is_switched_on_and_adds_up(command, capsys):
    check = "stability.sync_check={every:10}"
    assert command("recipe=qwen3_30b_a3b", "stability=icepop", "stability.router_agreement=true", check) == 0
    printed = capsys.readouterr().out
    (table,) = re.findall(r"switched on .*?└", printed, flags=re.DOTALL)
    assert "router agreement" in table and "sync check" in table and "replay" not in table and "sampler" not in table
    assert max(map(len, table.splitlines())) < 90
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    waits = [float(row[3] or 0) for row in rows]
    assert rows[-1][0] == "all" and waits[-1] == pytest.approx(sum(waits[:-1]), abs=0.03)
    assert [row[1] for row in rows if row[5]] == ["agent loops, writes"], "hidden by the generation"
    assert "the plugin costs less with stability.router_agreement_share=0.05: " in printed
    (checked,) = re.findall(r"a checked weight sync takes ([0-9.]+) s more, .*: the first, then every 10", printed)
    (row,) = (row for row in rows if row[0] == "sync check")
    assert float(row[3]) == pytest.approx(float(checked) / 10, abs=0.01)


def test_where_it_does_not_fit_every_phase_that_fails_is_named_and_no_time(command, capsys):
    assert command("recipe=qwen3_30b_a3b", "--gpu", "L20", f"{ROLLOUT}.tensor_model_parallel_size=1") == 1
    printed = capsys.readouterr().out
    assert "does not fit: the update needs" in printed and "does not fit: the rollout" in printed
    assert "generation" not in printed


def test_what_is_switched_off_is_marked(command, capsys):
    def features(*overrides):
        command("recipe=qwen3_30b_a3b", "--json", *overrides)
        return {cost["feature"] for cost in json.loads(capsys.readouterr().out)["features"] if cost["on"]}

    assert features("stability=none") == set()
    assert features("stability=tis") >= {"corrections, vllm_kl/*", "weights to the workers"}
    assert "routing replay" in features("stability=r3")
    assert "guard" in features("stability=guard")
    assert "sampler's top tokens" in features("stability=tis", "stability.top_tokens.k=8")


def test_json_has_the_same_numbers(command, capsys):
    assert command("recipe=qwen3_30b_a3b", "--json", "--mean-response", "1000") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["fits"] is True and printed["sizes"]["gpus"] == 16
    assert sum(printed["update_gib"].values()) < printed["gpu_gib"]


def test_a_primary_config_of_ones_own(command, tmp_path, capsys):
    content = "hydra:\n  searchpath: [pkg://verl.trainer.config]\ndefaults: [ppo_trainer, _self_]\n"
    (tmp_path / "mine.yaml").write_text(content)
    assert command("--config-path", str(tmp_path), "--config-name=mine", "recipe=qwen3_30b_a3b") == 0
    assert command("--config-path", str(tmp_path), "--config-name=yours", "recipe=qwen3_30b_a3b") == 2
    assert "yours" in capsys.readouterr().err


KNOWN = ("recipe=qwen3_30b_a3b",)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipe=cpu_smoke", "assets=nowhere"], "is not in verl_ext/launch/models.py"),
        (["recipe=cpu_smoke", "assets=nowhere"], "; name a model of the same shape with --model"),
        (["recipe=cpu_smoke", "--model", "GPT-2"], "--model=GPT-2 is not in verl_ext/launch/models.py"),
        (["recipe=nope"], "recipe=nope is not known; choose one of"),
        (["foo bar"], "foo bar"),
        ([*KNOWN, "trainer.nnnodes=2"], "trainer.nnnodes is not a setting of this verl; similar: trainer.nnodes"),
        ([*KNOWN, "stability=nope"], "stability=nope is not known"),
        ([*KNOWN, "--gpu", "abacus"], "--gpu=abacus is not known; choose one of"),
        ([*KNOWN, "--nodes", "0"], "--nodes=0 must be above 0"),
        ([*KNOWN, "--nodes", "-1"], "--nodes=-1 must be above 0"),
        ([*KNOWN, "--nodes", "8,x"], "--nodes=8,x must be whole numbers, with commas between them"),
        ([*KNOWN, "--nodes", "2,0"], "--nodes=0 must be above 0"),
        ([*KNOWN, "--nodes", "3", "--scale-batch", "data.train_batch_size=511"], "--scale-batch: train_batch_size=511"),
        ([*KNOWN, f"{UNITS}=0"], f"{UNITS}=0 must be a whole number above 0"),
        ([*KNOWN, f"{WORKERS}=few"], f"{WORKERS}=few must be a whole number above 0"),
        ([*KNOWN, "trainer.nnodes=${nothing}"], "the sizes of this run cannot be read: Interpolation key 'nothing'"),
        ([*KNOWN, "trainer.n_gpus_per_node=0"], "trainer.n_gpus_per_node=0 must be a whole number above 0"),
        ([*KNOWN, f"{ROLLOUT}.gpu_memory_utilization=abc"], f"{ROLLOUT}.gpu_memory_utilization=abc must be a number"),
        ([*KNOWN, f"{ROLLOUT}.dtype=auto"], "dtype=auto cannot be planned"),
        ([*KNOWN, f"++{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=nvfp4"], "kv_cache_dtype=nvfp4 cannot be planned"),
        *(
            ([*KNOWN, f"actor_rollout_ref.actor.strategy={name}"], f"actor.strategy={name}: sizes are known only for")
            for name in ("foo", "FSDP2", "fsdp_turbo", "veomni", "torchtitan", "automodel")
        ),
        ([*KNOWN, "actor_rollout_ref.actor.strategy=null"], "sizes are known only for fsdp, fsdp2, megatron"),
        ([*KNOWN, "model_engine=veomni"], "actor.fsdp_config.fsdp_size is not set"),
        ([*KNOWN, "actor_rollout_ref.actor.strategy=megatron"], "megatron.tensor_model_parallel_size is not set"),
        ([*KNOWN, "--mean-response", "0"], "--mean-response=0 must be above 0"),
        ([*KNOWN, "--mean-response", "-5"], "--mean-response=-5 must be above 0"),
        ([*KNOWN, "--mean-prompt", "nan"], "--mean-prompt=nan must be above 0"),
        ([*KNOWN, "--mean-prompt", "3000"], "at most data.max_prompt_length=2048"),
        ([*KNOWN, "--mean-response", "9000"], "at most data.max_response_length=8192"),
    ],
)
def test_what_cannot_be_planned_is_one_line(command, capsys, arguments, said):
    assert command(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and said in captured.err
    assert captured.out == ""


COUNTED = (
    *("data.max_prompt_length", "data.max_response_length", "data.train_batch_size", "trainer.nnodes"),
    *(f"{ROLLOUT}.{name}" for name in ("n", "max_num_seqs", "expert_parallel_size", "tensor_model_parallel_size")),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    *(UNITS, WORKERS),
)


def refusal(config) -> str:
    """Returns the reason why this config cannot be planned; "" if it can."""
    try:
        plan = read_plan(config, "H100")
        assert plan.share(plan.seconds) >= 0 and plan.units_wanted >= plan.sizes.nodes
    except ConfigError as error:
        return str(error)
    return ""


def test_what_is_no_number_is_refused_by_its_name(compose):
    config = compose("recipe=qwen3_30b_a3b")
    share, unused = f"{ROLLOUT}.gpu_memory_utilization", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    with open_dict(config):
        for key in (*COUNTED, share, unused):
            stands = OmegaConf.select(config, key)
            for value in ("abc", "", None, True, 0, -1, 1.5, float("nan"), [1], {"a": 1}, 10**30, 10**400):
                OmegaConf.update(config, key, value, merge=False)
                said = refusal(config)
                usual = (key == share and value == 0) or (key in (UNITS, WORKERS) and value is None)
                assert key in said or "cannot be read" in said or key == unused or usual
            OmegaConf.update(config, key, stands, merge=False)
    assert refusal(config) == ""


def test_sglangs_share_is_weights_and_cache_and_its_workspace_stands_beside_it():
    vllm, sglang = plan_memory(FSDP).rollout, plan_memory(replace(FSDP, engine="SGLang")).rollout
    share = FSDP.utilization * FSDP.gpu.memory_gib * GIB
    assert sglang.lines["KV cache"] + sglang.lines["weights of the rollout"] == pytest.approx(share)
    assert sglang.total - vllm.total == pytest.approx(ENGINE_RESERVE)
    assert "workspace of SGLang" in sglang.lines and "workspace of vLLM" in vllm.lines


def test_a_recipe_is_planned_with_sglang(capsys):
    assert main(["plan", "--gpu", "H100", "recipe=qwen3_30b_a3b", f"{ROLLOUT}.name=sglang", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"]["engine"] == "SGLang"
    trajectories, tokens = 512 * 16, (2048 + 8192) * GUESSED_MEAN
    gib = {cost["who"]: cost["gib"] for cost in found["features"] if cost["feature"] == "routing replay"}
    assert gib["agent loops"] == pytest.approx(768 * trajectories * tokens / GIB)  # int16, 48 layers of top-8
