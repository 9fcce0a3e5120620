"""The advice for a run: the remedy of its likeliest cause, or the measurement that would decide; the most useful first.

The choice follows docs/methods.md, "Which one, when", and the runs of docs/lab.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from verl_ext.base.metrics.ours import GAP, ROUTING
from verl_ext.diagnosis.causes import CAUSES, Cause, Settling
from verl_ext.diagnosis.findings.answers import LONGEST
from verl_ext.diagnosis.findings.guard import age_drives, boundary_of, moves_before, outside_since, staleness_of
from verl_ext.diagnosis.findings.registry import RULES, notable
from verl_ext.diagnosis.findings.routers import is_moe, replayed
from verl_ext.diagnosis.growth import GROWTH_READINGS
from verl_ext.diagnosis.judge import JUMPED, Judgement
from verl_ext.diagnosis.names import K3, LENGTH
from verl_ext.diagnosis.rank import OpenQuestion, Suspect
from verl_ext.diagnosis.series import now_of
from verl_ext.report.run import Run

ROUTED_GAP = 2.0  # routing drives the gap if it is this many times larger where experts differ
SELDOM = 0.1  # share of the last steps that a batch skip may refuse
MOST_CHECKS = 3
PROBE = "verl-ext probe"
METRICS, ROUTERS = GAP.override, ROUTING.override
RESCORING = "stability.rescoring.every=10 stability.rescoring.versions=8"
RESUME = "trainer.resume_mode=resume_path trainer.resume_from_path=CHECKPOINT"
RATE = "actor_rollout_ref.actor.optim.lr"
# verl 0.9.1 loads the optimizer's and the schedule's state from a checkpoint, and with them the rate of the old run
# (fsdp_checkpoint_manager.py; LambdaLR keeps `base_lrs`).
ONLY_WEIGHTS = "actor_rollout_ref.actor.checkpoint.load_contents=[model]"
SKIP, SKIP_OFF = "stability.batch_skip.threshold=0.1", "stability.batch_skip.threshold=null"
# Beginning of an override -> beginning of a metric that a run logs if it is on already.
LOGGED_IF_ON = {
    "stability.sync_canary": "sync/",
    "stability.metrics": "vllm_kl/log_ratio_abs_mean",
    "stability.rescoring": "vllm_kl/engine/k3",
    "stability.router_agreement": "router/agreement",
    "stability=opsm": "actor/opsm/dropped",
    "stability=guard": "guard/",
    "stability.filters='{retokenization_drift": "filter/retokenization_drift/",
    "stability.filters={overlong": "filter/overlong/",
    SKIP: "guard/threshold",
    "actor_rollout_ref.actor.use_kl_loss": "actor/kl_loss",
    "actor_rollout_ref.rollout.calculate_log_probs": "vllm_kl/k3",
}
# Override -> what it switches on too, as another override would.
INCLUDES = {
    "stability.correction=tis": {"stability=tis"},
    "stability=r3": {ROUTERS},
    "stability=moe": {"stability=r3", "stability=tis", "stability.correction=tis", "stability=opsm", ROUTERS},
}
WRONG_LOSS = ("gradient_large.large", "gradient_large.absurd")  # its scale comes before everything else
CORRECTED = ("correction_on.on", "correction_on.far")
NO_CHANGE = ("trainer.resume", SKIP_OFF, ONLY_WEIGHTS)  # words of a step that change no method
# Beginnings of the marks of findings whose step does not begin a decline: it is that of the best value, of a passing
# event, of what followed from the decline, or of what is judged below (`moves_before`).
NO_BEGINNING = (
    "reward_peaked.peaked",
    "reward_constant.constant",
    "validation_fell.fell",
    "gap_jumped.passed",
    "gap_spike.",
    "gap_not_measured.",
    "gradient_spike.spike",
    "gradient_zero.zero",
    "not_finite.once",
    "run_ended.",
    "reference_kl_spiked.spiked",
    "guard_",
    "warned_before.",
    "k3_moved.",
    "gradient_moved.",
    "entropy_moved.",
    "length_moved.",
)


@dataclass(frozen=True)
class NextStep:
    """One thing to do: overrides of `python -m verl_ext.main_ppo`, or a command; and the reason, a clause.

    Attributes:
        in_words: `do` is a sentence instead: there is no setting, or not one that is known of the run's trainer.
    """

    do: str
    why: str
    in_words: bool = False

    @property
    def is_command(self) -> bool:
        return self.do.startswith("verl-ext ")

    @property
    def only_measures(self) -> bool:
        return self.do in (METRICS, ROUTERS)

    @property
    def sentence(self) -> str:
        end = "" if self.why.endswith("?") else "."
        return f"{self.why[0].upper()}{self.why[1:]}{end}"


SEQUENCE = ("prompt_length/max", LONGEST)
COMPARE = NextStep(PROBE, "compares both engines on the same tokens, and shows where they come apart")
REFERENCE = NextStep("actor_rollout_ref.actor.use_kl_loss=true", "holds the policy near the reference model")


def is_on(run: Run, override: str) -> bool:
    """Returns True if the run's metrics show that it has an override on already."""
    if override.startswith("stability=moe"):
        return replayed(run.readings) and is_on(run, "stability=opsm")
    return any(override.startswith(start) and run.readings.has(name) for start, name in LOGGED_IF_ON.items())


