"""The narrow dtype on verl's own AgentLoopOutput, TransferQueue codec and batch functions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop as verls_agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from tests.support.agent_loop_worker import asked_for, changed
from tests.support.agent_outputs import PROMPT, RESPONSE, assert_same_but_routes, output
from verl_ext.base.errors import ConfigError
from verl_ext.base.patching import PatchError
from verl_ext.upstream import agent_loop
from verl_ext.upstream.agent_loop import Extras, parse_extras

PLACE = f"ray_kwargs.ray_init.runtime_env.env_vars.{agent_loop.VARIABLE}"
CHANGE = (agent_loop.change_agent_loop, verls_agent_loop)


def random_ids(rows, dtype=np.uint8, experts=256):
    ids = np.random.default_rng(rows).integers(0, experts, (rows, 3, 2)).astype(dtype)
    ids.flags.writeable = False  # as Ray hands it out
    return ids


@pytest.fixture
def narrowed():
    with changed(CHANGE, narrow=True):
        yield


@pytest.mark.parametrize("rows", [1, PROMPT + RESPONSE - 1, PROMPT + RESPONSE, PROMPT + RESPONSE + 2])
def test_a_byte_stays_a_byte_and_all_else_is_verls(rows):
    ids = random_ids(rows)
    verls = output(ids).as_dict()
    with changed(CHANGE, narrow=True):
        ours = output(ids).as_dict()
    assert ours["routed_experts"].dtype == torch.uint8 and verls["routed_experts"].dtype == torch.int16
    assert torch.equal(ours["routed_experts"].short(), verls["routed_experts"])
    assert_same_but_routes(ours, verls)


@pytest.mark.usefixtures("narrowed")
def test_the_output_keeps_its_ids_and_the_tensor_is_its_own():
    ids = random_ids(PROMPT + RESPONSE)
    given = output(ids)
    given.as_dict()["routed_experts"].zero_()
    assert given.routed_experts is ids and ids.any()


@pytest.mark.usefixtures("narrowed")
@pytest.mark.parametrize(("dtype", "experts"), [(np.uint16, 512), (np.int32, 128)], ids=["vllm", "sglang"])
def test_wider_ids_are_left_to_verl(dtype, experts):
    ids = random_ids(PROMPT + RESPONSE, dtype, experts)
    carried = output(ids).as_dict()["routed_experts"]
    assert carried.dtype == torch.int16 and np.array_equal(carried.numpy(), ids)


@pytest.mark.usefixtures("narrowed")
def test_without_ids_there_is_no_field():
    assert "routed_experts" not in output(None).as_dict()


class Other(AgentLoopOutput):
    pass


def without_zeros(self):
    fields = AgentLoopOutput.as_dict(self)
    fields["routed_experts"] = fields["routed_experts"][: len(self.routed_experts)]
    return fields


def narrow_already(self):
    fields = AgentLoopOutput.as_dict(self)
    return fields | {"routed_experts": fields["routed_experts"].to(torch.uint8)}


def with_an_argument(self, config):
    return AgentLoopOutput.as_dict(self)


@pytest.mark.parametrize("other", [without_zeros, narrow_already, with_an_argument, None])
def test_another_as_dict_is_refused_and_left_alone(monkeypatch, other):
    monkeypatch.setattr(Other, "as_dict", other, raising=False)
    module = SimpleNamespace(AgentLoopOutput=Other, AgentLoopMetrics=AgentLoopMetrics)
    with asked_for(narrow=True), pytest.raises(PatchError, match="VERL_EXT_AGENT_LOOP=narrow:0"):
        agent_loop.change_agent_loop(module)
    assert Other.as_dict is other


def test_it_is_asked_for_once_in_the_environment_of_rays_processes(compose, monkeypatch):
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    monkeypatch.delenv(agent_loop.VARIABLE, raising=False)
    config = compose("+ray_kwargs.ray_init.runtime_env.env_vars.MINE=1")
    agent_loop.request(config, Extras(narrow=True))
    asked = config.ray_kwargs.ray_init.runtime_env
    merged = OmegaConf.to_container(OmegaConf.merge(get_ppo_ray_runtime_env(config), asked))["env_vars"]  # as run_ppo
    assert merged[agent_loop.VARIABLE] == "narrow:1,share:1.0,turns:0,top_tokens:0,answers:0"
    assert str(merged["MINE"]) == "1" and "NCCL_DEBUG" in merged


def test_the_run_and_the_shell_can_decline(compose, monkeypatch):
    monkeypatch.delenv(agent_loop.VARIABLE, raising=False)
    declined = compose(f"+{PLACE}=narrow:0")
    agent_loop.request(declined, Extras(narrow=True))
    monkeypatch.setenv(agent_loop.VARIABLE, "narrow:0")
    by_the_shell = compose()
    agent_loop.request(by_the_shell, Extras(narrow=True))
    assert found(declined) == found(by_the_shell) == Extras(narrow=False)


def found(config):
    """Returns the extras that the run's processes find."""
    return Extras(**parse_extras(OmegaConf.select(config, PLACE)))


