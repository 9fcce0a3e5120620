"""`verl-ext plan --nodes 8,32,128`: a run at several sizes."""

import json

import pytest

from tools.plan_page import RECIPES, WITH_AGREEMENT, plans
from verl_ext.cli import main
from verl_ext.plan.command import advice_lines
from verl_ext.plan.costs import AGREEMENT, UNITS_A_NODE
from verl_ext.plan.scale import SMALL_SHARE, WORTH, at_nodes, read_plan, units_line
from verl_ext.plan.sizes import UNITS, WORKERS, read_sizes

RECIPE = "recipe=qwen3_30b_a3b"
ASKED = (RECIPE, *WITH_AGREEMENT)

CHANGES = {
    "stability.router_agreement_share": lambda value: {"agreement_share": float(value)},
    "stability.breakdown": lambda value: {"signs": value == "true", "splits": value == "true"},
    UNITS: lambda value: {"units": int(value)},
}


@pytest.fixture(scope="module")
def found():
    """Model -> its plans at the page's sizes, with router agreement."""
    return {model: plans(recipe, WITH_AGREEMENT) for model, recipe in RECIPES.items()}


def test_agreement_on_a_share_of_the_trajectories_is_below_half_a_percent_of_a_step(found):
    for sizes in found.values():
        for plan in sizes:
            few = plan.with_usage(units=UNITS_A_NODE * plan.sizes.nodes, agreement_share=SMALL_SHARE)
            assert 0 < few.seconds_of(AGREEMENT) / few.step < 0.005
            assert few.seconds_of(AGREEMENT) < plan.with_usage(units=few.usage.units).seconds_of(AGREEMENT)


def test_what_helps_is_worth_it_and_each_setting_stands_on_those_before(found):
    for sizes in found.values():
        for plan in sizes:
            now = plan
            for remedy in plan.remedies():
                assert remedy.seconds <= (1 - WORTH) * now.seconds
                name, _, value = remedy.setting.partition("=")
                assert name != UNITS or int(value) == now.units_wanted
                now = now.with_usage(**CHANGES[name](value))
                assert remedy.seconds == pytest.approx(now.seconds)
            assert now.seconds < plan.seconds


def test_no_saving_gives_up_a_protection():
    for plan in plans(RECIPES["235B"]):  # more than half of the cost is the replay's
        assert plan.with_usage(replay="disabled").seconds < plan.seconds
        assert {remedy.setting.partition("=")[0] for remedy in plan.remedies()} <= {*CHANGES, WORKERS}


def test_a_batch_that_grows_keeps_the_trajectories_a_gpu(compose):
    config = compose(RECIPE)
    same = read_sizes(at_nodes(config, 8, scale_batch=False), "H100", 8)
    more = read_sizes(at_nodes(config, 8, scale_batch=True), "H100", 8)
    now = read_sizes(config, "H100")
    assert (now.gpus, now.sequences) == (16, 8192)
    assert (same.gpus, same.sequences) == (64, 8192)
    assert (more.gpus, more.sequences) == (64, 4 * 8192)
    assert at_nodes(config, 8, scale_batch=True).actor_rollout_ref.actor.ppo_mini_batch_size == 4 * 128
    assert config.data.train_batch_size == 512, "the config that was given stays"


def test_the_number_of_storage_units_is_told_where_it_is_low(compose):
    config = compose(*ASKED)
    plan = read_plan(config, "H100", 8)
    assert (plan.sizes.nodes, plan.usage.units) == (8, 8) and plan.units_wanted >= 16
    line = units_line(plan)
    assert f"{UNITS}=8 is low for 8 machines" in line and line.endswith(f"set it to {plan.units_wanted}")
    assert units_line(plan.with_usage(units=plan.units_wanted)) == ""
    assert units_line(plan.with_usage(simple=False)) == ""
    full = plan.with_usage(has_top_tokens=True, top_tokens=4096)
    assert "transfers would wait for them" in units_line(full) and full.units_wanted > plan.units_wanted


def test_the_share_that_is_set_counts(compose):
    whole = read_plan(compose(*ASKED), "H100")
    few = read_plan(compose(*ASKED, "stability.router_agreement_share=0.05"), "H100")
    assert few.usage.agreement_share == 0.05
    assert few.seconds_of(AGREEMENT) < whole.seconds_of(AGREEMENT)


def test_several_sizes_are_a_table_and_one_object_each(capsys):
    sizes = ["--nodes", "2,8", *ASKED]
    assert main(["plan", *sizes]) == 0
    printed = capsys.readouterr().out
    assert "│ 16 " in printed and "│ 64 " in printed and "training ranks" not in printed.splitlines()[0]
    assert "64 GPUs: the plugin costs less with stability.router_agreement_share=0.05: " in printed
    assert f"64 GPUs: {UNITS}=8 is low for 8 machines" in printed
    assert main(["plan", "--json", *sizes]) == 0
    small, large = json.loads(capsys.readouterr().out)
    assert (small["sizes"]["gpus"], large["sizes"]["gpus"]) == (16, 64)
    assert large["storage_units"]["has"] == 8 and large["storage_units"]["wanted"] >= 16
    on = [cost for cost in large["features"] if cost["on"]]
    assert large["plugin"]["seconds"] == pytest.approx(sum(cost["seconds"] - cost["hidden"] for cost in on))
    assert large["plugin"]["share"] == pytest.approx(large["plugin"]["seconds"] / sum(large["seconds"].values()))


def test_a_size_that_does_not_fit_is_said_in_its_row_and_why_under_the_table(capsys):
    assert main(["plan", "--nodes", "1,8", *ASKED, "--gpu", "L20"]) == 1
    printed = capsys.readouterr().out
    assert "│ does not fit │" in printed and "\n8 GPUs: does not fit: the update needs " in printed


def test_without_the_plugin_the_table_of_sizes_is_of_the_step_alone(capsys):
    assert main(["plan", "--nodes", "8,128", RECIPE]) == 0
    printed = capsys.readouterr().out
    assert "┃ GPUs  ┃ step, s ┃\n" in printed and "costs less" not in printed and "no feature of the plugin" in printed
    assert main(["plan", "--nodes", "8,128", RECIPE, "stability=icepop"]) == 0
    printed = capsys.readouterr().out
    assert "plugin, s" in printed and "router agreement" not in printed


def test_storage_units_are_named_once(found):
    for sizes in found.values():
        for plan in sizes:
            assert sum(UNITS in line for line in advice_lines(plan)) == 1


@pytest.mark.parametrize("recipe", ["gpt_oss_20b", "qwen3_next_80b_a3b", "qwen3_30b_a3b"])
def test_without_compute_log_prob_a_step_is_shorter_by_a_forward_pass(compose, recipe):
    one_step = "data.train_batch_size=${actor_rollout_ref.actor.ppo_mini_batch_size}"
    asked = (f"recipe={recipe}", "stability=icepop", one_step)
    two, one = (read_plan(compose(*asked, f"stability.reuse_log_probs={on}"), "H100") for on in ("off", "on"))
    forward = two.timing.stages["old log-probs"]
    assert "old log-probs" not in one.timing.stages and two.step - one.step == pytest.approx(forward)
    assert forward == pytest.approx(two.timing.stages["update"] / 4)