def may_ask(run: Run, setting: str) -> bool:
    """Returns True if a setting would add to this run's metrics. A launch refuses to compare the routers of a dense
    model."""
    return not is_on(run, setting) and (is_moe(run.readings) or setting != ROUTERS)


def next_steps(
    run: Run, found: Judgement, state: str, question: OpenQuestion | None, settle: Settling | None
) -> Iterator[NextStep]:
    """Yields what to do, the most useful first: the remedy of the likeliest cause, or the measurement to find it.

    A correction is never advised for engines that are broken: it would bound what has to be repaired. Nothing is
    advised twice.
    """
    said: set[str] = set()
    asks_metrics = question is not None and question.setting == METRICS
    for step in _all_steps(run, found, state, question, settle):
        words = (
            {word for word in step.do.split() if not word.startswith(NO_CHANGE)} if not step.is_command else {step.do}
        )
        if words and words <= said:
            continue
        said |= words.union(*(INCLUDES.get(word, set()) for word in words))
        if any(word.startswith("stability=") for word in words) and not asks_metrics:
            said.add(METRICS)  # every method logs the gap
        yield step


def _all_steps(
    run: Run, found: Judgement, state: str, question: OpenQuestion | None, settle: Settling | None
) -> Iterator[NextStep]:
    dead = found.learning.state == "dead" and run.end is None
    if dead and found.first is not None and found.first.cause.about == "learning":
        yield _step_for(run, found.first.cause)
    remedies = [_unrefused(run, found, step) for step in _remedies(run, found, state) if not is_on(run, step.do)]
    if _is_lost(found):
        if remedies and remedies[0].is_command:  # what is broken is broken after a restart too
            yield remedies.pop(0)
        change = next((step for step in remedies if not step.is_command), None)
        if change is None:  # a restart alone repeats what began before the fall
            yield from _checks(found, _sound_step(run, found))
        yield _with_checkpoint(run, found, change)
    yield from remedies
    asked = found.question
    unknown = question is None and found.first is None and found.engines.state in ("apart", "growing")
    if unknown and staleness_of(run.readings) > 1 and not is_on(run, RESCORING):
        yield NextStep(RESCORING, "measures the engines' part of the gap, without the age of the rollouts")
    elif unknown and asked is not None:
        yield NextStep(asked.setting, f'shows whether it is "{asked.first.title}" or "{asked.second.title}"')
    ends = (each.cause for each in found.suspects if each.cause.name in ("ended_by_error", "hang"))
    yield from (_step_for(run, cause) for cause in ends)
    yield from _checks(found)
    if question is not None:
        named = len(found.suspects) > 1 and found.suspects[1].cause == question.second
        both = "the first two causes" if named else f'"{question.first.title}" and "{question.second.title}"'
        yield NextStep(question.setting, f"distinguishes {both}")
    if settle is not None:
        compares = settle.command.startswith(PROBE)
        yield NextStep(settle.command, "compares both engines on the same tokens" if compares else settle.shows)
    if found.has("nears_boundary.skips"):
        yield NextStep(SKIP_OFF, "updates would be refused for the age of the rollouts, which the engines do not share")
    if state == "healthy" and _may_skip(run) and staleness_of(run.readings) <= 1:  # age alone may lift k3 later
        step = NextStep(SKIP, "refuses the one batch that would spoil the weights")
        if not is_on(run, step.do):
            yield step
    if run.end is not None:  # nothing that the run could measure helps against its end
        return
    if run.get(K3) is None or not is_on(run, METRICS):
        yield NextStep(METRICS, "measures the gap of the engines, by probability and position too")
    if run.get("router/agreement") is None and found.moe:
        yield NextStep(ROUTERS, "shows whether the engines choose the same experts")


