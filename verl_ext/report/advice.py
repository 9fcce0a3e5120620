"""What to try next: overrides that measure more of a run, or do something about what its verdict found."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from verl_ext.guard.collapse import GRADIENT, Collapse
from verl_ext.report.growth import DROPPED, K3, age_drives, blind_mask, now_of
from verl_ext.report.run import Run

State = Literal["collapsed", "healthy", "drifting", "past the boundary", "not enough data"]

LOW_AGREEMENT = 0.98
ROUTED_GAP = 2.0  # times the gap of tokens with the same experts, where routing is what drives it
DEFAULT_RATE = 1e-6  # of verl's actor


@dataclass(frozen=True)
class Override:
    """One thing to try: the text after `python -m verl_ext.main_ppo`, and why."""

    text: str
    why: str


SYNC = Override("trainer.v1.trainer_mode=sync", "takes the policy's own movement out of the gap")
REFERENCE = Override(
    "actor_rollout_ref.actor.use_kl_loss=true", "holds the policy near the reference: no engine is to blame"
)
RESUME = "trainer.resume_mode=resume_path trainer.resume_from_path=CHECKPOINT"
LOST_WEIGHTS = "these weights will not recover by themselves"


def advice(run: Run, state: State, *, of_gap: bool, reward_fell: bool) -> Iterator[Override]:
    """What to try next; `of_gap` where it is the gap of the engines that something has to be done about."""
    if state != "healthy" and age_drives(run):
        yield SYNC
    yield from measuring(run)
    if state == "healthy":
        if run.get("guard/threshold") is None:
            yield Override("stability.batch_skip.threshold=0.1", "refuses the one batch that would spoil the weights")
    elif of_gap:
        yield from _closing(run, tighten=state == "drifting")
        if state == "past the boundary":
            yield Override(RESUME, "goes back to a checkpoint from before the growth: " + LOST_WEIGHTS)
    elif reward_fell:
        yield _lower_rate(run)
        yield REFERENCE


def revival(run: Run, collapse: Collapse) -> Iterator[Override]:
    """What to start a dead run anew with: what moved first comes first."""
    norm = next((str(move) for move in collapse.moves if move.signal == GRADIENT), "")
    rate = _lower_rate(run, f"; {norm} speaks against the old one" if norm else "")
    if not collapse.by_gap:
        yield rate
    yield from measuring(run)
    if collapse.by_gap:
        if age_drives(run):
            yield SYNC
        yield from _closing(run, tighten=False)
        yield rate
    else:
        yield REFERENCE
    yield Override(RESUME, f"goes back to a checkpoint from before step {collapse.since}: {LOST_WEIGHTS}")


def _closing(run: Run, *, tighten: bool) -> Iterator[Override]:
    """What brings the engines together, or takes out what they are apart on; which of it, the lab has tried.

    Where rollouts are old, routers disagree because they have moved: replay then helps nothing, and masks of single
    tokens little. Where routers disagree by themselves, it is replay that helps, and weights go with it better than
    masks do (docs/lab.md).
    """
    if age_drives(run):
        yield Override(
            "stability=opsm", "drops responses that are old and bad, what helps most where rollouts are behind"
        )
        return
    corrected, blind = run.get(DROPPED) is not None, blind_mask(run) is not None
    if blind:
        yield Override("stability=kpop", "bounds each token's KL instead, which is tight where tokens are likely")
    if not corrected:
        yield Override(
            "stability=icepop", "drops the tokens on which the engines are apart, and skips batches past 0.1"
        )
    if _routing_drives(run):
        kept = " stability.correction=tis" if corrected else ""
        yield Override(
            f"stability=r3{kept}", "trains with the experts that the rollout chose: routing is part of the gap here"
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


def _lower_rate(run: Run, against: str = "") -> Override:
    """A third of the highest that was logged; verl's default where none was."""
    logged = run.get("actor/lr")
    highest = 0.0 if logged is None else float(logged.values.max())
    rate, why = (
        (highest / 3, "a third of the learning rate") if highest > 0 else (DEFAULT_RATE, "verl's own learning rate")
    )
    return Override(f"actor_rollout_ref.actor.optim.lr={rate:.0e}", why + against)


def measuring(run: Run) -> Iterator[Override]:
    """What would show more of the same run."""
    if run.get(K3) is None or run.get("vllm_kl/log_ratio_abs_mean") is None:
        yield Override("stability.metrics=true", "measures the gap of the engines, by probability and position too")
    if run.get("router/agreement") is None:
        yield Override("stability.router_agreement=true", "shows whether the engines choose the same experts (MoE)")


def _routing_drives(run: Run) -> bool:
    agreement, differs, equal = (run.get(f"router/{name}") for name in ("agreement", "gap_differs", "gap_equal"))
    if agreement is not None and now_of(agreement) < LOW_AGREEMENT:
        return True
    return differs is not None and equal is not None and now_of(differs) > ROUTED_GAP * now_of(equal)
