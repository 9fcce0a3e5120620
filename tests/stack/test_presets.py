"""A preset in a run that cannot have all of it: the rest works, and the start-up table says what was left out.

test_runs.py has one next to verl's own weights."""

import re

import pytest

from tests.stack import other_engine
from tests.stack.running import assert_documented, left_out

pytestmark = pytest.mark.e2e

OTHER_ENGINE = (
    f"actor_rollout_ref.actor.strategy={other_engine.NAME}",
    f"actor_rollout_ref.model.external_lib={other_engine.__name__}",
)


def test_moe_on_an_engine_that_the_plugin_does_not_know(train):
    run = train("stability=moe", *OTHER_ENGINE)
    assert run.code == 0, run.tail
    assert_documented(run)
    assert re.search(r"│ left out +│ now stability\.", run.console), "the start-up table says so too"
    assert left_out(run) == [
        "stability.correction=tis stability.opsm=null",
        "stability.replay=disabled",
        "stability.router_agreement=false",
    ]
    for step in run.steps:
        assert step["vllm_kl/k3"] > 0 and step["actor/grad_norm"] > 0 and step["guard/skipped"] == 0
        assert step["correction/weight_mean"] == pytest.approx(1, abs=0.01)
        assert "router/agreement" not in step and "actor/opsm/dropped" not in step
