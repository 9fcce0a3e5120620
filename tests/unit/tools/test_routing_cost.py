"""The arithmetic of the transport, against counting, verl's own fields, transformers' configs, and docs/routing.md."""

import re

import numpy as np
import pytest
from transformers import DeepseekV3Config, Glm4MoeConfig, LlamaConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from tests import ROOT
from tools import routing_cost as cost
from tools.routing_cost import MODELS, RoutingShape, main
from verl_ext.base.errors import ConfigError
from verl_ext.plan.costs import CLIENT_GET

PAGE = (ROOT / "docs" / "routing.md").read_text(encoding="utf-8")
SMALL = RoutingShape(layers=4, moe_layers=3, experts=16, top_k=2)


def test_bytes_are_those_of_the_arrays():
    tokens, trajectories = 7, 3
    hops = cost.routing_cost(SMALL, tokens, trajectories)
    wide = cost.routing_cost(SMALL, tokens, trajectories, narrow=False)
    for hop, dtype in (
        (hops["capture"], np.int32),
        (hops["engine"], np.uint8),
        (hops["agent_loop"], np.uint8),
        (hops["put"], np.uint8),
        (hops["get"], np.uint8),
        (wide["agent_loop"], np.uint8),
        (wide["put"], np.int16),
        (wide["get"], np.int16),
        (wide["device"], np.int16),
    ):
        ids = np.zeros((trajectories, tokens, SMALL.layers, SMALL.top_k), dtype)
        assert (hop.bytes_per_step, hop.bytes_per_token, hop.id_bytes) == (ids.nbytes, ids[0, 0].nbytes, ids.itemsize)


def test_above_256_experts_both_dtypes_have_two_bytes():
    assert RoutingShape(4, 4, 256, 2).engine_id_bytes == 1
    large = RoutingShape(4, 4, 257, 2)
    for narrow in (True, False):
        hops = cost.routing_cost(large, 5, 1, narrow=narrow)
        assert [hops[name].id_bytes for name in ("capture", "engine", "put", "get")] == [4, 2, 2, 2]


def test_each_reading_stage_fetches_all_for_every_rank_and_vllm_sends_the_whole_prefix_of_each_turn():
    tokens, turns = 12, 3
    hops = cost.routing_cost(SMALL, tokens, 1, reads=2, ranks=4, turns=turns)
    one = SMALL.ids
    returned = sum(one * tokens * turn // turns for turn in range(1, turns + 1))
    assert hops["engine"].bytes_per_step == returned and hops["agent_loop"].bytes_per_token == one
    assert hops["put"].bytes_per_token == one and hops["capture"].bytes_per_token == 4 * one
    assert hops["get"].bytes_per_token == 2 * one and hops["device"].bytes_per_token == 8 * one


def test_a_share_is_bytes_over_rate_over_time():
    hop = cost.routing_cost(MODELS["Qwen3-30B-A3B"], 10**6, 10)["get"]
    assert hop.share(gb_per_s=2.0, step_seconds=96.0) == pytest.approx(384 * 10**7 / 2e9 / 96)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"trajectories": 0}, {"reads": 0}, {"ranks": 0}, {"turns": 0}])
def test_counts_below_one_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name}=0"):
        cost.routing_cost(SMALL, **{"tokens": 1, "trajectories": 1} | wrong)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (Qwen3MoeConfig(num_hidden_layers=48, num_experts=128), MODELS["Qwen3-30B-A3B"]),
        (Qwen3MoeConfig(num_hidden_layers=94, num_experts=128), MODELS["Qwen3-235B-A22B"]),
        (DeepseekV3Config(), MODELS["DeepSeek-V3"]),
        (Qwen2MoeConfig(num_hidden_layers=6, decoder_sparse_step=2), RoutingShape(6, 3, 60, 4)),
        (Qwen3MoeConfig(num_hidden_layers=6, mlp_only_layers=[0, 5]), RoutingShape(6, 4, 128, 8)),
        (MixtralConfig(), RoutingShape(32, 32, 8, 2)),
        (Glm4MoeConfig(), RoutingShape(46, 45, 128, 8)),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_shapes_from_configs(config, shape):
    assert RoutingShape.from_config(config) == shape


def test_layers_named_dense():
    from transformers import Cohere2MoeConfig

    config = Cohere2MoeConfig(num_hidden_layers=4, mlp_layer_types=["dense", "sparse", "sparse", "dense"])
    assert RoutingShape.from_config(config).moe_layers == 2


