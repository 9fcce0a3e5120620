"""The table of names: other frameworks' formulas and signs against ours, families, and what no table may have."""

import shlex
from collections import Counter

import numpy as np
import pytest
import torch

from tests import ROOT
from verl_ext.base.metrics import OURS, find, ours
from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens
from verl_ext.diagnosis.names import (
    EVERYTHING,
    K1,
    LOG_RATIO,
    PROB_DIFF,
    REWARD,
    TABLE,
    Alias,
    aliases_of,
    by_quantity,
    combined,
    quantities,
    quantity_of,
    read_table,
    setting_for,
    tomllib,
    unread_names,
)
from verl_ext.features.stability import stability_config

LOGGED = (ROOT / "tests" / "unit" / "base" / "logged_metrics.txt").read_text().split()  # by runs of tests/stack


def alias_of(logged_name: str) -> Alias:
    return next(alias for alias in aliases_of(quantity_of(logged_name).name) if alias.matches(logged_name))


# ----------------------------------------------------------------------------------------- formulas of other frameworks


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, np.ndarray]:
    """l_infer and l_old, [responses, tokens]: the rollout is sure of its tokens. All responses are of one length, so
    that it does not matter whether a mean is over tokens or over responses."""
    random = np.random.default_rng(0)
    infer = -random.exponential(size=(6, 50))
    return infer, infer + 0.3 * random.normal(size=infer.shape) - 0.1


