"""Every method in a real run, another one each step: two turns with a tool between them (switching.py).

FSDP2 with vLLM has all of them; Megatron and SGLang have those that show that their own data arrives."""

import re

import pytest
from omegaconf import OmegaConf

from tests import ROOT
from tests.stack.running import assert_documented, assert_k1_is_verls, assert_load_is_of
from tests.stack.switching import (
    BYPASS_NARROW,
    BYPASS_OPSM,
    BYPASS_REFUSED,
    BYPASS_TIS,
    COMPOSED,
    DPPO,
    ENGINES,
    FILTERS,
    GATED,
    GEO_MASK,
    ICEPOP,
    ICEPOP_LOSS,
    IPO,
    KPOP,
    LOSS,
    LOW_AGREEMENT,
    M2PO,
    MIS,
    NARROW,
    NOTHING_LEFT,
    REUSED,
    REUSED_ROUTED,
    SCHEDULES,
    SEQ_MASK_TIS,
    TIS,
    TIS_SEQUENCE,
)

pytestmark = pytest.mark.e2e

TRAJECTORIES = 8 * 4
TOOL_TOKENS = 8  # <user>, six characters, <assistant>
BYPASSED = (BYPASS_NARROW, BYPASS_REFUSED, BYPASS_OPSM, BYPASS_TIS)
EVERY = [
    pytest.param(engine, entry, id=f"{engine}-{' '.join(entry)}")
    for engine, schedule in SCHEDULES.items()
    for entry in schedule
    if entry not in (NOTHING_LEFT, DPPO, REUSED, REUSED_ROUTED, *BYPASSED)
]


ON_FSDP2 = pytest.mark.parametrize("engine", ["fsdp2"], indirect=True)


def runs_with(*entries):
    """Runs a test on each engine whose run has all of these entries."""
    engines = [engine for engine in ENGINES if {*entries} <= {*SCHEDULES[engine]}]
    assert engines
    return pytest.mark.parametrize("engine", engines, indirect=True)


@pytest.fixture(params=ENGINES)
def engine(request):
    """The training engine, or sglang as the rollout engine."""
    return request.param


@pytest.fixture
def switching_run(engine, switching_run_of):
    return switching_run_of(engine)


@pytest.fixture
def step_of(engine, switching_run):
    """step_of("stability=tis", ...) -> the metrics of the step whose overrides these are."""
    assert switching_run.code == 0, switching_run.tail
    steps, schedule = switching_run.steps, SCHEDULES[engine]
    assert len(steps) == len(schedule)
    return lambda *entry: steps[schedule.index(entry)]


@pytest.mark.parametrize(("engine", "entry"), EVERY, indirect=["engine"])
def test_each_method_measures_and_updates(step_of, entry):
    step = step_of(*entry)
    # One token off in the second turn, it would be 0.02 (0.06 over that turn alone).
    assert 0 < step["vllm_kl/k3"] < 1e-3
    assert_k1_is_verls(step)
    assert step["guard/skipped"] == 0
    assert step["actor/grad_norm"] > 0
    assert step["actor/kl_loss"] >= 0


@runs_with(BYPASS_NARROW, BYPASS_REFUSED)
def test_in_bypass_mode_the_update_is_measured_weighed_and_refused(step_of, switching_run):
    narrow, refused = step_of(*BYPASS_NARROW), step_of(*BYPASS_REFUSED)
    for step in (narrow, refused):
        assert_measured_in_the_update(step)
    assert narrow["guard/skipped"] == 0 and narrow["actor/grad_norm"] > 0
    assert 0 < narrow["correction/dropped_low"] < 1 and 0 < narrow["correction/dropped_high"] < 1
    assert narrow["correction/weight_mean"] == pytest.approx(1 - narrow["correction/dropped"]), "a mask"
    assert refused["guard/skipped"] == 1 and refused["correction/dropped"] == 1
    assert "actor/grad_norm" not in refused and "actor/pg_loss" in refused
    assert "update skipped: icepop dropped all" in switching_run.console
    assert "tokens of the first mini-batch" in switching_run.console


@runs_with(BYPASS_OPSM, BYPASS_TIS)
def test_in_bypass_mode_other_losses_are_weighed_too(step_of):
    opsm, tis = step_of(*BYPASS_OPSM), step_of(*BYPASS_TIS)
    for step in (opsm, tis):
        assert_measured_in_the_update(step)
        assert step["guard/skipped"] == 0 and step["actor/grad_norm"] > 0
    assert 0 < opsm["actor/opsm/dropped"] < 1 and opsm["actor/opsm/mismatch"] == 0 != opsm["actor/opsm/staleness"]
    assert 0.9 < tis["correction/weight_mean"] < 1, "weights, beside REINFORCE"