def test_experts_are_found_where_vllm_finds_them():
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capturer

    for config in (Qwen3MoeConfig(), DeepseekV3Config(), MixtralConfig(), Glm4MoeConfig()):
        shape = RoutingShape.from_config(config)
        assert shape.experts == capturer.get_num_experts(config)
        assert shape.top_k == capturer._get_num_experts_per_tok(config)


def test_a_dense_model_is_refused():
    with pytest.raises(ConfigError, match="model_type=llama"):
        RoutingShape.from_config(LlamaConfig())


def test_the_other_fields_are_those_of_verls_output():
    import torch
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    fields = AgentLoopOutput(
        prompt_ids=[0],
        response_ids=[1, 2],
        response_mask=[1, 1],
        response_logprobs=[0.0, 0.0],
        reward_score=0.0,
        metrics=AgentLoopMetrics(),
    ).as_dict()
    written = {name: value.nbytes / len(value) for name, value in fields.items() if torch.is_tensor(value)}
    # AgentLoopWorkerTQ adds loss_mask, which is response_mask, and input_ids and position_ids in int64.
    assert written == {
        "prompts": 8,
        "responses": cost.WITH_THE_IDS["prompts or responses"],
        "response_mask": cost.WITH_THE_IDS["loss_mask"],
        "rollout_log_probs": cost.WITH_THE_IDS["rollout_log_probs"],
        "rm_scores": cost.WITH_THE_IDS["rm_scores"],
    }


def block(name):
    """Returns the part of the page between the comments `name` and /`name`."""
    return re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", PAGE, re.DOTALL).group(1).strip()


def test_the_page_shows_the_functions_tables():
    assert block("models") == cost.markdown(cost.models_table(32768, 512))
    hops = cost.routing_cost(MODELS["Qwen3-30B-A3B"], 32768, 512)
    assert block("hops") == cost.markdown(cost.hops_table(hops, rules=True))


def test_the_pages_example_is_computed():
    shown = " ".join(block("example").split())
    rate, step = CLIENT_GET, 497.89
    assert f"At the {rate} GB/s" in shown and f"{step} s" in shown
    hops = [cost.routing_cost(MODELS["Qwen3-30B-A3B"], 8192, 8192, narrow=narrow)["get"] for narrow in (True, False)]
    narrow, wide = (hop.bytes_per_step / 1e9 for hop in hops)
    assert f"{narrow:.1f} GB in vLLM's dtype and {wide:.1f} GB in int16" in shown
    assert f"takes {narrow / rate:.0f} s or {wide / rate:.0f} s" in shown
    assert " or ".join(f"{hop.share(rate, step):.1%}" for hop in hops) in shown
    assert f"at 16 times that rate, {narrow / rate / 16:.1f} s or {wide / rate / 16:.1f} s" in shown


def test_the_page_names_the_other_fields_bytes():
    before, after = sum(cost.WITH_THE_IDS.values()), sum(cost.FOR_THE_UPDATE.values())
    assert f"{before} bytes to `compute_log_prob`, {before + after} bytes to `update_actor`" in PAGE


def test_the_command_line(capsys, tmp_path):
    Qwen3MoeConfig(num_hidden_layers=2, num_experts=8, num_experts_per_tok=2).save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--tokens", "1000", "--trajectories", "500", "--replay", "--ranks", "2"]
    assert main([*arguments, "--get-gb-s", "0.002", "--step-seconds", "20"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 layers, 8 experts, top-2" in shown and "48 bytes to compute_log_prob" in shown
    assert "get: 2.0 s at 0.002 GB/s, 10.0% of a step of 20 s" in shown


def test_a_model_folder_with_brackets_in_its_name_is_no_markup(capsys, tmp_path):
    folder = tmp_path / "[" / "exp]"
    Qwen3MoeConfig(num_hidden_layers=2, num_experts=8, num_experts_per_tok=2).save_pretrained(folder)
    arguments = ["--model", str(folder), "--tokens", "1000", "--trajectories", "500"]
    assert main(arguments) == 0
    assert "[/exp]" in "".join(capsys.readouterr().out.split())


def test_the_command_line_names_the_remedy(capsys):
    assert main(["--model", "/nowhere"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("routing_cost: --model /nowhere") and "Qwen3-235B-A22B" in message
