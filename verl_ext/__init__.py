"""Stability for large-scale MoE RL with verl: measure, correct and guard the rollout/training mismatch."""

from verl_ext import moved

__version__ = "0.1.0"

moved.install()