@runs_with(REUSED)
def test_without_compute_log_prob_the_update_is_measured_and_weighed_by_its_own_pass(step_of):
    step = step_of(*REUSED)
    assert 0 < step["vllm_kl/k3"] < 1e-3 and 0 < step["vllm_kl/k3/turn/01"] < 1e-3
    assert step["actor/ppo_kl"] == step["actor/pg_clipfrac"] == 0, "l_old is l_theta"
    assert 0 < step["correction/dropped_low"] < 1 and 0 < step["correction/dropped_high"] < 1
    assert step["guard/skipped"] == 0 and step["actor/grad_norm"] > 0 and step["actor/kl_loss"] >= 0
    assert step["actor/entropy"] > 0 and "rollout_corr/kl" not in step
    assert step["training/rollout_probs_diff_mean"] == step["vllm_kl/prob_diff_mean"] > 0


@ON_FSDP2
def test_without_compute_log_prob_the_update_compares_the_routers(step_of):
    step, before = step_of(*REUSED_ROUTED), step_of(*ICEPOP)
    assert {name for name in before if name.startswith("router/")} <= step.keys()
    assert 0.9 < step["router/agreement"] <= step["router/own_agreement"] <= 1 and step["router/tokens"] > 0
    assert_load_is_of(step, 8)
    assert step["router/checked"] == 1 and not any("first_pass" in name for name in step)


def assert_measured_in_the_update(step):
    """Checks that the gap is the first mini-batch's, by the weights that compute_log_prob would have had."""
    assert 0 < step["vllm_kl/k3"] < 1e-3
    assert 0 < step["vllm_kl/k3/turn/01"] < 1e-3
    assert "actor/entropy" not in step and "router/agreement" not in step, "compute_log_prob does not run"
    assert not any("first_pass" in name for name in step)


def test_every_other_batch_is_measured_in_blocks(switching_run):
    blocks = dict(re.findall(r"switching: step (\d+) is measured in (\d+) block", switching_run.console))
    assert blocks
    assert all((int(number) > 1) == (int(step) % 2 == 0) for step, number in blocks.items())


def test_every_metric_of_every_method_is_documented(step_of, switching_run):
    assert_documented(switching_run)


def test_a_tools_output_stands_between_two_turns_and_is_not_measured(step_of):
    step = step_of(*ICEPOP)
    # 4: the prompt, a turn, the tool, another turn. 2: no call.
    assert step["training/num_turns/max"] == 4
    calls = TRAJECTORIES * (step["training/num_turns/mean"] - 2) / 2
    assert calls > TRAJECTORIES / 2
    assert step["router/tokens"] == pytest.approx(TRAJECTORIES * step["response_length/mean"] - calls * TOOL_TOKENS)
    assert step["vllm_kl/share/turn/00"] + step["vllm_kl/share/turn/01"] == pytest.approx(1)
    for turn in ("00", "01"):
        assert 0 < step[f"vllm_kl/k3/turn/{turn}"] < 1e-3
    assert 0.9 < step["router/agreement"] < step["router/checked"] == 1
    # Every token of both turns has the top tokens of its own call.
    assert step["vllm_kl/head_missing"] == 0 and 0 < step["vllm_kl/head"] < 1e-3


@pytest.mark.parametrize("engine", ["fsdp2", "sglang"], indirect=True)  # the rollout's part, of vLLM and of SGLang
def test_a_second_turn_brings_the_ids_of_its_own_tokens_alone(switching_run):
    """The second turn brings ids from the last token of the first turn on, which had not been forwarded, except where
    the loop cuts that turn."""
    turns = re.findall(r"turn_routes: (\d+) rows were held and (\d+) came, after (\d+) tokens", switching_run.console)
    assert len(turns) > TRAJECTORIES
    assert all(0 < int(held) < int(tokens) and int(came) > 0 for held, came, tokens in turns)
    assert any(int(held) == int(tokens) - 1 for held, _, tokens in turns)


def test_workers_are_sent_no_columns_of_the_dataset(switching_run):
    updates = re.findall(r"switching: there is (.*); sent is (.*)", switching_run.console)
    assert updates
    for there, sent in ([set(names.split()) for names in found] for found in updates):
        assert {"uid", "raw_prompt", "data_source", "extra_fields", "tools_kwargs"} <= there - sent
        assert {"input_ids", "prompts", "responses", "response_mask", "multi_modal_inputs"} <= sent < there
        assert ("old_log_probs" in sent) == ("old_log_probs" in there)  # not if log-probs are reused
    assert any("old_log_probs" in sent for _, sent in updates)


@ON_FSDP2
@pytest.mark.parametrize(
    ("entry", "low", "high"),
    [
        (("stability=icepop", *NARROW), "icepop", "icepop"),
        (TIS, None, "tis"),
        (TIS_SEQUENCE, None, "tis_sequence"),
        (KPOP, "kpop", "kpop"),
        (IPO, "ipo", "ipo"),
        (MIS, None, "mis"),
        (GEO_MASK, "geo_mask", "geo_mask"),
        (SEQ_MASK_TIS, "geo_mask", "geo_mask"),
    ],
)
def test_corrections_act_on_the_sides_they_have(step_of, entry, low, high):
    step = step_of(*entry)
    for side, name in (("low", low), ("high", high)):
        if name is not None:
            assert 0 < step[f"correction/{name}/{side}"] < 1
    truncates = high.startswith("tis")
    assert (step["correction/dropped"] == 0) is truncates
    assert step["correction/weight_mean"] < 1.01
    if not truncates:
        dropped = step["correction/dropped_low"] + step["correction/dropped_high"]
        assert step["correction/dropped"] == pytest.approx(dropped)


