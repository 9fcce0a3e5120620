from functools import partial

import pytest

from tests.support.training_step import one_step


@pytest.fixture
def step(monkeypatch):
    """step(stability, loss_mode, **fields) -> (trainer, metrics, store) after one step on two responses."""
    return partial(one_step, monkeypatch)