def _checks(found: Judgement, until: int | None = None) -> Iterator[NextStep]:
    """Yields what to look at for the first MOST_CHECKS findings with a check that neither a named cause nor a gap that
    grew explains; with `until`, for those that began up to that step."""
    if found.engines.state in ("growing", "broken"):
        return
    signs = (sign.finding.name for each in found.suspects for sign in each.evidence if sign.points > 0)
    explained = {RULES[name].family for name in signs if name in RULES}
    follows = {mark for each in found.suspects for mark in each.cause.explains}
    if found.has("reward_constant.solved", "groups_dead.solved"):
        follows |= {"gradient_zero.zero", "advantages.zero", "penalties_vanish.only"}
    unexplained = [
        (each, rule.check)
        for each in notable(found.findings)
        if (rule := RULES.get(each.name)) and rule.check and rule.family not in explained and each.mark not in follows
    ]
    if until is not None:
        unexplained = [(each, check) for each, check in unexplained if each.step is not None and each.step <= until]
    for each, check in unexplained[:MOST_CHECKS]:
        yield NextStep(f"check {check}", f"nothing explains why {each.text}", in_words=True)


def _is_lost(found: Judgement) -> bool:
    """Returns True if the last weights are worse than earlier ones."""
    return found.has("not_finite.training") or found.learning.state in ("collapsed", "falling")


def _may_skip(run: Run) -> bool:
    """Returns True if a batch skip would hardly ever refuse an update of this run."""
    whole = run.get(K3)
    return whole is not None and float((whole.values[-GROWTH_READINGS:] > boundary_of(run.readings)).mean()) <= SELDOM


def _unrefused(run: Run, found: Judgement, step: NextStep) -> NextStep:
    """Returns a step without the batch skip of its preset, if that would refuse updates of this run. Where the run goes
    back to a checkpoint, k3 does too, unless it comes from the age of the rollouts."""
    goes_back = _is_lost(found) and staleness_of(run.readings) <= 1
    if run.get(K3) is None or _may_skip(run) or goes_back or not step.do.startswith("stability="):
        return step
    why = f"{step.why}. The batch skip would refuse updates while k3 is past {boundary_of(run.readings):g}"
    return NextStep(f"{step.do} {SKIP_OFF}", why)


def _remedies(run: Run, found: Judgement, state: str) -> Iterator[NextStep]:
    """Yields changes of the launch, and commands, that the judgement supports."""
    if found.has("run_ended.memory"):  # whatever else is wrong, the run would end there again
        yield _step_for(run, _out_of_memory(found))
    first = found.first
    gap_matters = found.engines.state in ("apart", "growing") or state == "past the boundary"
    if _drifted(run, found) and _moved_first(run, found):
        yield from _of_gap(run, found)
    if first is not None:
        yield from _of_cause(run, found, first)
        if first.cause.of_gap and not first.cause.a_correction_helps:
            return  # a correction does not repair a fault
    if found.engines.state == "broken" and not _drifted(run, found):
        if first is None:
            yield COMPARE
        return
    if gap_matters or found.engines.state == "broken":
        yield from _of_gap(run, found)
    elif found.learning.state in ("falling", "collapsed", "unstable") and first is None and not found.has(*WRONG_LOSS):
        yield from _lower_rate(run)
        yield REFERENCE


def _of_cause(run: Run, found: Judgement, suspect: Suspect) -> Iterator[NextStep]:
    cause = suspect.cause
    if cause.name == "old_weights":
        yield from _of_age(run, found)
    elif cause.name == "learning_rate":
        yield from _lower_rate(run)
    elif cause.name == "two_precisions" and found.has("not_finite.once", "not_finite.rollout", "not_finite.training"):
        yield NextStep(PROBE, "shows which tensor is not finite, and in which engine")
    elif cause.name == "answers_cut" and (longer := _twice_the_longest(run)):
        yield NextStep(f"data.max_response_length={longer}", "lets answers end by themselves")
    elif suspect.override and not (cause.a_correction_helps and found.has(*CORRECTED)):
        why = cause.why or f"{cause.title[:1].lower()}{cause.title[1:]}"
        replays = "stability=r3" in suspect.override.split() and suspect.override != cause.override
        yield NextStep(
            suspect.override, f"trains with the experts that the rollout chose, and {why}" if replays else why
        )
    if cause.of_gap and not cause.harmless_if_close and set(cause.probe) - {"probe_gap.none"}:
        yield COMPARE


