"""A policy loss that makes the training worker allocate more memory than there is, once a file exists."""

import os
from pathlib import Path

import torch

from verl_ext.core.loss_batch import LossBatch, LossChange
from verl_ext.core.losses import register_loss

FILE = "VERL_EXT_TEST_HUNGER"  # environment: the file
BYTES = 2**50  # more than a process can address, whatever the machine promises


@register_loss("hungry")
def hungry(batch: LossBatch) -> LossChange:
    """The base loss, unchanged."""
    if Path(os.environ[FILE]).exists():
        torch.empty(BYTES, dtype=torch.uint8)
    return LossChange()
