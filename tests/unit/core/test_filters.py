"""Each filter against a count in plain Python over ragged trajectories, and several filters in a row."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import verl_ext.core.filters  # noqa: F401 (registers them)
from tests.support.filter_oracles import (
    EOS,
    low_agreement_tokens,
    low_probability_tokens,
    make_batch,
    off_policy_negative_tokens,
    overlong_rows,
)
from verl_ext.base.errors import BatchError, ConfigError
from verl_ext.core.filters import apply_filters, get_batch_filter, merge_tallies
from verl_ext.core.tokens import Lag


def keep(name, batch, **settings):
    found = get_batch_filter(name).function(batch, **settings)
    return (found if isinstance(found, torch.Tensor) else found.keep_N).tolist()


def kept_rows(name, batch, **settings):
    """Returns the trajectories that kept all their tokens; a filter of whole trajectories keeps all of them or none."""
    rows = [part.tolist() for part in torch.tensor(keep(name, batch, **settings)).split(lengths(batch))]
    assert all(len(set(row)) <= 1 for row in rows)
    return [all(row) for row in rows]


def lengths(batch):
    return batch.tokens.offsets.diff().tolist()


NUMBERS = st.sampled_from([-3.0, -1.0, -0.5, -0.25, 0.0])  # sums of these are exact
TOKEN = st.fixed_dictionaries(
    {
        "id": st.sampled_from([EOS, 5, 6]),
        "m": st.integers(0, 1),
        "infer": NUMBERS,
        "old": NUMBERS,
        "advantage": st.sampled_from([-1.0, 0.0, 1.0]),
        "agreement": st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    }
)
ROWS = st.lists(st.lists(TOKEN, max_size=5), min_size=1, max_size=6)


# --- one filter at a time -------------------------------------------------------------------------------------------


@given(ROWS)
def test_overlong_drops_full_responses_without_an_end_token_of_the_model(rows):
    assert kept_rows("overlong", make_batch(rows)) == overlong_rows(rows)


def test_overlong_knows_several_end_tokens_and_none():
    rows = [[{}] * 3 + [{"id": i}] for i in (EOS, 7, 5)]
    assert kept_rows("overlong", make_batch(rows, eos_ids=frozenset({EOS, 7}))) == [True, True, False]
    assert kept_rows("overlong", make_batch(rows, eos_ids=frozenset())) == [False] * 3


SESSION = st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 12))  # uid, session, index


@given(st.dictionaries(SESSION, st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=12))
def test_zero_variance_drops_groups_whose_final_rewards_are_equal(outputs):
    keys = [f"{uid}_x_{session}_{index}" for uid, session, index in outputs]  # a uid with an underscore
    batch = make_batch([[{}]] * len(keys), keys=keys, rewards_B=torch.tensor(list(outputs.values())))

    def final_rewards(uid):
        sessions = {s for u, s, _ in outputs if u == uid}
        last = {s: max(i for u, session, i in outputs if (u, session) == (uid, s)) for s in sessions}
        return [outputs[uid, s, i] for s, i in last.items()]

    expected = [len(final_rewards(uid)) == 1 or len(set(final_rewards(uid))) > 1 for uid, _, _ in outputs]
    assert kept_rows("zero_variance", batch) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_names_the_tensor(value):
    batch = make_batch([[{}], [{}]], keys=["u_0_0", "u_1_0"], rewards_B=torch.tensor([value, 1.0]))
    with pytest.raises(BatchError, match="rm_scores"):
        keep("zero_variance", batch)


@given(ROWS, st.sampled_from([0.0, 0.25, 0.3, 1.0]))
def test_low_agreement_and_low_probability_drop_below_the_threshold(rows, threshold):
    batch = make_batch(rows)
    assert keep("low_agreement", batch, threshold=threshold) == low_agreement_tokens(rows, threshold)
    assert keep("low_probability", batch, threshold=threshold) == low_probability_tokens(rows, threshold)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threshold", [1e-4, 0.01, 0.3])
def test_low_probability_of_half_precision_is_not_rounded_to_the_threshold(dtype, threshold):
    l_infer = (math.log(threshold) + torch.linspace(-0.1, 0.1, 41)).to(dtype)
    batch = make_batch([[{}] * 41])
    batch = replace(batch, tokens=replace(batch.tokens, l_infer=l_infer))
    expected = [math.exp(value) >= threshold for value in l_infer.tolist()]
    assert keep("low_probability", batch, threshold=threshold) == expected


@given(ROWS, st.sampled_from([0.0, 0.25, 0.3, 1.0]))
def test_off_policy_negative_is_deepseeks_equation_9_at_l_theta_equal_to_l_old(rows, delta):
    assert keep("off_policy_negative", make_batch(rows), delta=delta) == off_policy_negative_tokens(rows, delta)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)), min_size=1), st.integers(0, 6))
def test_too_stale_drops_trajectories_whose_oldest_token_is_too_old(rows, versions):
    batch = make_batch([[{}] * length for _, _, length in rows])
    newest, oldest = zip(*((age, age + span) for age, span, _ in rows), strict=True)
    batch = replace(batch, tokens=replace(batch.tokens, lag=Lag(torch.tensor(newest), torch.tensor(oldest))))
    expected = [oldest[row] <= versions for row, (_, _, length) in enumerate(rows) for _ in range(length)]
    assert keep("too_stale", batch, versions=versions) == expected


def test_too_stale_without_versions_says_what_would_give_them():
    with pytest.raises(
        ConfigError, match=r"too_stale needs lag, which an asynchronous trainer.v1.trainer_mode provides"
    ):
        keep("too_stale", make_batch([[{}]]), versions=1)


@pytest.mark.parametrize("name", ["infer", "old"])
def test_a_trajectory_with_nan_under_the_mask_counts_as_off_policy_as_it_does_for_opsm(name):
    nan = {name: math.nan, "advantage": -1.0}
    rows = [[nan, {"advantage": -1.0}, {"advantage": 1.0}], [nan | {"m": 0}, {"advantage": -1.0}]]
    assert keep("off_policy_negative", make_batch(rows), delta=0.1) == [False, False, True, True, True]


def decode(ids):
    return "".join("?abcdef"[i] for i in ids)


def encode(text):
    """Encodes a text so that it drifts at a question mark."""
    return ["-abcdef".find(letter) for letter in text]


def test_retokenization_drops_each_trajectory_from_its_first_drift_on():
    rows = [
        [{"id": 1}, {"id": 0}, {"id": 2, "m": 0}, {"id": 2}],
        [{"id": 0, "m": 0}, {"id": 1}],
        [{"id": 0, "m": 0}],
        [],
    ]
    batch = make_batch(rows, decode=decode, encode=encode)
    assert keep("retokenization_drift", batch) == [True] + [False] * 3 + [True] * 3
    # Of the two trajectories with tokens of the model, one.
    assert get_batch_filter("retokenization_drift").function(batch).metrics == {"drifted": 1 / 2}


@pytest.mark.parametrize(
    ("name", "field", "remedy"),
    [
        ("low_agreement", "agreement_N", "stability.router_agreement=true"),
        ("retokenization_drift", "decode", "tokenizer"),
    ],
)
def test_what_a_filter_lacks_is_named_with_the_setting_that_provides_it(name, field, remedy):
    batch = make_batch([[{}]])
    batch = replace(batch, tokens=replace(batch.tokens, agreement=None))
    settings = {"threshold": 0.5} if name == "low_agreement" else {}
    with pytest.raises(ConfigError, match=f"stability.filters.{name} needs {field}, which .*{remedy}"):
        apply_filters(batch, [(name, settings)])


# --- several in a row -----------------------------------------------------------------------------------------------

CHAIN = [
    ("overlong", {}),
    ("low_probability", {"threshold": 0.5}),
    ("off_policy_negative", {"delta": 0.1}),
    ("low_agreement", {"threshold": 0.5}),
]


@given(ROWS, st.permutations(CHAIN))
def test_shares_add_up_and_the_scale_is_rows_over_rows_kept(rows, chain):
    batch = make_batch(rows)
    found = apply_filters(batch, chain)
    masks = [[bool(t["m"]) for t in row] for row in rows]
    with_tokens = sum(map(any, masks))
    assert not (found.keep_N & ~batch.tokens.mask).any()
    if not with_tokens:
        assert found.empty and found.metrics == {}
        return
    kept = [part.any().item() for part in found.keep_N.split(lengths(batch))]
    assert found.metrics["filter/kept_tokens"] == pytest.approx(found.keep_N.sum().item() / batch.tokens.count)
    assert found.metrics["filter/kept_trajectories"] == pytest.approx(sum(kept) / with_tokens)
    for what in ("tokens", "trajectories"):
        dropped = sum(found.metrics[f"filter/{name}/dropped_{what}"] for name, _ in chain)
        assert dropped + found.metrics[f"filter/kept_{what}"] == pytest.approx(1)
    assert found.scale == (pytest.approx(with_tokens / sum(kept)) if sum(kept) else 1.0)
    assert found.empty is (sum(kept) == 0)


def test_a_case_counted_by_hand():
    rows = [
        [{"agreement": 0.1}, {}],  # one of two tokens dropped
        [{}, {}, {}, {"m": 0}],  # cut: dropped by overlong
        [{"agreement": 0.0}],  # dropped by low_agreement
        [{"m": 0}],  # has no token
    ]
    found = apply_filters(make_batch(rows), [("overlong", {}), ("low_agreement", {"threshold": 0.5})])
    assert found.keep_N.tolist() == [False, True] + [False] * 6
    assert found.metrics == pytest.approx(
        {
            "filter/overlong/dropped_tokens": 3 / 6,
            "filter/overlong/dropped_trajectories": 1 / 3,
            "filter/low_agreement/dropped_tokens": 2 / 6,
            "filter/low_agreement/dropped_trajectories": 1 / 3,
            "filter/kept_tokens": 1 / 6,
            "filter/kept_trajectories": 1 / 3,
        }
    )
    assert found.examples == {"overlong": "u1_0_0", "low_agreement": "u0_0_0"}
    assert found.scale == 3
    assert not found.empty


def test_the_order_decides_what_a_filter_sees():
    # The mean gap of the row is 0.5; without its improbable token it is 0.
    row = [{"infer": -5.0, "old": -6.0, "advantage": -1.0}, {"advantage": -1.0}]
    probable, on_policy = ("low_probability", {"threshold": 0.1}), ("off_policy_negative", {"delta": 0.3})
    first, second = apply_filters(make_batch([row]), [probable, on_policy]), make_batch([row])
    assert first.keep_N.tolist() == [False, True]
    assert apply_filters(second, [on_policy, probable]).empty


def test_a_session_without_kept_tokens_still_counts_in_its_group():
    # The cut response failed, the other one did not: the other one's advantage comes from that difference.
    rows, keys = [[{}] * 4, [{"id": EOS}]], ["u_0_0", "u_1_0"]
    batch = make_batch(rows, keys=keys, rewards_B=torch.tensor([0.0, 1.0]))
    found = apply_filters(batch, [("overlong", {}), ("zero_variance", {})])
    assert found.keep_N.tolist() == [False] * 4 + [True]
    assert found.scale == 2


def test_retokenization_passes_over_what_is_dropped_already():
    batch = make_batch([[{"id": 0}], [{"id": 9}] * 4], decode=decode, encode=encode)
    found = apply_filters(batch, [("overlong", {}), ("retokenization_drift", {})])  # id 9 has no text
    assert found.metrics["filter/retokenization_drift/drifted"] == 1
    assert found.metrics["filter/retokenization_drift/dropped_trajectories"] == 1 / 2


SPELLED = st.fixed_dictionaries({"id": st.sampled_from([0, 1, EOS]), "m": st.integers(0, 1)})  # id 0 drifts


@given(st.lists(st.lists(st.lists(SPELLED, max_size=5), min_size=1, max_size=5), min_size=1, max_size=4))
def test_the_tallies_of_blocks_are_that_of_the_whole_batch(blocks):
    """A filter sees only the trajectories that the former ones left tokens; the others do not count in its metrics."""
    chain = [("overlong", {}), ("retokenization_drift", {})]

    def tally(rows):
        return apply_filters(make_batch(rows, decode=decode, encode=encode), chain)

    whole = tally([row for rows in blocks for row in rows])
    assert merge_tallies([tally(rows) for rows in blocks]).metrics == pytest.approx(whole.metrics)


def test_an_outcome_with_nothing_left_says_which_filters_took_it():
    rows = [[{}] * 4, [{"agreement": 0.0}]]
    found = apply_filters(make_batch(rows), [("overlong", {}), ("low_agreement", {"threshold": 0.5})])
    assert found.empty and found.scale == 1
    assert found.reason == "no token is left: overlong dropped 80%, low_agreement dropped 20%"
    batch = make_batch(rows)
    batch = replace(batch, kept_N=torch.zeros_like(batch.tokens.mask))
    assert apply_filters(batch, [("overlong", {})]).reason == "no token is left: the corrections dropped 100%"
    # And filters that follow have nothing to trip over.
    more = {"low_probability": {"threshold": 0.1}, "off_policy_negative": {"delta": 0}, "retokenization_drift": {}}
    batch = make_batch([[{}] * 4], decode=decode, encode=encode)
    assert apply_filters(batch, ({"overlong": {}, "zero_variance": {}} | more).items()).empty


def test_a_batch_without_a_token_of_the_model():
    found = apply_filters(make_batch([[{"m": 0}], []]), CHAIN)
    assert found.empty and "no trajectory has a token" in found.reason


def test_no_filter_keeps_everything():
    found = apply_filters(make_batch([[{}, {"m": 0}]]), [])
    assert found.keep_N.tolist() == [True, False]
    assert found.metrics == {"filter/kept_tokens": 1.0, "filter/kept_trajectories": 1.0}
    assert found.scale == 1


def test_a_field_of_another_length_is_named():
    with pytest.raises(ValueError, match=r"1 trajectories and 2 tokens.*rewards_B 2.*responses_N 1"):
        make_batch([[{}, {}]], rewards_B=torch.zeros(2), responses_N=torch.zeros(1))