def _out_of_memory(found: Judgement) -> Cause:
    """Returns the cause of an end without memory, with the check and the settings for the place where it ran out."""
    return CAUSES["out_of_memory"].seen_with({each.mark for each in found.findings.values()})


def _step_for(run: Run, cause: Cause) -> NextStep:
    """Returns the setting of the run's trainer for a cause, where it is known, else what to look at."""
    setting = cause.elsewhere.get(run.trainer, "")
    values = {"LONGER": str(_twice_the_longest(run) or ""), "LOWER": _third_of_the_rate(run)}
    for word in (word for word in values if word in setting):
        setting = setting.replace(word, values[word]) if values[word] else ""  # nobody knows what to write there
    why = f"first check {cause.check}" if setting else cause.title
    if "TOKENS" in setting:
        longest = [float(series.values.max()) for name in SEQUENCE if (series := run.get(name)) is not None]
        so_far = f" (the longest sequence had {sum(longest):.0f})" if len(longest) == len(SEQUENCE) else ""
        why += f". TOKENS is at least the limits of prompt and response together{so_far}"
    return NextStep(setting or f"check {cause.check}", why, in_words=not setting)


def _of_gap(run: Run, found: Judgement) -> Iterator[NextStep]:
    """Yields changes that bring the engines together, or keep their gap out of the update. The lab has tested which one
    helps: if routers disagree by themselves, replay helps, weights combine with it, and masks do harm (docs/lab.md)."""
    if age_drives(run.readings):
        yield from _of_age(run, found)
        return
    compares = found.first is None and found.engines.state != "close"
    if compares and not _drifted(run, found):
        yield COMPARE
    corrected = found.has(*CORRECTED)
    if found.moe and _routing_drives(run, found) and not found.has("replay.own_experts", "replay.other_experts"):
        yield NextStep(
            "stability=r3 stability.correction=tis",
            "trains with the experts that the rollout chose and bounds weights: routing is part of the gap",
        )
    if found.has("mask_blind.blind"):
        yield NextStep("stability=kpop", "bounds each token's KL instead, which is tight for likely tokens")
    elif not corrected:
        why = "bounds the weight of the tokens on which the engines differ"
        yield _preset("stability=tis", why, run, found)
    if compares and _drifted(run, found):
        yield COMPARE


def _drifted(run: Run, found: Judgement) -> bool:
    """Returns True if engines that were sound came apart little by little, as routers do: then nothing is broken. In a
    dense model, which our metrics show, updates may also not arrive."""
    may_route = found.moe or not is_on(run, METRICS)
    return may_route and found.has("gap_grew.grew") and not found.has(*JUMPED)


def _moved_first(run: Run, found: Judgement) -> bool:
    """Returns True if k3 left its calm before the reward fell, and before anything else that is logged did."""
    began = found.learning.step
    moves = () if began is None else moves_before(run.readings, began, began)
    return bool(moves) and moves[0].signal == K3


def _routing_drives(run: Run, found: Judgement) -> bool:
    """Returns True if the engines agree on too few experts, or the gap is far larger for tokens where they differ."""
    differs, equal = run.get("router/gap_differs"), run.get("router/gap_equal")
    much = differs is not None and equal is not None and now_of(differs) > ROUTED_GAP * now_of(equal)
    return much or found.has("experts_agree.low")


def _of_age(run: Run, found: Judgement) -> Iterator[NextStep]:
    """Yields a preset with OPSM, unless OPSM is on; then rollouts that are not old (docs/methods.md, "Which one,
    when").

    OPSM tolerates the gap without closing it.
    """
    old = CAUSES["old_weights"]
    if run.get("actor/opsm/dropped") is None:
        if found.moe:
            experts = "trains with the experts that the rollout chose and bounds weights"
            yield NextStep(old.moe_override, f"{old.why}, {experts}")
        else:
            yield _preset(old.override, f"{old.why}, which helped old rollouts most in the lab", run, found)
    elif is_on(run, SKIP) and not _may_skip(run):
        yield NextStep(SKIP_OFF, "updates are refused for the age of the rollouts, which OPSM tolerates")
    yield NextStep(
        "trainer.v1.trainer_mode=sync actor_rollout_ref.hybrid_engine=true",
        "samples with the current weights, so rollouts are never old; steps take longer",
    )


