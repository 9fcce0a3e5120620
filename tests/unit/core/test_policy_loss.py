"""A policy loss reads and returns only what its registration declares."""

from unittest import mock

import pytest
import torch

from verl_ext.base.errors import ConfigError, MethodError
from verl_ext.base.methods import choose
from verl_ext.core.corrections import CORRECTIONS, register_correction
from verl_ext.core.loss_batch import LossBatch, LossChange, call_method
from verl_ext.core.losses import LOSSES, register_loss

BATCH = LossBatch(*torch.zeros(3, 2, 4), mask=torch.ones(2, 4, dtype=torch.bool))


@pytest.fixture(autouse=True)
def registries():
    with mock.patch.dict(LOSSES), mock.patch.dict(CORRECTIONS):
        yield


def changed(function, gives=("weight", "term")):
    register_loss("mine")(function)
    return call_method(choose(LOSSES["mine"], None, "policy_loss"), BATCH, gives)


def test_what_is_not_registered_to_be_read_is_not_there():
    with pytest.raises(ConfigError, match=r"reads l_infer.*registered with reads=\('l_infer',\)"):
        changed(lambda batch: LossChange(weight=batch.require("l_infer")))


@pytest.mark.parametrize("name", ["weight", "term"])
def test_a_tensor_of_another_shape_is_refused(name):
    with pytest.raises(ValueError, match=rf"mine gives a {name} of shape \(2,\) where \(2, 4\) is expected"):
        changed(lambda batch: LossChange(**{name: torch.zeros(2)}))


def test_what_is_no_change_is_refused():
    with pytest.raises(MethodError, match="mine gives a Tensor"):
        changed(lambda batch: batch.l_old)


def test_what_may_only_weigh_adds_no_term():
    with pytest.raises(ValueError, match="mine gives a term; it is registered to give weight"):
        changed(lambda batch: LossChange(term=torch.zeros(2, 4)), gives=("weight",))


def test_what_there_is_not_cannot_be_read():
    with pytest.raises(ValueError, match="the policy loss mine reads"):
        register_loss("mine", reads=("l_ref",))
    with pytest.raises(ValueError, match=r"correction mine reads .* in the update"):
        register_correction("mine", reads=("k",), in_update=True)
    with pytest.raises(ValueError, match="a policy loss named llds is registered already"):
        register_loss("llds")(lambda batch: LossChange())
