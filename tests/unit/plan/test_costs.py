"""The plugin's cost per step, against the formulas of docs/plan.md written again, and properties of every run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.test_plan import FSDP, MEGATRON
from verl_ext.launch.models import FAMILIES
from verl_ext.plan import costs as module
from verl_ext.plan.costs import plan_costs, transfer_seconds, units_wanted
from verl_ext.plan.memory import CACHED, UNDO, VERSIONS, host_memory, plan_memory
from verl_ext.plan.sizes import Usage, read_usage
from verl_ext.plan.timing import scoring_seconds

ALL = Usage(measures=True, weighs=True, guards=True, compares=True, has_top_tokens=True, top_token_reads=2)
TOKENS, LENGTHS = 1024 * 4096, 1024 * (1024 + 4096)  # FSDP: response tokens; with half of the prompts' limit
# Bytes per response token of the fields in TransferQueue: verl's agent loop writes ROLLOUT_BYTES.
ROLLOUT_BYTES = {"prompts": 8, "responses": 8, "response_mask": 8, "rollout_log_probs": 4, "rm_scores": 4}
STEP_BYTES = {"loss_mask": 8, "entropy": 4, "old_log_probs": 4, "advantages": 4, "router_agreement": 4}
BYTES = ROLLOUT_BYTES | STEP_BYTES | {"rollout_is_weights": 4}


def found(sizes, usage, generation=1e9):
    """(feature, who, how) -> Cost."""
    costs = plan_costs(sizes, usage, generation)
    assert len({(cost.feature, cost.who, cost.how) for cost in costs}) == len(costs)
    return {(cost.feature, cost.who, cost.how): cost for cost in costs}


def gigabytes(sizes, usage, *key):
    return found(sizes, usage)[key].gib * 2**30


@pytest.mark.parametrize("how", ["reads", "writes"])
def test_the_slowest_end_decides(how):
    client, unit, each = {
        "reads": (module.CLIENT_GET, module.UNIT_GET, module.VALUE_GET_US),
        "writes": (module.CLIENT_PUT, module.UNIT_PUT, module.VALUE_PUT_US),
    }[how]
    assert transfer_seconds(how, 60, 0, clients=4, units=1000, nodes=1000) == pytest.approx(60 / 4 / client)
    assert transfer_seconds(how, 60, 0, clients=1000, units=3, nodes=1000) == pytest.approx(20 / unit)
    assert transfer_seconds(how, 60, 0, clients=1000, units=1000, nodes=2) == pytest.approx(30 / 12.5)
    assert transfer_seconds(how, 0, 3e6, clients=3, units=1, nodes=1) == pytest.approx(each)


numbers = st.integers(1, 5000)


@given(st.sampled_from(["reads", "writes"]), st.floats(0, 1e5), st.floats(0, 1e7), numbers, numbers, numbers, numbers)
def test_more_of_anything_that_carries_is_never_slower(how, gb, values, clients, units, nodes, more):
    now = transfer_seconds(how, gb, values, clients, units, nodes)
    for then in ((clients + more, units, nodes), (clients, units + more, nodes), (clients, units, nodes + more)):
        assert transfer_seconds(how, gb, values, *then) <= now
    assert transfer_seconds(how, gb * 2, values, clients, units, nodes) >= now


def test_the_rollouts_fields_are_as_large_as_verl_writes_them():
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
    assert written == ROLLOUT_BYTES


def test_the_controller_reads_what_the_trainer_asks_for():
    from verl_ext.base.names import REWARDS
    from verl_ext.core.routing import REASONS
    from verl_ext.trainer.batch import FIELDS, FILTER_FIELDS

    def bytes_of(*names):
        return sum(BYTES[name] for name in names), len(names)

    fields, agreement = [name for name in FIELDS if name != "router_agreement"], "router_agreement"
    engines = ("rollout_log_probs", "old_log_probs", "response_mask")
    assert (bytes_of(REWARDS), bytes_of(*fields), bytes_of(agreement), bytes_of("advantages")) == (
        module.REWARDS,
        module.FIELDS,
        module.READ_AGREEMENT,
        module.ADVANTAGES,
    )
    again = bytes_of(*dict.fromkeys([*fields, "loss_mask", *FILTER_FIELDS]))
    assert (bytes_of("responses"), again) == (module.TOKEN_IDS, module.FILTERS_AGAIN)
    assert {*FILTER_FIELDS} - {REWARDS, *FIELDS} == {"responses", "advantages"}
    assert bytes_of(REWARDS, *engines) == tuple(-each for each in module.LEFT_OUT)
    assert bytes_of(*engines, "advantages") == module.SIGNS_AGAIN
    assert bytes_of("rollout_is_weights") == module.WRITTEN_WEIGHTS
    assert bytes_of("response_mask", "loss_mask") == module.WRITTEN_MASKS

    reads = "corrections, vllm_kl/*", "controller", "reads"
    plain, large = Usage(measures=True), replace(FSDP, sequences=2048)
    splits = replace(plain, splits=True)
    assert gigabytes(FSDP, plain, *reads) == pytest.approx(4 * TOKENS)
    assert gigabytes(FSDP, replace(splits, signs=True), *reads) == pytest.approx(4 * TOKENS)
    assert gigabytes(FSDP, replace(splits, filters=True), *reads) == pytest.approx(12 * TOKENS)
    assert gigabytes(large, plain, *reads) == pytest.approx(24 * 2 * TOKENS)
    assert gigabytes(large, splits, *reads) == pytest.approx(28 * 2 * TOKENS)
    assert gigabytes(large, replace(splits, signs=True), *reads) == pytest.approx(48 * 2 * TOKENS)
    assert gigabytes(large, replace(plain, filters=True), *reads) == pytest.approx(68 * 2 * TOKENS)
    sums = 1024 * 8 * (4 * 48 + 5 + len(REASONS))
    assert gigabytes(FSDP, replace(plain, compares=True), *reads) == pytest.approx((4 + 4) * TOKENS + sums)
    both = replace(plain, compares=True, filters=True)
    assert gigabytes(large, both, *reads) == pytest.approx((68 + 8) * 2 * TOKENS + 2 * sums)
    seconds = 24 * 2 * TOKENS / 1e9 / module.CLIENT_GET + 5 * 2048 * module.VALUE_GET_US / 1e6
    assert found(large, plain)[reads].seconds == pytest.approx(seconds)


def test_a_checked_sync_reads_all_weights_at_both_ends_and_only_where_it_is_checked():
    tensors = 48 * (128 * 3 + 9) + 3
    assert tensors == 18_867, "of Qwen3-30B-A3B at Hugging Face"
    seconds = module.checked_sync_seconds(FSDP)
    assert seconds == pytest.approx(32 * 2 * FSDP.shape.parameters / (FSDP.gpu.gb_per_s * 1e9) + 5e-4 * tensors)
    check = "sync check", "both ends", "computes"
    by_every = {every: found(FSDP, Usage(checked_every=every))[check] for every in (None, 0, 1, 50)}
    assert [cost.on for cost in by_every.values()] == [False, True, True, True]
    assert [cost.seconds for cost in by_every.values()] == pytest.approx([0, 0, seconds, seconds / 50])


def test_what_scores_trajectories_again_costs_their_forward_passes(compose):
    groups = FSDP.gpus // FSDP.replica_ranks
    gathered = 2 * FSDP.shape.parameters / 30e9  # of all weights in each pass, over the network
    assert scoring_seconds(FSDP, 1) == scoring_seconds(FSDP, groups) == pytest.approx(gathered)
    assert scoring_seconds(FSDP, groups + 1) == pytest.approx(2 * gathered)
    seconds = {
        again: found(FSDP, Usage(scored_again={"a": again}))["a", "training ranks", "computes"].seconds
        for again in ((groups, 1, 1), (groups, 10, 1), (groups, 10, 3), (2, 1, 8), (0, 1, 1), (16, 0, 1))
    }
    assert [*seconds.values()] == pytest.approx([gathered * each for each in (1, 0.1, 0.3, 2, 0, 0)])
    run = compose("recipe=qwen3_30b_a3b_async", "stability.rescoring.every=10", "stability.rescoring.versions=8")
    assert read_usage(run).scored_again == {
        "rescoring": (16, 10, 8),
        "sync canary": (8, 1, 1),  # by itself, in separate_async
        "scores after the update": (0, 1, 1),
    }


def test_each_feature_carries_what_the_page_says():
    ids, loops, ranks = 48 * 8, "agent loops", "training ranks"
    assert gigabytes(FSDP, ALL, "router agreement", loops, "writes") == pytest.approx(ids * LENGTHS)
    assert gigabytes(FSDP, ALL, "router agreement", ranks, "reads") == pytest.approx(ids * LENGTHS)
    assert gigabytes(FSDP, ALL, "sampler's top tokens", loops, "writes") == pytest.approx(8 * 32 * TOKENS)
    assert gigabytes(FSDP, ALL, "sampler's top tokens", ranks, "reads") == pytest.approx(2 * 8 * 32 * TOKENS)
    assert gigabytes(FSDP, ALL, "weights to the workers", "controller", "writes") == pytest.approx(4 * TOKENS)
    assert gigabytes(FSDP, replace(ALL, lag=True), "weights to the workers", ranks, "reads") == pytest.approx(
        12 * TOKENS
    )
    assert found(FSDP, ALL)["corrections, vllm_kl/*", "controller", "computes"].seconds == pytest.approx(17e-9 * TOKENS)
    sglang = replace(FSDP, engine="SGLang")
    assert gigabytes(sglang, ALL, "router agreement", loops, "writes") == pytest.approx(2 * ids * LENGTHS)


def test_ranks_of_a_replica_each_read_weights_and_top_tokens():
    for key in (
        ("weights to the workers", "training ranks", "reads"),
        ("sampler's top tokens", "training ranks", "reads"),
    ):
        one, many = (gigabytes(replace(FSDP, ulysses=ulysses), ALL, *key) for ulysses in (1, 4))
        assert many == pytest.approx(4 * one)
        megatron = (gigabytes(replace(MEGATRON, tensor=tensor, pipeline=2), ALL, *key) for tensor in (1, 8))
        one, many = megatron
        assert many == pytest.approx(8 * one)


def test_a_share_of_the_trajectories_sends_a_share_of_the_ids_and_replay_sends_all():
    few, loops, ranks = replace(ALL, agreement_share=0.05), "agent loops", "training ranks"
    for key in (("router agreement", loops, "writes"), ("router agreement", ranks, "reads")):
        assert gigabytes(FSDP, few, *key) == pytest.approx(gigabytes(FSDP, ALL, *key) / 20)
    for share in (1.0, 0.05):
        replays = found(FSDP, replace(ALL, agreement_share=share, replay="R3"))
        assert replays["routing replay", loops, "writes"].gib * 2**30 == pytest.approx(48 * 8 * LENGTHS)
        assert replays["routing replay", ranks, "reads"].gib * 2**30 == pytest.approx(2 * 48 * 8 * LENGTHS)
        assert not replays["router agreement", loops, "writes"].on  # it takes part in the replay's first read
    second = found(FSDP, replace(ALL, replay="R2"))
    assert second["router agreement", loops, "writes"].on and second["routing replay", ranks, "writes"].on
    assert second["routing replay", ranks, "writes"].gib * 2**30 == pytest.approx(48 * 8 * LENGTHS)


def test_what_the_agent_loops_write_hides_behind_the_generation():
    key = "router agreement", "agent loops", "writes"
    alone = replace(ALL, has_top_tokens=False)
    hidden, late = found(FSDP, alone)[key], found(FSDP, alone, generation=0.1)[key]
    assert hidden.seconds == late.seconds > 0.1
    assert hidden.waited == 0 and late.waited == pytest.approx(late.seconds - 0.1)
    together = [cost for cost in plan_costs(FSDP, ALL, 0.3) if cost.on and cost.who == "agent loops"]
    assert len(together) == 2 and sum(cost.seconds for cost in together) > 0.3
    assert sum(cost.hidden for cost in together) == pytest.approx(0.3), "they write one after another"


def test_a_dense_model_has_no_routing():
    dense = replace(FSDP, shape=FAMILIES["Qwen3-0.6B"])
    assert not [key for key in found(dense, ALL) if key[0].startswith("rout")]


runs = st.builds(
    Usage,
    measures=st.booleans(),
    weighs=st.booleans(),
    compares=st.booleans(),
    has_top_tokens=st.booleans(),
    filters=st.booleans(),
    signs=st.booleans(),
    splits=st.booleans(),
    top_tokens=st.integers(1, 256),
    top_token_reads=st.integers(1, 2),
    agreement_share=st.floats(0.01, 1),
    replay=st.sampled_from(["disabled", "R2", "R3"]),
    lag=st.booleans(),
    units=st.integers(1, 1000),
    workers=st.integers(1, 100),
)


@given(runs, st.integers(1, 100), st.floats(0, 1e3))
def test_more_units_are_never_slower_and_more_ranks_never_cheaper(usage, more, generation):
    def seconds(sizes, usage):
        return [cost.waited for cost in plan_costs(sizes, usage, generation)]

    now = seconds(MEGATRON, usage)
    with_units = seconds(MEGATRON, replace(usage, units=usage.units + more))
    assert all(then <= before for then, before in zip(with_units, now, strict=True))
    with_ranks = seconds(replace(MEGATRON, tensor=2 * MEGATRON.tensor), usage)
    assert all(then >= before for then, before in zip(with_ranks, now, strict=True))
    assert all(value >= 0 for value in now)


@given(runs, st.floats(0.1, 1e4), st.floats(0.1, 1e4))
def test_the_units_wanted_are_enough_and_no_more_than_the_ranks_can_keep_busy(usage, generation, rest):
    step = generation + rest
    costs = plan_costs(MEGATRON, usage, generation)
    wanted = units_wanted(MEGATRON, usage, costs, generation, step)
    assert wanted >= 2 * 32  # machines
    with_them = [cost for cost in plan_costs(MEGATRON, replace(usage, units=wanted), generation) if cost.on]
    reads = [cost for cost in with_them if (cost.who, cost.how) == ("training ranks", "reads")]
    read = sum(cost.gib * 2**30 / 1e9 for cost in reads)
    by_units = read / (wanted * module.UNIT_GET)
    by_others = max(read / (256 * module.CLIENT_GET), read / (32 * module.NODE_GB_S))
    assert by_units <= max(0.005 * step, by_others) * (1 + 1e-9)
    if wanted > 2 * 32:  # with one fewer, something waits longer than it may
        written = sum(cost.gib * 2**30 / 1e9 for cost in with_them if cost.who == "agent loops")
        too_long = read / ((wanted - 1) * module.UNIT_GET) > 0.005 * step * (1 - 1e-9)
        assert too_long or written / ((wanted - 1) * module.UNIT_PUT) > generation * (1 - 1e-9)


def test_the_units_wanted_are_bytes_over_rate_and_time():
    usage = Usage(compares=True)
    costs = plan_costs(MEGATRON, usage, generation=100)
    (read,) = (
        cost.gib * 2**30 / 1e9 for cost in costs if cost.on and (cost.who, cost.how) == ("training ranks", "reads")
    )
    wanted = units_wanted(MEGATRON, usage, costs, generation=100, step=1000)
    enough = max(64, -int(-min(read / (module.UNIT_GET * 5), 256 * module.CLIENT_GET / module.UNIT_GET) // 1))
    assert wanted == enough
    assert units_wanted(FSDP, Usage(), plan_costs(FSDP, Usage(), 100), 100, 1000) == 4  # two machines


def test_host_memory_is_that_of_what_is_kept():
    memory = plan_memory(FSDP)

    def lines(usage, sizes=FSDP):
        return host_memory(sizes, usage, memory, plan_costs(sizes, usage, 100))

    assert lines(Usage(measures=True, weighs=True)) == {}
    parameters = FSDP.shape.parameters
    kept = lines(Usage(undoes=True, versions=3))
    assert kept == pytest.approx({UNDO: 12 * parameters / 2, VERSIONS: 3 * 4 * parameters / 2})  # two machines
    ids = lines(Usage(compares=True))
    assert ids == pytest.approx(
        {"TransferQueue: router agreement": 384 * LENGTHS / 2, CACHED: memory.kv_tokens * 384 * 2}
    )
    assert lines(Usage(compares=True, replay="R3")).keys() == {"TransferQueue: routing replay", CACHED}
    assert CACHED not in lines(Usage(compares=True), replace(FSDP, engine="SGLang"))