def _preset(dense: str, why: str, run: Run, found: Judgement) -> NextStep:
    """Returns the step with a preset; with that of an MoE, which takes what works, if no metric of ours shows whether
    the model has experts."""
    if found.moe or is_on(run, METRICS):
        return NextStep(dense, why)
    return NextStep("stability=moe", f"{why}; in a mixture of experts, it trains with the rollout's experts too")


def _twice_the_longest(run: Run) -> int:
    """Returns twice the length of the longest answer; 0 if no length was logged."""
    length = run.get(LONGEST) or run.get(LENGTH)
    return 0 if length is None else 2 * round(length.values.max())


def _lower_rate(run: Run) -> Iterator[NextStep]:
    if lower := _third_of_the_rate(run):
        yield NextStep(f"{RATE}={lower}", "lowers the learning rate to a third")


def _third_of_the_rate(run: Run) -> str:
    """Returns a third of the highest logged learning rate; "" if none was logged: nobody knows what would be lower."""
    logged = run.get("actor/lr")
    highest = 0.0 if logged is None else float(logged.values.max())
    return f"{highest / 3:.2g}" if highest > 0 else ""


def steps_elsewhere(run: Run, found: Judgement) -> Iterator[NextStep]:
    """Yields what to do in a run that verl did not make: the setting of its own trainer where it is known, else what
    to look at; and the weights to go back to."""
    causes = [suspect.cause for suspect in found.suspects if not suspect.harmless]
    if found.has("run_ended.memory"):  # whatever else is wrong, the run would end there again
        memory = _out_of_memory(found)
        causes = [memory, *(cause for cause in causes if cause != memory)]
    yield from (_step_for(run, cause) for cause in causes)
    yield from _checks(found)
    if not causes and found.engines.state in ("apart", "growing", "broken"):
        both = "compare both engines' log-probabilities of the same tokens at the same weights: dtype, sampling, sync"
        yield NextStep(both, "the engines come apart, and no metric shows why", in_words=True)
    if _is_lost(found):
        began = _sound_step(run, found)
        if began <= 1:
            yield NextStep("start again from the beginning", "no weights are from before the fall", in_words=True)
        else:
            back = f"go back to a checkpoint from before step {began}"
            why = "the first sign of the fall is from that step"
            if _third_of_the_rate(run) and any("LOWER" in cause.elsewhere.get(run.trainer, "") for cause in causes):
                why += "; start from its weights, because a resumed optimizer and schedule bring the old rate back"
            yield NextStep(back, why, in_words=True)


def _sound_step(run: Run, found: Judgement) -> int:
    """Returns the step before which nothing had moved. A reward belongs to the policy that sampled, so the step is
    earlier if rollouts are old."""
    began = found.learning.step or int(run.steps[-1])
    moved = [
        each.step
        for each in notable(found.findings)
        if each.step is not None and not each.mark.startswith(NO_BEGINNING)
    ]
    moved += [move.step for move in moves_before(run.readings, began, began)]
    if (whole := run.get(K3)) is not None:  # a guard would refuse the updates from there on
        passed = outside_since(whole, whole.values > boundary_of(run.readings), began)
        moved += [] if passed is None else [passed]
    return min([began - round(staleness_of(run.readings)), *(step for step in moved if run.steps[0] < step <= began)])


def _with_checkpoint(run: Run, found: Judgement, change: NextStep | None) -> NextStep:
    """Returns a change together with the weights to start from: those before the earliest thing that moved."""
    sound, stale = _sound_step(run, found), staleness_of(run.readings)
    text, why = change.do if change else "", change.why if change else "goes back to weights from before the fall"
    if change is None:
        why = f"{why}, once its cause is fixed"
    if sound <= 1:
        why = f"{why}. No checkpoint is from before the fall, so the run starts from its beginning"
        return NextStep(f"{text} trainer.resume_mode=disable".strip(), why)
    if text.startswith(RATE):
        text, why = f"{text} {ONLY_WEIGHTS}", f"{why}; the optimizer's state would bring the old rate back"
    dated = f" (the reward of a step is that of weights {stale:.0f} versions older)" if stale > 1 else ""
    return NextStep(f"{text} {RESUME}".strip(), f"{why}. CHECKPOINT is one from before step {sound}{dated}")
