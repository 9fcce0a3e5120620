"""Fixtures of several rooms' tests."""

import asyncio
from collections.abc import Callable

import pytest


@pytest.fixture
def no_waiting(monkeypatch) -> None:
    """verl's client asks again at once after an interruption."""

    async def at_once(seconds):
        pass

    monkeypatch.setattr(asyncio, "sleep", at_once)


@pytest.fixture
def actor_config() -> Callable:
    """actor_config(policy_loss, **fields of verl's ActorConfig)"""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    def build(policy_loss=None, **settings):
        return FSDPActorConfig(
            **{
                "strategy": "fsdp2",
                "rollout_n": 1,
                "ppo_micro_batch_size_per_gpu": 1,
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "policy_loss": policy_loss or PolicyLossConfig(),
                **settings,
            }
        )

    return build