@pytest.fixture(scope="module")
def measured(batch) -> dict[str, float]:
    """The quantities of the batch under their canonical names, measured by our code and by the installed verl's."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    infer, old = map(torch.tensor, batch)
    mask = torch.ones_like(infer, dtype=torch.bool)
    data = {"rollout_log_probs": infer, "old_log_probs": old, "response_mask": mask, "responses": mask}
    verls = {f"rollout_corr/{name}": value for name, value in compute_offpolicy_metrics(old, infer, mask).items()}
    verls |= calculate_debug_metrics(DataProto.from_dict(data))
    ours = measure(Tokens.from_padded(infer, old, mask)).metrics
    k1, k3 = (old - infer).neg().mean().item(), ((old - infer).expm1() - (old - infer)).mean().item()
    return verls | ours | {"offpolicy/ratio/mean": 1 + k3 - k1}


def prime_rl_mismatch_kl(infer, old):  # src/prime_rl/trainer/rl/loss.py
    log_importance_ratio = old - infer
    return (np.exp(log_importance_ratio) - log_importance_ratio - 1).mean()


def nemo_gen_kl_error(infer, old):  # nemo_rl/algorithms/loss/loss_functions.py, utils.py calculate_kl(infer, old, "k3")
    logr = old - infer
    return (np.exp(logr) - 1 - logr).mean()


def miles_train_rollout_kl(infer, old):  # loss_hub/math_utils.py compute_approx_kl(infer, old, "low_var_kl")
    log_ratio = -(infer - old)
    return np.clip(np.exp(log_ratio) - 1 - log_ratio, -10, 10).mean()


FORMULAS = {
    "mismatch_kl/all/mean": prime_rl_mismatch_kl,
    "mismatch_kl/mean": prime_rl_mismatch_kl,
    "train/gen_kl_error": nemo_gen_kl_error,
    "train/train_rollout_kl": miles_train_rollout_kl,
    # rllm/trainer/fireworks/fireworks_policy_trainer.py
    "offpolicy/kl": lambda infer, old: (infer - old).mean(),
    "offpolicy/k3_kl": lambda infer, old: (np.exp(old - infer) - (old - infer) - 1).mean(),
    "offpolicy/logprob_abs_diff/mean": lambda infer, old: np.abs(old - infer).mean(),
    "offpolicy/logprob_abs_diff/max": lambda infer, old: np.abs(old - infer).max(),
    "offpolicy/prob_abs_diff/mean": lambda infer, old: np.abs(np.exp(old) - np.exp(infer)).mean(),
    "offpolicy/prob_abs_diff/max": lambda infer, old: np.abs(np.exp(old) - np.exp(infer)).max(),
    "offpolicy/training_ppl": lambda infer, old: np.exp(-old.mean(1)).mean(),
    "offpolicy/rollout_log_ppl": lambda infer, old: -infer.mean(1).mean(),
    "offpolicy/log_ppl_diff": lambda infer, old: (infer.mean(1) - old.mean(1)).mean(),
    "offpolicy/log_ppl_abs_diff": lambda infer, old: np.abs(infer.mean(1) - old.mean(1)).mean(),
    "offpolicy/ppl_ratio": lambda infer, old: np.exp(infer.mean(1) - old.mean(1)).mean(),
    "offpolicy/ratio/mean": lambda infer, old: np.exp(old - infer).mean(),
    "offpolicy/prob_pearson_corr": lambda infer, old: np.corrcoef(np.exp(old).ravel(), np.exp(infer).ravel())[0, 1],
    "offpolicy/chi2_token": lambda infer, old: (np.exp(old - infer) ** 2).mean() - 1,
    # rllm/trainer/tinker/tinker_metrics_utils.py takes the absolute value; tinker_cookbook/rl/metrics.py does not
    "train/kl_sample_train_v1": lambda infer, old: np.abs(infer - old).mean(),
    "optim/kl_sample_train_v1": lambda infer, old: (infer - old).mean(),
    # trl/trainer/grpo_trainer.py
    "sampling/sampling_logp_difference/mean": lambda infer, old: np.abs(old - infer).mean(),
    "sampling/sampling_logp_difference/max": lambda infer, old: np.abs(old - infer).max(),
    # slime/backends/megatron_utils/loss.py, slime/observability/train_metric_utils.py: sum_of_sample_mean
    "train/train_rollout_logprob_abs_diff": lambda infer, old: np.abs(old - infer).mean(1).mean(),
    "train/tis": lambda infer, old: np.exp(old - infer).mean(1).mean(),
    "rollout/log_probs": lambda infer, old: old.mean(1).mean(),
    "rollout/rollout_log_probs": lambda infer, old: infer.mean(1).mean(),
    # examples/train_infer_mismatch_helper/mis.py
    "train/mis_kl": lambda infer, old: (infer - old).mean(),
    "train/mis_log_ppl_diff": lambda infer, old: (infer.mean(1) - old.mean(1)).mean(),
    # swift/rlhf_trainers/grpo_trainer.py
    "rollout_correction/kl": lambda infer, old: -(old - infer).mean(),
    "rollout_correction/training_log_ppl": lambda infer, old: (-old.mean(1)).mean(),
    # areal/utils/functional/functional.py: behave_approx_kl = proximal_logprobs - old_logprobs (the rollout's)
    "ppo_actor/update/behave_approx_kl/avg": lambda infer, old: (old - infer).mean(),
    # openrlhf/models/loss.py; skyrl/train/trainer.py and off_policy_correction_utils.py
    "train/vllm_kl": lambda infer, old: (infer - old).mean(),
    "policy/rollout_train_logprobs_abs_diff_mean": lambda infer, old: np.abs(infer - old).mean(),
    "policy/loss_metrics/is_ratio_mean": lambda infer, old: np.exp(old - infer).mean(),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_metric_of_another_framework_is_our_number(batch, measured, name):
    logged = np.array([FORMULAS[name](*batch)])
    assert alias_of(name).convert(logged) == pytest.approx(measured[quantity_of(name).name], rel=2e-5)


def test_verls_own_metrics_are_our_numbers(measured):
    """The installed verl logs some quantities that we log too."""
    twice = {name: quantity_of(name).name for name in measured if quantity_of(name)}
    twice = {name: canonical for name, canonical in twice.items() if name != canonical}
    assert len(twice) >= 7 and {"rollout_corr/chi2_token", "rollout_corr/log_ppl_abs_diff"} <= twice.keys()
    for name, canonical in twice.items():
        slack = 2e-3 if name.endswith("_std") else 2e-5  # verl's divides by n - 1
        assert alias_of(name).convert(measured[name]) == pytest.approx(measured[canonical], rel=slack), name


def test_what_is_signed_says_that_this_rollout_is_the_surer_engine(batch):
    infer, old = batch
    for name in ("vllm_kl/k1", "rollout_corr/log_ppl_diff"):
        signed = [alias.name for alias in aliases_of(name) if alias.name in FORMULAS]
        assert len(signed) >= 2
        assert all(alias_of(each).convert(FORMULAS[each](infer, old)) > 0 for each in signed)
    assert alias_of("ppo_actor/update/behave_approx_kl/avg").convert((old - infer).mean()) > 0
    training, rollout = (
        alias_of(name).convert(FORMULAS[name](infer, old))
        for name in ("rollout/log_probs", "rollout/rollout_log_probs")
    )
    assert training > rollout > 0  # log perplexities


def test_the_policys_own_movement_has_one_sign():
    """actor/ppo_kl is the mean of l_old - l_theta (verl's core_algos.py, slime's and OpenRLHF's loss.py)."""
    old = np.log(np.array([0.5, 0.2, 0.7]))
    theta = old - 0.1
    for name, logged in (
        # slime, miles: old_log_probs - log_probs; OpenRLHF: -(log_probs - old_log_probs)
        ("train/ppo_kl", old - theta),
        ("ppo_actor/update/approx_kl/avg", theta - old),  # AReaL: logprobs - proximal_logprobs
    ):
        assert quantity_of(name).name == "actor/ppo_kl"
        assert alias_of(name).convert(logged).mean() == pytest.approx(0.1)


def test_the_estimates_of_the_entropy_have_it_as_their_expectation():
    random = np.random.default_rng(1)
    infer, current = (np.log(random.dirichlet(np.ones(20), size=30)) for _ in range(2))

    def expectation(of_token):  # over the tokens that the rollout samples
        return (np.exp(infer) * of_token).sum(1).mean()

    nemo = expectation(-np.exp(current - infer) * current)  # loss_functions.py: approx_entropy
    assert nemo == pytest.approx(-(np.exp(current) * current).sum(1).mean())
    tinker = expectation(-infer)  # tinker_cookbook/rl/metrics.py: optim/entropy
    assert tinker == pytest.approx(-(np.exp(infer) * infer).sum(1).mean())
    assert {quantity_of(name).name for name in ("train/approx_entropy", "optim/entropy")} == {"actor/entropy"}


def test_a_share_of_groups_with_a_signal_becomes_the_share_without():
    rewards = np.array([[0, 0], [1, 1], [0, 1], [0, 0]])
    without = np.isclose(rewards.std(1), 0).mean()  # TRL: frac_reward_zero_std
    none, every = (rewards.sum(1) == 0).mean(), (rewards == 1).all(1).mean()
    for name, logged in (
        ("frac_reward_zero_std", without),
        ("batch/default/fractions/effective", (rewards.std(1) >= 1e-8).mean()),
        ("effective_batch_size/all", 1 - none - every),
        ("train/agg/all/policy/solved_some", 1 - (none + every)),
    ):
        assert quantity_of(name).name == "filter/zero_variance/dropped_trajectories"
        assert alias_of(name).convert(np.array([logged])) == pytest.approx(0.75)


# ----------------------------------------------------------------------------------------------------- looking up names

VALIDATION = "val-core/**/mean@*"


@pytest.mark.parametrize(
    ("logged_name", "canonical"),
    [
        ("vllm_kl/k3", "vllm_kl/k3"),
        ("actor/entropy_loss", "actor/entropy"),
        ("val-core/openai/gsm8k/reward/mean@1", VALIDATION),
        ("val-core/math_dapo/acc/maj@32/mean", VALIDATION),
        ("val-core/math_dapo/acc/best@32/std", None),
        ("val-aux/math_dapo/acc/std@32", None),
        ("val/test_score/openai/gsm8k", VALIDATION),
        ("test_score/openai/gsm8k", VALIDATION),
        ("val/nq/test_score", VALIDATION),
        ("val/nq_success_rate", VALIDATION),
        ("val/nq/tool_call_count/mean", None),
        ("eval/aime24", VALIDATION),  # slime
        ("eval/math-500", VALIDATION),
        ("eval/aime24-truncated_ratio", None),
        ("eval/aime24-pass@8", None),
        ("eval/aime24/response_len/mean", None),
        ("eval/step", None),
        ("eval/reward", VALIDATION),  # TRL
        ("eval/loss", None),
        ("eval/kl", None),
        ("eval/all/avg_score", VALIDATION),  # SkyRL
        ("eval/aime2024/avg@16", VALIDATION),  # prime-rl
        ("eval/aime2024/effective/policy/avg@16", VALIDATION),
        ("eval/eval_math_pass1", VALIDATION),  # OpenRLHF
        ("eval/eval_math_response_length_mean", None),
        ("val/countdown/pass@1", VALIDATION),  # rllm
        ("train/agg/effective/reward/mean", "critic/score/mean"),  # prime-rl 0.7
        ("train/agg/effective/policy/reward/mean", "critic/score/mean"),  # prime-rl, main
        ("train/agg/effective/policy/rewards/format/mean", None),
        ("reward/solver/mean", "critic/score/mean"),  # rllm
        ("reward/all/max", None),  # prime-rl: of the groups' means
        ("rewards/accuracy_reward/mean", None),  # TRL: one of several
        ("rollout/rewards", "rollout/rewards"),  # slime: centred
        ("rollout/raw_reward", "critic/score/mean"),
        ("train/reward", "critic/score/mean"),
        ("train/completions/mean_length", "response_length/mean"),
        ("grpo_actor/task_reward/avg", "critic/score/mean"),
        ("ppo_actor/update/entropy/avg", "actor/entropy"),
        ("train/ess_ratio", None),  # miles: of the policy's ratio
        ("train/tis_abs", None),  # slime: mean |k - 1|
        ("policy_kl_error", None),  # NeMo-RL: the other direction
        ("sampling/importance_sampling_ratio/max", "correction/weight_max"),
        ("rollout_correction/chi2_seq", None),  # ms-swift: of the geometric mean, unlike verl's
        ("actor/rollout_corr/k3_kl", "actor/gate/vllm_kl"),  # verl's bypass mode: against l_theta
        ("rollout/tito_session_mismatch_rate/v1", "filter/retokenization_drift/drifted"),
        ("rollout/tito_session_mismatch_rate/v1/assistant_text", None),
        ("mismatch_kl", "vllm_kl/k3"),  # the console of prime-rl
        ("something", None),
        ("Mismatch KL", "vllm_kl/k3"),  # in any spelling
        ("mismatch-kl", "vllm_kl/k3"),
        ("Reward", REWARD),
        ("Train/Reward", REWARD),
        ("completions / mean_length", "response_length/mean"),
        ("seq_len (tok/sample)", "seq_len/mean"),
        ("Val-Core/GSM8K/acc/mean@1", VALIDATION),
        ("grpo_actor/behave_approx_kl/avg", K1),  # AReaL, with and without update/
        ("Rewarding", None),
    ],
)
def test_a_logged_name_is_looked_up(logged_name, canonical):
    found = quantity_of(logged_name)
    assert (found and found.name) == canonical
    if found:
        assert sum(alias.matches(logged_name) for alias in found.aliases) >= 1


def test_preference_goes_from_the_canonical_name_to_the_rest():
    names = [alias.name for alias in aliases_of("critic/score/mean")]
    assert names[:2] == ["critic/score/mean", "critic/rewards/mean"]
    assert names.index("train/agg/effective/{reward,*/reward}/mean") < names.index("reward/*/mean")
    assert all(quantity.aliases[0].name == quantity.name for quantity in quantities())


def test_a_metric_outside_the_table_has_its_own_name_and_setting():
    assert aliases_of("router/own_agreement") == (Alias("router/own_agreement"),)
    assert aliases_of("rollout_corr/kl") == (Alias("rollout_corr/kl"),)  # an alias is not canonical
    assert setting_for("router/own_agreement") == ours.ROUTING.override
    assert quantity_of("router/own_agreement") is None


def test_the_series_of_the_run_is_one_that_most_steps_have():
    """A printed sample's reward has the run's name. It comes now and then, or next to the mean of each step."""
    often, seldom = np.full(40, 0.5), np.ones(4)
    assert [*by_quantity({"Reward": seldom, "Avg Reward": often})[REWARD]] == ["Avg Reward", "Reward"]
    assert [*by_quantity({"Reward": often, "Avg Reward": often})[REWARD]] == ["Avg Reward", "Reward"]


@pytest.mark.parametrize(
    ("names", "reward"),
    [
        (["train_avg_reward", "val_avg_reward", "loss"], "train_avg_reward"),
        (["Percentage of correct examples"], "Percentage of correct examples"),
        (["rollout/reward_mean/all", "train/accuracy"], "rollout/reward_mean/all"),
        (["mean_return", "reward"], "reward"),
        (["train_accuracy", "mean_success"], None),  # one of two
        (["train_reward", "rollout_reward_avg"], None),
        (["accuracy"], None),  # of a preference, or of a classifier
        (["max_train_reward", "sample_reward", "eval_avg_score", "rewards/format/mean"], None),
    ],
)
def test_a_reward_is_known_by_its_words_if_it_is_the_only_one(names, reward):
    often = dict.fromkeys(names, np.full(40, 0.5))
    assert next(iter(by_quantity(often).get(REWARD, [None]))) == reward
    seldom = often | {"loss": np.full(400, 0.5)}
    assert (REWARD in by_quantity(seldom)) == (reward == "reward"), "it is logged at few of the steps"
    assert "train_accuracy" in unread_names(["train_accuracy", "reward"])


@pytest.mark.parametrize(("values", "canonical", "read"), [(0.003, PROB_DIFF, 0.003), (1.0002, K1, 0.0002)])
def test_the_values_decide_what_a_name_of_two_meanings_is(values, canonical, read):
    ((found, names),) = by_quantity({"rollout_train_prob_diff_mean": np.full(9, values)}).items()
    (alias,) = names.values()
    assert found == canonical and alias.convert(values) == pytest.approx(read)
    assert [*by_quantity({"rollout_train_prob_diff_mean": np.full(9, 5e8)})] == ["rollout_train_prob_diff_mean"]


def test_an_error_as_a_factor_is_read_as_a_mean_log_ratio(batch):
    infer, old = batch
    factor = np.exp(np.abs(old - infer)).mean()  # nemo_rl/algorithms/loss/loss_functions.py
    assert quantity_of("train/token_mult_prob_error").name == LOG_RATIO
    size = np.abs(old - infer).mean()
    assert size < alias_of("train/token_mult_prob_error").convert(factor) < 1.2 * size
    assert np.isnan(alias_of("token_mult_prob_error").convert(np.array([-1.0, np.nan]))).all()


def test_a_difference_of_two_metrics_is_in_the_table(batch):
    infer, old = batch
    means = {"rollout/rollout_log_probs": infer.mean(1).mean(), "rollout/log_probs": old.mean(1).mean()}
    ((name, first, _, second),) = (each for each in combined() if each[2] == "-")
    assert quantity_of(name).name == K1 and means.keys() == {first, second}
    assert alias_of(name).convert(means[first] - means[second]) == pytest.approx((infer - old).mean())


def test_names_that_look_as_if_they_mattered():
    read = ["reward", "vllm_vs_local_logprob_diff_mean", "actor/kl_coef", "timing_s/step", "lr", "rewards/format/mean"]
    read += ["format_reward_avg", "n_scored", "grad_clip"]
    assert unread_names([*read, "my_logprob_gap", "my_kl", "nan_count"]) == ["my_logprob_gap", "my_kl", "nan_count"]


# ------------------------------------------------------------------------------------------------- the table as a whole


def exact_names():
    return [alias.name for quantity in quantities() for alias in quantity.aliases if not alias.is_family]


def test_a_name_belongs_to_one_quantity():
    twice = {name for name, count in Counter(exact_names()).items() if count > 1}
    aliases = [alias for quantity in quantities() for alias in quantity.aliases if alias.name in twice]
    assert all(alias.range != EVERYTHING for alias in aliases), "unless their values decide"
    for name in set(exact_names()) - twice:
        families = {
            quantity.name
            for quantity in quantities()
            for alias in quantity.aliases
            if alias.is_family and alias.matches(name)
        }
        assert families <= {quantity_of(name).name}, name


def test_our_own_metrics_are_canonical():
    known = [name for name in LOGGED if name.startswith(OURS) and quantity_of(name)]
    assert len(known) > 10
    assert [name for name in known if quantity_of(name).name != name] == []


def test_a_quantity_of_ours_is_in_the_table_of_metrics_and_has_a_setting():
    for quantity in quantities():
        if quantity.name.startswith(OURS):
            assert find(quantity.name) and setting_for(quantity.name), quantity.name


@pytest.mark.parametrize("setting", sorted({setting_for(quantity.name) for quantity in quantities()} - {""}))
def test_a_setting_composes_with_the_real_config(compose, setting):
    stability_config(compose("recipe=cpu_smoke", *shlex.split(setting)).stability)


def test_an_alias_has_one_conversion_and_no_unknown_key():
    """TOML itself refuses an alias that is written twice, but not one that a prefix makes again."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    prefixes = table.pop("prefixes")
    for name, entry in table.items():
        found: dict[str, tuple] = {}
        for written, value in entry.items():
            if written == "setting":
                continue
            alias = {"in": value} if isinstance(value, str) else value
            assert "in" in alias and alias.keys() <= {"in", "scale", "offset", "log", "range", "but", "not_with"}, (
                name,
                written,
            )
            conversion = (alias.get("scale", 1), alias.get("offset", 0), alias.get("log", False))
            for framework in alias["in"].split(", "):
                for prefix in prefixes.get(framework, [""]):
                    assert found.setdefault(prefix + written, conversion) == conversion, (name, written)


def test_an_alias_has_the_prefixes_of_its_frameworks():
    table = '[prefixes]\nTRL = ["", "train/"]\n["a/b"]\nsetting = "c=1"\n"x" = "TRL"\n"y" = {in = "SkyRL", scale = -1}'
    (quantity,) = read_table(table)
    assert [alias.name for alias in quantity.aliases] == ["a/b", "x", "train/x", "y"]
    assert (quantity.setting, [alias.scale for alias in quantity.aliases]) == ("c=1", [1, 1, 1, -1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clipped_ratio", "answers/cut"),  # TRL's, as people write it in a table
        ("mean_length", "response_length/mean"),
        ("Mean KL", "actor/kl_loss"),
        ("num_tokens", "num_tokens"),  # of the whole run
        ("length_std", "length_std"),
        ("ratio", "ratio"),
        ("groups_total", "groups_total"),  # of a ratio in the table
        ("dropped_trajectories", "dropped_trajectories"),  # a count, not our share
        ("effective_batch_size", "effective_batch_size"),
    ],
)
def test_the_end_of_a_known_name_is_known_beside_another_known_name(name, expected):
    series = [0.5, 0.5]
    assert expected in by_quantity({name: series, "grad_norm": series})
    assert name in by_quantity({name: series, "what": series})  # alone, it may be anything's
    exact = "completions/clipped_ratio"
    assert by_quantity({exact: series, "clipped_ratio": series, "grad_norm": series})["clipped_ratio"]
