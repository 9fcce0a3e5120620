"""Stability for large-scale MoE RL with verl: measure, correct and guard the rollout/training mismatch."""

__version__ = "0.2.0"
