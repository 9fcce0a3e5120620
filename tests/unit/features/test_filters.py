"""`stability.filters`: order, names and ranges of the settings, and filters of the user's own."""

import math
from unittest import mock

import pytest
import torch

from verl_ext.base.errors import ConfigError
from verl_ext.core.filters import BATCH_FILTERS, BatchFilter, FilterBatch, apply_filters, register_batch_filter
from verl_ext.core.tokens import Tokens
from verl_ext.features.stability import stability_config

ALL = {
    "overlong": {},
    "zero_variance": {},
    "low_agreement": {"threshold": 0.5},
    "low_probability": {"threshold": 1e-4},
    "retokenization_drift": {},
    "off_policy_negative": {"delta": 0.1},
}


def parse_filters(node):
    return stability_config({"filters": node, "router_agreement": True}).filter_chain()


@pytest.fixture
def batch():
    """Trajectories of one and of two tokens."""
    zeros, ones = torch.zeros(3), torch.ones(3)
    tokens = Tokens(zeros, zeros, ones.bool(), torch.tensor([0, 1, 3]), agreement=ones)
    return FilterBatch(
        tokens=tokens,
        keys=["u_0_0", "u_1_0"],
        rewards_B=torch.tensor([0.0, 1.0]),
        advantages_N=torch.zeros(3),
        responses_N=torch.zeros(3, dtype=torch.int64),
        max_response_length=4,
        eos_ids=frozenset({0}),
        decode=lambda ids: "a" * len(ids),
        encode=lambda text: [0] * len(text),
    )


@pytest.fixture
def long_only():
    with mock.patch.dict(BATCH_FILTERS):

        @register_batch_filter("long_only")
        def long_only(batch, *, length, unit=1):
            return (batch.tokens.offsets.diff() >= length * unit)[batch.tokens.row_of_token()]

        yield


@pytest.mark.usefixtures("long_only")
def test_a_filter_of_ones_own_runs_and_has_its_settings_checked(batch):
    found = apply_filters(batch, parse_filters({"long_only": {"length": 2}}))
    assert found.keep_N.tolist() == [False, True, True]
    with pytest.raises(ConfigError, match=r"long_only\.size is not known; its settings are: length, unit"):
        parse_filters({"long_only": {"size": 2}})
    with pytest.raises(ConfigError, match=r"long_only\.length must be given"):
        parse_filters({"long_only": None})


@pytest.mark.usefixtures("long_only")
def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match="long_only is registered already"):
        register_batch_filter("long_only")(lambda batch: batch.kept_N)


def test_an_unknown_filter_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"stability\.filters=no_such_filter is not known; choose one of: overlong, "):
        parse_filters({"no_such_filter": {}})


def test_a_filter_that_does_not_answer_for_each_token_is_refused(batch, monkeypatch):
    by_row = BatchFilter("by_row", lambda batch: torch.ones(2, dtype=torch.bool), object)
    monkeypatch.setitem(BATCH_FILTERS, "by_row", by_row)
    with pytest.raises(ValueError, match=r"by_row returned torch.bool \(2,\), where torch.bool \(3,\)"):
        apply_filters(batch, [("by_row", {})])


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"low_agreement": {"threshold": 2}},
            r"stability\.filters\.low_agreement\.threshold=2 must be between 0 and 1",
        ),
        ({"low_probability": {"threshold": -0.1}}, r"low_probability\.threshold=-0.1 must be between 0 and 1"),
        ({"low_probability": {"threshold": math.nan}}, r"low_probability\.threshold=nan must be between"),
        ({"low_agreement": {"threshold": "x"}}, r"low_agreement\.threshold=x must be a number"),
        ({"off_policy_negative": {"delta": -1}}, r"off_policy_negative\.delta=-1 must be at least 0"),
        ({"off_policy_negative": {}}, r"off_policy_negative\.delta must be given"),
        ({"overlong": {"length": 3}}, r"overlong\.length is not known; its settings are: none"),
        ({"overlong": True}, "overlong=True must be a mapping"),
    ],
)
def test_a_bad_setting_is_named(node, message):
    with pytest.raises(ConfigError, match=message):
        parse_filters(node)


@pytest.mark.parametrize("names", [list(ALL), list(reversed(ALL))])
def test_filters_run_in_the_order_of_the_mapping(names, batch):
    parsed = parse_filters({name: ALL[name] for name in names})
    assert parsed == [(name, ALL[name]) for name in names]
    assert next(iter(apply_filters(batch, parsed).metrics)) == f"filter/{names[0]}/dropped_tokens"


def test_verl_averages_every_metric_over_the_updates_of_a_step(batch):
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    metrics = apply_filters(batch, parse_filters(ALL)).metrics
    assert len(metrics) == 2 * len(ALL) + 3
    # Any other rule goes by a word (max, min, sum, total) somewhere in the name.
    assert {MetricsAggregator()._get_aggregation_type(name) for name in metrics} == {"weighted_avg"}
