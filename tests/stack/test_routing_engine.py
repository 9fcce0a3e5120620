"""Capture and replay in verl's real FSDP2 engine on the CPU, against the experts of each sequence by itself.

Every case runs compute_log_prob and an update in micro-batches of two; the routers are turned round between the two, so
that an update which replays nothing has other experts. Two processes run the cases under Ulysses sequence parallelism.
"""

import pytest
import torch

from recipes.make_assets import build_tokenizer
from tests.support.closeness import close
from tests.support.routing_families import FAMILIES, TOP_K, build, moe_layers
from tests.support.routing_ranks import LENGTHS, Case, rank_main, rollout_routes, sequence_routes, sequences
from tests.support.top_token_ranks import reference_reading, response_values, sampler_top_tokens, sequence_logits
from verl_ext.base.names import TOP_TOKEN_SUMS
from verl_ext.core.routing import RouterSums
from verl_ext.routing.recorder import joined_passes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PLANTED = [(0, 1, 2), (3, 0, 2), (3, 3, 2)]
CASES = {f"capture {family}": Case(family, planted=PLANTED) for family in FAMILIES} | {
    "padded": Case(packed=False, planted=PLANTED, left_out=(1,)),
    "padded deepseek_v3": Case("deepseek_v3", packed=False, planted=PLANTED),
    "bucket": Case(bucket=16, planted=PLANTED, left_out=(0, 1)),  # a whole micro-batch
    "lora": Case(lora="all-linear", planted=PLANTED),
    "R2": Case(mode="R2", planted=PLANTED),
    "R2 deepseek_v3 checkpointing": Case("deepseek_v3", mode="R2", checkpointing=True),
    "R2 lora": Case(mode="R2", lora="all-linear"),
    "R3": Case(mode="R3", planted=PLANTED),
    "R3 padded": Case(mode="R3", packed=False, planted=PLANTED),
    "R3 deepseek_v3 bucket": Case("deepseek_v3", mode="R3", bucket=16, planted=PLANTED),
    "R3 glm4_moe lora checkpointing": Case("glm4_moe", mode="R3", lora=["o_proj"], checkpointing=True, planted=PLANTED),
}
ULYSSES = {
    "ulysses": Case(ranks=2, planted=PLANTED),
    "ulysses bucket": Case(ranks=2, bucket=5, planted=PLANTED, left_out=(1, 2)),
    "ulysses R2": Case(ranks=2, mode="R2", planted=PLANTED),
    "ulysses R3": Case(ranks=2, mode="R3", checkpointing=True, planted=PLANTED),
}
TOP_TOKENS = {
    "top tokens": Case(top_tokens=True),
    "top tokens padded": Case(top_tokens=True, packed=False),
    "top tokens checkpointing": Case("deepseek_v3", top_tokens=True, checkpointing=True),
}
TOP_TOKENS_ULYSSES = {"top tokens ulysses": Case(top_tokens=True, ranks=2)}
MICRO_BATCHES = [(0, 1), (2, 3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family in FAMILIES:
        made[family] = str(tmp_path_factory.mktemp(family))
        build(family).save_pretrained(made[family])
        build_tokenizer().save_pretrained(made[family])
    return made


def spawned(cases, ranks, folders, folder):
    arguments = (ranks, cases, folders, f"file://{folder}/store", str(folder))
    torch.multiprocessing.spawn(rank_main, arguments, nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def ran(quick_ranks, folders, tmp_path_factory):
    """Case -> what each rank found."""
    one = spawned(CASES | TOP_TOKENS, 1, folders, tmp_path_factory.mktemp("one"))
    two = spawned(ULYSSES | TOP_TOKENS_ULYSSES, 2, folders, tmp_path_factory.mktemp("two"))
    return {name: [rank[name] for rank in ranks] for ranks in (one, two) for name in ranks[0]}


ALL = CASES | ULYSSES


@pytest.mark.parametrize("name", ["ulysses", "ulysses bucket"])
def test_the_probes_hooks_see_whole_sequences_on_each_rank_of_ulysses(ran, name):
    (alone,) = ran[f"capture {ULYSSES[name].family}"]
    lengths = [sum(sum(LENGTHS[trajectory]) for trajectory in trajectories) for trajectories in MICRO_BATCHES]
    expected = joined_passes(alone["states"], lengths)
    assert len(expected) > 2
    for of_rank in ran[name]:
        for point, rows in joined_passes(of_rank["states"], lengths).items():
            close(rows, expected[point], name=point)


def in_order(case, found, key):
    """[T, L, K] ids that the experts were given, of all trajectories, from the ranks' shares of each micro-batch."""
    layers = len(moe_layers(case.family))
    whole = []
    for index, trajectories in enumerate(MICRO_BATCHES):
        # With gradient checkpointing the backward pass runs the layers again, after those of the forward pass.
        calls = layers * (2 if case.checkpointing and key == "update_experts" else 1)
        shares = [rank[key][index * calls : index * calls + layers] for rank in found]
        ids = torch.stack([torch.cat([share[layer] for share in shares]) for layer in range(layers)], dim=1)
        lengths = [sum(LENGTHS[trajectory]) for trajectory in trajectories]
        if not case.packed:
            rows = ids.view(len(lengths), max(lengths), layers, TOP_K)
            ids = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
        whole.append(ids[: sum(lengths)])
    return torch.cat(whole)


def sets(ids):
    return ids.long().sort(-1).values


def own_routes(case, last_tokens=True):
    """[T, L, K] by the model itself, dense layers left out."""
    routes = torch.cat([sequence_routes(case.family, ids, last_token=last_tokens) for ids in sequences()])
    return routes[:, moe_layers(case.family)]


def replayed_routes(case):
    """[T, L, K] of the rollout, with the model's own for the last token of each sequence."""
    rollout = torch.cat(rollout_routes(case))[:, moe_layers(case.family)]
    return torch.where(rollout.flatten(1).any(1)[:, None, None], rollout, own_routes(case))


@pytest.mark.parametrize("name", ALL)
def test_agreement_finds_the_planted_disagreements_at_their_tokens_and_layers(ran, name):
    case, found = ALL[name], ran[name][0]
    layers = moe_layers(case.family)
    planted = [] if case.mode == "R3" else case.planted  # else the rollout's experts were used
    sums = RouterSums.unpack(torch.stack(list(found["router_sums"].unbind())))
    for index, (_, response) in enumerate(LENGTHS):
        expected, exact = torch.ones(response), torch.full((len(layers),), float(response))
        first = torch.zeros(len(layers))
        if index in case.left_out:
            assert found["router_agreement"][index].isnan().all() and sums.left_out[index].item() == response
            assert not any(values[index].any() for name, values in vars(sums).items() if name != "left_out")
            continue
        for trajectory, token, layer in planted:
            if trajectory == index:
                expected[token] -= 1 / TOP_K / len(layers)
                exact[layers.index(layer)] -= 1
                first[layers.index(layer)] += 1
        torch.testing.assert_close(found["router_agreement"][index], expected)
        assert sums.exact[index].tolist() == exact.tolist()
        assert sums.first[index].tolist() == first.tolist()
        assert sums.tokens[index].item() == response
        assert sums.unknown[index].item() == sums.left_out[index].item() == 0
        assert sums.margin_equal[index] > 0


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.mode == "disabled"])
def test_capture_changes_nothing(ran, name):
    case = ALL[name]
    assert torch.equal(sets(in_order(case, ran[name], "experts")), sets(own_routes(case)))
    assert not torch.equal(sets(in_order(case, ran[name], "update_experts")), sets(own_routes(case)))


@pytest.mark.shows("a sequence over two ranks", engine="fsdp2")
@pytest.mark.parametrize("name", ALL)
def test_the_ranks_of_ulysses_fetch_together(ran, name):
    assert [rank["shares"] for rank in ran[name]] == ([[0, 1]] * 2 if ALL[name].ranks == 2 else [None])


@pytest.mark.shows("R2", engine="fsdp2")
@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.mode == "R2"])
def test_r2_replays_what_compute_log_prob_used(ran, name):
    case, found = ALL[name], ran[name]
    own = sets(own_routes(case))
    assert torch.equal(sets(in_order(case, found, "experts")), own)
    assert found[0]["old_routed_experts"].dtype == torch.uint8
    assert torch.equal(sets(found[0]["old_routed_experts"].values()), own)
    assert torch.equal(sets(in_order(case, found, "update_experts")), own)
    assert found[0]["metrics"]["router_own_agreement"][0][0] < 0.5  # the routers were turned round


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.mode == "R3"])
def test_r3_replays_the_rollout_in_both_passes(ran, name):
    case, found = ALL[name], ran[name]
    expected = sets(replayed_routes(case))
    assert torch.equal(sets(in_order(case, found, "experts")), expected)
    known = torch.cat(rollout_routes(case)).flatten(1).any(1)
    assert known.sum() == len(known) - len(LENGTHS)
    assert torch.equal(sets(in_order(case, found, "update_experts"))[known], expected[known])
    # What the training router would have chosen was measured before it was replaced.
    sums = RouterSums.unpack(torch.stack(list(found[0]["router_sums"].unbind())))
    assert sums.own.sum() < sums.agree.sum()


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.checkpointing])
def test_the_recomputation_of_gradient_checkpointing_has_the_experts_of_the_forward_pass(ran, name):
    layers = len(moe_layers(ALL[name].family))
    for rank in ran[name]:
        given = rank["update_experts"]
        assert len(given) == 2 * layers * len(MICRO_BATCHES)
        for start in range(0, len(given), 2 * layers):
            for layer in range(layers):
                assert torch.equal(given[start + 2 * layers - 1 - layer], given[start + layer])