def test_each_part_that_is_declined_is_off_and_what_the_config_decides_is_the_configs(compose, monkeypatch):
    wanted = Extras(narrow=True, share=0.25, turns=True, top_tokens=8)
    monkeypatch.setenv(agent_loop.VARIABLE, "narrow:1,turns:0,top_tokens:4")
    config = compose(f"+{PLACE}='narrow:0,share:0.5'")
    agent_loop.request(config, wanted)
    assert found(config) == Extras(narrow=False, share=0.25, turns=False, top_tokens=8)
    nothing = compose()
    agent_loop.request(nothing, Extras())
    assert OmegaConf.select(nothing, PLACE) is None


@pytest.mark.parametrize("wanted", [Extras(), Extras(True, 0.123456789, True, 32), Extras(share=1e-9)])
def test_what_is_written_is_what_is_read(wanted):
    assert Extras(**parse_extras(str(wanted))) == wanted


@pytest.mark.parametrize("text", ["narrow", "narrow:no", "narow:0", "0", "narrow=0"])
def test_a_value_that_means_nothing_is_an_error(text):
    with pytest.raises(ConfigError, match="VERL_EXT_AGENT_LOOP=narrow:0 or VERL_EXT_AGENT_LOOP=turns:0"):
        parse_extras(text)


@pytest.mark.parametrize(("value", "dtype"), [("narrow:1", "uint8"), ("narrow:0", "int16"), (None, "int16")])
def test_a_process_is_patched_only_where_it_is_requested(fresh_python, value, dtype):
    code = (
        "from verl_ext.upstream import agent_loop; agent_loop.install_changes()\n"
        "import sys; assert agent_loop.AGENT_LOOP not in sys.modules\n"
        "import numpy as np\n"
        "from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput\n"
        "ids = np.zeros((2, 1, 1), np.uint8)\n"
        "output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], routed_experts=ids,\n"
        "                         metrics=AgentLoopMetrics())\n"
        "print(output.as_dict()['routed_experts'].dtype)"
    )
    done = fresh_python(code, **{agent_loop.VARIABLE: value})
    assert done.stdout.split()[-1:] == [f"torch.{dtype}"], done.stderr


@pytest.mark.usefixtures("narrowed")
@pytest.mark.parametrize("left_out", [(), (1,), (0, 2), (0, 1, 2, 3)])  # as by a share
@pytest.mark.parametrize("lengths", [(5, 3, 8, 4), (5, 5, 5, 5)], ids=["jagged", "equal"])
def test_bytes_pass_transfer_queues_codec_and_verls_batches(lengths, left_out):
    """The bytes take the path from as_dict to a training worker's micro-batch, except for the sockets."""
    from tensordict import TensorDict
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager as Manager
    from transfer_queue.utils.serial_utils import decode, encode
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

    outputs = [
        AgentLoopOutput(
            prompt_ids=[0],
            response_ids=list(range(length - 1)),
            response_mask=[1] * (length - 1),
            routed_experts=random_ids(length - 1),
            metrics=AgentLoopMetrics(),
        ).as_dict()
        for length in lengths
    ]
    sent = [fields["routed_experts"][: 0 if row in left_out else None] for row, fields in enumerate(outputs)]
    put = tu.list_of_dict_to_tensordict([{"routed_experts": ids} for ids in sent])["routed_experts"]
    frames = encode({"ids": Manager._select_by_positions(put, list(range(len(lengths))))})
    got = Manager._pack_field_values(list(decode([memoryview(frame) for frame in frames])["ids"]))
    batch = TensorDict(
        {"routed_experts": got, "input_ids": tokens(lengths), "loss_mask": tokens(lengths)}, len(lengths)
    )

    def same(received, expected):
        assert received.dtype == torch.uint8 and received.layout == torch.jagged
        assert all(torch.equal(a, b) for a, b in zip(received.unbind(), expected, strict=True))

    same(got, sent)
    picked = tu.index_select_tensor_dict(batch, [2, 0])
    same(picked["routed_experts"], [sent[2], sent[0]])
    same(tu.concat_tensordict(tu.chunk_tensordict(batch, 2))["routed_experts"], sent)
    for dynamic in (False, True):
        settings = {"max_token_len_per_gpu": 9, "micro_batch_size_per_gpu": 2, "sp_size": 1}
        tu.assign_non_tensor(batch, use_dynamic_bsz=dynamic, **settings)
        micro_batches, indices = prepare_micro_batches(batch)
        results = [
            {"model_output": {"ids": part["routed_experts"]}, "loss": 0.0, "metrics": {}} for part in micro_batches
        ]
        same(postprocess_batch_func(results, indices, batch)["model_output"]["ids"], sent)


def tokens(lengths):
    return torch.nested.as_nested_tensor([torch.ones(n, dtype=torch.long) for n in lengths], layout=torch.jagged)


def test_verls_load_balance_metric_and_padding_rows_take_bytes():
    from verl.trainer.ppo.metric_utils import _compute_rollout_moe_load_counts
    from verl.trainer.ppo.padding_utils import build_padding_routed_experts

    ids = torch.from_numpy(random_ids(12).copy()).view(2, 6, 3, 2)
    mask = torch.ones(2, 4, dtype=torch.long)
    counts = [_compute_rollout_moe_load_counts(wide, mask, 256) for wide in (ids, ids.short())]
    assert counts[0].sum() > 0 and torch.equal(*counts)
    assert build_padding_routed_experts(ids[0], 3).dtype == torch.uint8
