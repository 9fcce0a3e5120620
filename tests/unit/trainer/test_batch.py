from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from tests.support.store import nested
from verl_ext.base.names import BUCKETS
from verl_ext.core.tokens import Lag, jagged
from verl_ext.trainer.batch import lag_of, response_tokens


def batch(**fields):
    defaults = {
        "rollout_log_probs": nested([-1.0, -2.0], [-3.0]),
        "old_log_probs": nested([-1.5, -2.0], [-3.0]),
        "response_mask": nested([1, 0], [1]),
    }
    fields = {name: value for name, value in (defaults | fields).items() if value is not None}
    return TensorDict(fields, batch_size=2)


def test_tokens_are_packed_in_order():
    tokens = response_tokens(batch())
    assert tokens.l_infer.tolist() == [-1, -2, -3]
    assert tokens.mask.tolist() == [True, False, True]
    assert tokens.offsets.tolist() == [0, 2, 3]
    assert tokens.count == 2
    assert tokens.entropy is None


def test_a_trajectory_is_as_many_versions_behind_as_steps_have_synchronised_since():
    tags = [{"min_global_steps": low, "max_global_steps": high} for low, high in ((6, 6), (3, 5))]
    lag = lag_of(tags, step=7)
    assert (lag.newest.tolist(), lag.oldest.tolist()) == ([0, 1], [0, 3])
    tokens = response_tokens(batch(), lag)
    assert tokens.lag is lag and [BUCKETS["lag"][place] for place in tokens.lag_buckets()] == ["0", "0", "span"]
    fresh = replace(tokens, lag=replace(lag, fresh=torch.tensor([0, 1])))
    assert [BUCKETS["lag"][place] for place in fresh.lag_buckets()] == ["0", "0", "1"]


def test_weights_go_back_in_the_batchs_shape():
    tokens = response_tokens(batch())
    assert [row.tolist() for row in jagged(torch.tensor([1.0, 2.0, 3.0]), tokens.offsets).unbind()] == [[1, 2], [3]]


def test_missing_log_probs_name_the_setting():
    with pytest.raises(ValueError, match=r"rollout\.calculate_log_probs=True"):
        response_tokens(batch(rollout_log_probs=None))


def test_fewer_log_probs_than_tokens_name_the_tensor():
    with pytest.raises(ValueError, match="rollout_log_probs has 2 tokens and response_mask 3"):
        response_tokens(batch(rollout_log_probs=nested([-1.0], [-3.0])))


def test_as_many_log_probs_divided_differently_are_refused():
    with pytest.raises(ValueError, match="old_log_probs"):
        response_tokens(batch(old_log_probs=nested([-1.5], [-2.0, -3.0])))


def test_some_trajectories_are_picked_in_the_order_asked_for():
    tokens = response_tokens(batch(entropy=nested([1.0, 2.0], [3.0])), Lag(torch.tensor([0, 1]), torch.tensor([0, 3])))
    found, places = tokens.of_rows([1, 0])
    assert places.tolist() == [2, 0, 1] and found.offsets.tolist() == [0, 1, 3]
    assert found.l_old.tolist() == [-3, -1.5, -2] and found.entropy.tolist() == [3, 1, 2]
    assert (found.lag.newest.tolist(), found.lag.oldest.tolist()) == ([1, 0], [3, 0])
