"""verl's bypass mode, and its settings that nothing reads there."""

from collections.abc import Iterable

from verl_ext.doctor.context import Context
from verl_ext.doctor.findings import Finding, check

SETTINGS = "algorithm.rollout_correction"
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
USUAL = {"rollout_is": None, "rollout_rs": None, "loss_type": "ppo_clip"}


@check("bypass mode")
def bypass_mode(context: Context) -> Iterable[Finding]:
    """A correction that verl is asked for in bypass mode, and leaves out.

    Source: verl issue 4912. Of verl 0.9.1, `_compute_advantage` of trainer V1 skips the correction there, and
    `compute_policy_loss_bypass_mode` alone makes up for it, from `policy_loss.rollout_correction`.
    """
    if not context.get(f"{SETTINGS}.bypass_mode"):
        return
    asked = {name: context.get(f"{SETTINGS}.{name}") for name in USUAL}
    ignored = [f"{name}={value}" for name, value in asked.items() if value != USUAL[name]]
    if not ignored or context.get(f"{POLICY_LOSS}.loss_mode") == "bypass_mode":
        yield Finding("ok", "bypass mode, and no correction that verl would leave out")
        return
    why = "verl 0.9.1's trainer does not correct there (verl issue 4912); its bypass loss does, and so do our masks"
    usual = tuple(f"{SETTINGS}.{name}={'null' if value is None else value}" for name, value in USUAL.items())
    fix = (*usual, "stability.correction=icepop")
    yield Finding("warning", f"{SETTINGS}: {', '.join(ignored)} do nothing in bypass mode", why, fix)
