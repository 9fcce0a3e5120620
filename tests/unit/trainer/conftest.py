from functools import partial

import pytest

from tests.support.guarded_training import training_in
from tests.support.training_step import one_step


@pytest.fixture
def step(monkeypatch):
    """step(stability, loss_mode, **fields) -> (trainer, metrics, store) after one step on two responses."""
    return partial(one_step, monkeypatch)


@pytest.fixture
def train(monkeypatch, tmp_path):
    """train(stability, series, **trainer) -> the trainer after a guarded run over `series`."""
    return training_in(tmp_path, monkeypatch)
