"""A quick validation says of a config what verl's own does, where it says that it passes."""

import json
import pickle
import subprocess
import sys

import pytest

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
# Overrides, and whether verl takes them.
CASES = [
    (["recipe=qwen3_30b_a3b", "stability=icepop"], True),
    (["recipe=qwen3_30b_a3b_megatron", "precision=fp16_megatron"], True),
    (["recipe=qwen3_30b_a3b", "stability=llds_loss"], True),
    (["recipe=qwen3_30b_a3b", "stability=llds_loss", f"{ACTOR}.policy_loss.coef=-1"], False),
    (["recipe=cpu_smoke", "algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=1"], True),
    (["recipe=qwen3_30b_a3b", f"{ACTOR}.loss_agg_mode=nonsense"], False),
    (["recipe=qwen3_30b_a3b", f"{ACTOR}.use_dynamic_bsz=false"], False),
    (["recipe=qwen3_30b_a3b", f"+{ACTOR}.no_such_field=1"], False),
    (["recipe=qwen3_30b_a3b", f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.temperature=0"], False),
]
CODE = """
import json, pickle, sys
from verl_ext.doctor.hooks import needs_critic, needs_reference
from verl_ext.doctor.validation import passes_quickly
said = []
for config in pickle.load(sys.stdin.buffer):
    config.critic.model = None  # as `built_settings` leaves it
    roles = {"use_reference_policy": needs_reference(config), "use_critic": needs_critic(config)}
    said.append(passes_quickly(config, **roles))
left = [name for name in sys.modules if name.partition(".")[0] in ("verl", "torch", "transformers")]
left += [name for name in sys.modules if name == "verl_ext.workers.loss_config"]
print(json.dumps([said, left]))
"""


@pytest.fixture(scope="module")
def quick(compose):
    """What is said of all cases, and what is left in sys.modules, in an interpreter without verl."""
    given = pickle.dumps([compose(*overrides) for overrides, _ in CASES])
    out = subprocess.check_output([sys.executable, "-c", CODE], input=given)
    return json.loads(out.splitlines()[-1])


def test_it_says_what_verl_says_and_leaves_nothing_behind(quick):
    assert quick == [[passes for _, passes in CASES], []]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("overrides", "passes"), CASES)
def test_what_verl_says(compose, overrides, passes):
    from verl.utils.config import validate_config

    from verl_ext.doctor.hooks import needs_critic, needs_reference
    from verl_ext.doctor.validation import passes_quickly

    config = compose(*overrides)
    config.critic.model = None
    roles = {"use_reference_policy": needs_reference(config), "use_critic": needs_critic(config)}
    try:
        validate_config(config, **roles)
    except Exception:
        assert not passes
    else:
        assert passes
    assert not passes_quickly(config, **roles), "verl is imported here, and asked itself"
