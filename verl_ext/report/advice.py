"""What to do next: one thing first, the most useful one, then the others.

What helps stands before what only measures, unless nothing is wrong. Which change helps follows docs/methods.md, "Which
one, when", and the runs of docs/lab.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from verl_ext.guard.collapse import GRADIENT
from verl_ext.guard.state import Boundary
from verl_ext.report.growth import DROPPED, K3, STALE, age_drives, blind_mask, boundary_of, now_of, staleness
from verl_ext.report.reward import Fall
from verl_ext.report.run import Run

State = Literal["stopped", "collapsed", "healthy", "drifting", "past the boundary", "not enough data"]

LOW_AGREEMENT = 0.98
ROUTED_GAP = 2.0  # times the gap of tokens with the same experts, where routing is what drives it
DEFAULT_RATE = 1e-6  # of verl's actor


@dataclass(frozen=True)
class Override:
    """One thing to try: the text after `python -m verl_ext.main_ppo`, and why."""

    text: str
    why: str

    @property
    def sentence(self) -> str:
        return f"{self.why[0].upper()}{self.why[1:]}."


SYNC = Override(
    "trainer.v1.trainer_mode=sync", "samples with the current weights, so rollouts are never old; steps take longer"
)
REFERENCE = Override("actor_rollout_ref.actor.use_kl_loss=true", "holds the policy near the reference model")
RESUME = "trainer.resume_mode=resume_path trainer.resume_from_path=CHECKPOINT"
SPOILED = "the last weights are spoiled"


def advice(run: Run, state: State, *, of_gap: bool, reward_fell: bool, reward_holds: bool) -> Iterator[Override]:
    """What to do about a run that has not collapsed.

    Args:
        of_gap: whether the gap of the engines is what something has to be done about.
        reward_fell, reward_holds: whether the reward lost most of what it had gained; whether it is near its best.
    """
    if of_gap:
        yield from _closing(run, tighten=state == "drifting")
        if state == "past the boundary" and not reward_holds:
            yield Override(RESUME, f"goes back to a checkpoint from before the gap grew: {SPOILED}")
    elif reward_fell:
        yield _lower_rate(run)
        yield REFERENCE
    yield from measuring(run)
    if state == "healthy" and run.get("guard/threshold") is None:
        yield Override("stability.batch_skip.threshold=0.1", "refuses the one batch that would spoil the weights")


def revival(run: Run, fall: Fall, *, by_gap: bool) -> Iterator[Override]:
    """How to start a collapsed run again: a sound checkpoint together with the change that helps most.

    Args:
        by_gap: whether the engines came apart, or rollouts were too old, before the reward fell.
    """
    norm = next((str(move) for move in fall.collapse.moves if move.signal == GRADIENT), "")
    rate = _lower_rate(run, f"; {norm} rose at the old one" if norm else "")
    first, *others = (*_closing(run, tighten=False), rate) if by_gap else (rate, REFERENCE)
    yield _from_checkpoint(run, first, fall.sound)
    yield from others
    yield from measuring(run)


def _from_checkpoint(run: Run, change: Override, sound: int) -> Override:
    """The change together with the weights to start from, as one command line."""
    if sound <= 1:
        why = f"{change.why}. No checkpoint is from before the fall, so the run starts from its beginning"
        return Override(f"{change.text} trainer.resume_mode=disable", why)
    stale = staleness(run)
    dated = f" (the reward of a step is that of weights {stale:.0f} versions older)" if stale > STALE else ""
    why = f"{change.why}. {SPOILED.capitalize()}: CHECKPOINT is one from before step {sound}{dated}"
    return Override(f"{change.text} {RESUME}", why)


def _closing(run: Run, *, tighten: bool) -> Iterator[Override]:
    """What brings the engines together, or keeps their gap out of the update. The lab has tried which one helps.

    Where rollouts are old, routers disagree because they have moved: replay then helps nothing, and masks of single
    tokens little. Where routers disagree by themselves, replay helps, weights go with it, and masks do harm
    (docs/lab.md).
    """
    if age_drives(run):
        yield from _for_old_rollouts(run)
        return
    corrected, blind, routed = run.get(DROPPED) is not None, blind_mask(run) is not None, routing_drives(run)
    if routed:
        yield Override(
            "stability=r3 stability.correction=tis",
            "trains with the experts that the rollout chose and bounds weights: routing is part of the gap",
        )
    if blind:
        yield Override("stability=kpop", "bounds each token's KL instead, which is tight where tokens are likely")
    if not corrected and not routed:
        yield Override(
            "stability=icepop", "drops the tokens on which the engines are apart, and skips batches past 0.1"
        )
    yield Override(
        "precision=fp16", "rounds eight times finer than bfloat16, in both engines; fp16_megatron where Megatron trains"
    )
    if tighten and corrected and not blind:
        rule = "{gap:{signal:guard/steps_to_boundary,below:20,recover:50,action:tighten}}"
        yield Override(
            f"stability.guard.rules='{rule}'",
            "narrows the band while the boundary is near, where IcePop is the correction",
        )


def _for_old_rollouts(run: Run) -> Iterator[Override]:
    """OPSM, which helped most in the lab, unless it is on; then rollouts that are not old.

    OPSM holds the gap without closing it: where k3 passes the boundary, the preset's batch skip would refuse updates.
    """
    if run.get("actor/opsm/dropped") is None:
        text = "stability=opsm"
        why = "leaves out bad responses that the policy has moved away from, which helped old rollouts most in the lab"
        whole, boundary = run.get(K3), boundary_of(run)
        if whole is not None and whole.values[-Boundary.window :].max() > boundary:
            text += " stability.batch_skip.threshold=null"
            why += f". The batch skip would refuse updates while k3 is past {boundary:g}"
        yield Override(text, why)
    yield SYNC


def _lower_rate(run: Run, also: str = "") -> Override:
    """A third of the highest that was logged; verl's default where none was."""
    logged = run.get("actor/lr")
    highest = 0.0 if logged is None else float(logged.values.max())
    rate, why = (
        (highest / 3, "lowers the learning rate to a third")
        if highest > 0
        else (DEFAULT_RATE, "sets verl's own learning rate")
    )
    return Override(f"actor_rollout_ref.actor.optim.lr={rate:.0e}", why + also)


def measuring(run: Run) -> Iterator[Override]:
    """What would show more of the same run."""
    if run.get(K3) is None or run.get("vllm_kl/log_ratio_abs_mean") is None:
        yield Override("stability.metrics=true", "measures the gap of the engines, by probability and position too")
    if run.get("router/agreement") is None:
        yield Override("stability.router_agreement=true", "shows whether the engines choose the same experts (MoE)")


def routing_drives(run: Run) -> bool:
    """Whether tokens for which the engines chose other experts make much of the gap."""
    agreement, differs, equal = (run.get(f"router/{name}") for name in ("agreement", "gap_differs", "gap_equal"))
    if agreement is not None and now_of(agreement) < LOW_AGREEMENT:
        return True
    return differs is not None and equal is not None and now_of(differs) > ROUTED_GAP * now_of(equal)