def test_a_loras_reference_replays_and_records_nothing(ran):
    for name in ("R2 lora", "R3 glm4_moe lora checkpointing"):
        case, found = ALL[name], ran[name]
        expected = own_routes(case) if case.mode == "R2" else replayed_routes(case)
        known = torch.cat(rollout_routes(case)).flatten(1).any(1)
        assert torch.equal(sets(in_order(case, found, "reference_experts"))[known], sets(expected)[known])
        assert found[0]["reference_outputs"] == ["log_probs", "metrics"]


@pytest.mark.parametrize("truncated", [True, False])
@pytest.mark.parametrize("name", TOP_TOKENS | TOP_TOKENS_ULYSSES)
def test_top_tokens_are_read_in_every_layout(ran, name, truncated):
    """Results equal those of each sequence by itself. So does the gradient of the LM head, up to how ranks share a
    loss."""
    case = (TOP_TOKENS | TOP_TOKENS_ULYSSES)[name]
    assert ran[name][0]["verls"], "where the KL alone is asked for, log-probs are verl's"
    found = ran[name][0][truncated]
    assert found["names"] == ["entropy", "log_probs", "router_agreement", "router_sums", TOP_TOKEN_SUMS]
    model = build(case.family)
    top_tokens = list(sampler_top_tokens(sequence_logits(model)))
    l_own, term, sums = reference_reading(sequence_logits(model), top_tokens, truncated)
    close(response_values(found["log_probs"]), l_own)
    close(torch.stack(list(found[TOP_TOKEN_SUMS].unbind())), sums)
    (l_own.sum() + term.sum()).backward()
    expected, gradient = model.lm_head.weight.grad, found["gradient"]
    close(gradient / gradient.norm(), expected / expected.norm(), rtol=1e-4)
    whole = response_values(ran[name][0][False]["entropy"])
    assert (response_values(ran[name][0][True]["entropy"]) < whole).sum() >= len(whole) - 1  # of few tokens, of all