@ON_FSDP2
def test_denominator_kept_divides_by_what_is_kept(step_of):
    full = step_of("stability=icepop", *NARROW)
    kept = step_of("stability=icepop", *NARROW, "stability.denominator=kept")
    assert kept["filter/kept_tokens"] == pytest.approx(1 - kept["correction/dropped"])
    # The gradient of a mean over the tokens left is so many times larger; the two steps have other batches.
    assert kept["actor/grad_norm"] > full["actor/grad_norm"] / kept["filter/kept_tokens"] / 4
    assert kept["filter/kept_tokens"] < 0.8


@ON_FSDP2
def test_opsm_drops_inside_the_update_and_splits_its_gap(step_of):
    for entry in (("stability=opsm", "stability.opsm.delta=0.0"), ("stability=opsm_loss", f"{LOSS}.delta=0.0")):
        step = step_of(*entry)
        assert 0 < step["actor/opsm/dropped"] < 1
        assert step["actor/opsm/mismatch"] != 0
        assert step["actor/opsm/staleness"] != 0, "the second update is one behind"


@ON_FSDP2
def test_m2po_and_verls_dppo_act_in_the_update(step_of):
    m2po, dppo = step_of(*M2PO), step_of(*DPPO)
    assert 0 < m2po["actor/m2po/dropped"] < 1 and m2po["actor/m2po/second_moment"] > 1e-8
    assert "actor/pg_clipfrac" in dppo and "actor/entropy" not in dppo, "bypass mode"
    assert m2po["actor/grad_norm"] > 0 and dppo["actor/grad_norm"] > 0


@runs_with(GATED)
def test_the_gate_refuses_the_second_mini_batch_which_is_off_policy(step_of):
    step = step_of(*GATED)
    assert step["actor/gate/refused"] == 0.5
    assert step["actor/gate/policy_kl"] > 2e-5 / 2 and 0 < step["actor/gate/vllm_kl"] < 1


@runs_with(COMPOSED)
def test_corrections_compose_with_opsm(step_of):
    step = step_of(*COMPOSED)
    assert {"correction/icepop/low", "correction/geo_mask/low", "actor/opsm/dropped"} <= step.keys()
    assert step["correction/dropped"] > 0
    assert step["actor/opsm/dropped"] > 0


@runs_with(ICEPOP_LOSS)
def test_our_losses_report_what_they_did(step_of):
    step = step_of(*ICEPOP_LOSS)
    assert 0 < step["actor/icepop/dropped_low"] < 1 and 0 < step["actor/icepop/dropped_high"] < 1


@ON_FSDP2
def test_llds_penalises_some_tokens(step_of):
    assert 0 < step_of("stability=llds_loss")["actor/llds/penalised"] < 1


@ON_FSDP2
def test_estimators_are_verls_to_call(step_of):
    # Nothing is below 0 once the negative side is dropped; QAE's baseline is a reward of the group.
    assert step_of("stability=grpo_positive")["critic/advantages/min"] == 0
    assert step_of("stability=qae")["critic/advantages/max"] > 0


@runs_with(FILTERS)
def test_filters_run_in_order_and_name_an_example(step_of, switching_run):
    step = step_of(*FILTERS)
    order = [name.split("/")[1] for name in step if name.startswith("filter/") and name.endswith("/dropped_tokens")]
    assert order == list(OmegaConf.load(ROOT / "configs" / "stability" / "filters.yaml").filters)
    dropped = {name: step[f"filter/{name}/dropped_tokens"] for name in order}
    assert step["filter/kept_tokens"] == pytest.approx(1 - sum(dropped.values()))
    assert 0.1 < dropped["low_probability"] < 0.9
    assert step.get("actor/filter_scale", 1) == pytest.approx(1 / step["filter/kept_trajectories"])
    assert "filter low_probability dropped tokens of " in switching_run.console


@runs_with(LOW_AGREEMENT)
def test_low_agreement_drops_tokens_whose_routing_differs(engine, step_of):
    step = step_of(*LOW_AGREEMENT)
    # Every token with a layer that differs: some 5 % with vLLM, twice as many with SGLang.
    assert 0 < step["filter/low_agreement/dropped_tokens"] < (0.4 if engine == "sglang" else 0.2)


@runs_with(NOTHING_LEFT)
def test_a_batch_of_which_filters_leave_nothing_is_skipped_with_the_reason(step_of, switching_run):
    step = step_of(*NOTHING_LEFT)
    assert step["guard/skipped"] == 1
    assert "actor/grad_norm" not in step
    assert "update skipped: no token is left: low_probability dropped 100%" in switching_run.console
