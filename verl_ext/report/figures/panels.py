"""The figures of a report, their captions, and the setting to add to a run if a figure is empty."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import altair as alt
import numpy as np

from verl_ext.base.metrics import METRICS, find, ours
from verl_ext.base.names import BUCKETS
from verl_ext.diagnosis.findings.guard import growth_clause
from verl_ext.diagnosis.names import K3, LOG_RATIO
from verl_ext.diagnosis.series import now_label, now_of
from verl_ext.report.figures import columns, kl, overlay
from verl_ext.report.figures.charts import (
    BLUE,
    BUCKET_COLOURS,
    GREEN,
    INK,
    LINE_COLOURS,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    chart_data,
    line_chart,
    lines_of,
)
from verl_ext.report.run import Run, sentence_of, validation_label
from verl_ext.report.seeds import Lines

DrawAll = Callable[[Lines], alt.LayerChart | None]

HEALTHY_DROPPED = (0.001, 0.002)  # share of tokens; IcePop, "Small Leak Can Sink a Great Ship", figure 10
NEARLY_ALL = 0.99  # a share above it needs a fourth digit to differ from 1


@dataclass(frozen=True)
class Panel:
    """One figure of the page.

    Attributes:
        key: the name of its file and of its place in the page.
        reading: how to read it.
        verls: what to do in a run of verl, with its settings.
        missing: the text instead of the figure, with the `override` that would make the run log it.
        curves: the (metric, label, colour)s that the figure of a run draws.
        metric: the metric that a comparison of runs draws, and that the text below the figure describes.
        instead: another one for runs that do not log it.
        log, zero, unit: options of the axis.
        under: draws layers under the curves, from the first step and the last.
        draw: draws the figure of a run, if that is another kind of figure than `curves`; None if the run lacks it.
        draw_all: draws the figure of several runs by name, if that is another kind of figure than lines of `metric`.
        compared: replaces `reading` there.
        more: the sentence with the numbers of a run that only this kind of figure has.
    """

    key: str
    title: str
    reading: str
    verls: str = ""
    missing: str = ""
    override: str = ""
    curves: tuple[tuple[str, str, str], ...] = ()
    metric: str = ""
    instead: str = ""
    log: bool = False
    zero: bool = False
    unit: str = ""
    under: Callable[[tuple[int, int]], list[alt.Chart]] = lambda span: []
    draw: Callable[[Run], alt.LayerChart | None] | None = None
    draw_all: DrawAll | None = None
    compared: str = ""
    more: Callable[[Run], str] = lambda run: ""

    @property
    def percent(self) -> bool:
        found = find(self.metric)
        return found is not None and found.unit == "share"

    @property
    def axis(self) -> dict[str, Any]:
        """The options of the axis of the values."""
        return {"log": self.log, "percent": self.percent, "zero": self.zero, "unit": self.unit}

    def chart(self, run: Run) -> alt.LayerChart | None:
        """Draws the figure of a run; None if there is nothing to draw."""
        if self.draw is not None:
            return self.draw(run)
        return line_chart(lines_of(run, self.curves), run.span, **self.axis, under=self.under(run.span))

    def chart_of_all(self, lines: Lines) -> alt.LayerChart | None:
        """Draws the figure for all runs that have it; None if none has it."""
        if self.draw_all is not None:
            return self.draw_all(lines)
        return overlay.metric_overlay(self._metric_of(*chain(*lines.values())), lines, **self.axis)

    def caption(self, *, compares: bool, of_verl: bool) -> str:
        """Returns the text below the title, for a run or for a comparison of runs."""
        reading = self.compared if compares and self.compared else self.reading
        return f"{reading} {self.verls}" if self.verls and of_verl else reading

    def facts(self, run: Run) -> str:
        """Returns this run's numbers, in sentences; "" if there are none."""
        return " ".join(text for text in (self._readings(run), self.more(run)) if text)

    def _metric_of(self, *runs: Run) -> str:
        """Returns the metric that these runs log."""
        lacks = self.instead and all(run.get(self.metric) is None for run in runs)
        return self.instead if lacks else self.metric

    def _readings(self, run: Run) -> str:
        name = self._metric_of(run)
        series = run.get(name) if name else None  # a log may have a metric without a name
        if series is None:
            return ""
        ends = {"highest": int(np.argmax(series.values)), "lowest": int(np.argmin(series.values))}
        at = [f"{word} {self._say(float(series.values[i]))} in step {series.steps[i]}" for word, i in ends.items()]
        metric = find(name)
        named = metric.label[0].upper() + metric.label[1:] if metric and metric.label else name
        unit = f", {metric.unit}" if metric and metric.unit and not self.percent else ""
        now = f"{self._say(now_of(series))} ({now_label(series)})"
        return f"{named}{unit}: now {now}; {', '.join(at)}."

    def _say(self, value: float) -> str:
        if not self.percent:
            return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
        return f"{100 * value:.4g} %" if value > NEARLY_ALL else f"{100 * value:.3g} %"


def _validation_chart(run: Run) -> alt.LayerChart | None:
    curves = zip(run.validations(), map(validation_label, run.validations()), LINE_COLOURS, strict=False)
    return line_chart(lines_of(run, curves), run.span)


def _bucket_figure(axis: str, places: str, colours: Sequence[str] = BUCKET_COLOURS, **others: str) -> dict[str, Any]:
    """Returns what the panels of k3 by buckets have in common: curves of each bucket, and of the metrics in `others`,
    label=metric; and in a comparison, the ends of the runs over the `places`."""
    names = BUCKETS[axis]
    curves = [(f"{K3}/{axis}/{name}", name, colour) for name, colour in zip(names, colours, strict=True)]
    return {
        "curves": (*curves, *((metric, label, INK) for label, metric in others.items())),
        "log": True,
        "unit": "nats per token",
        "draw_all": overlay.profile_overlay(
            lambda run: overlay.end_values(run.parts(K3, f"{axis}/")), places, "~e", order=names, type="log"
        ),
    }


def _layer_overlay(metric: str, axis_format: str) -> DrawAll:
    return overlay.profile_overlay(lambda run: overlay.end_values(run.layers(metric)), "layer", axis_format, zero=False)


def _healthy_band(steps: tuple[int, int]) -> list[alt.Chart]:
    low, high = HEALTHY_DROPPED
    ends = [{"step": step, "value": low, "high": high, "label": "IcePop's authors: 0.1 to 0.2 %"} for step in steps]
    area = alt.Chart(chart_data(ends)).mark_area(color=GREEN, opacity=0.18, clip=True).encode(y2="high:Q")
    text = alt.Chart(chart_data([{**ends[0], "value": high}])).mark_text(
        color=GREEN, align="left", baseline="top", dx=4, dy=4, fontSize=10
    )
    return [area, text.encode(text="label:N")]


def _undrawn_validations(run: Run) -> str:
    left = run.validations()[len(LINE_COLOURS) :]
    return f"Not drawn, for lack of colours: {', '.join(map(validation_label, left))}." if left else ""


def _time_shares(run: Run) -> str:
    seconds = columns.stage_seconds(run)
    total = sum(seconds.values())
    shares = [f"{name} {100 * value / total:.0f} %" for name, value in seconds.items() if total]
    return f"Of all steps together: {', '.join(shares)}." if shares else ""


PANELS = (
    Panel(
        "reward",
        "Reward",
        "Mean score of each batch; it should rise. If it falls while the engines agree, check the learning rate, the "
        "clipping and the KL to the reference rather than the correction.",
        missing="No critic/score/mean: verl logs it at every training step.",
        curves=(("critic/score/mean", "", BLUE),),
        metric="critic/score/mean",
    ),
    Panel(
        "validation",
        "Validation",
        "Scores on the validation files; trust them more than the batch reward. If the reward rises and they do not, "
        "the policy exploits the reward.",
        missing="No val-core/*: this run had no validation.",
        override="trainer.test_freq=10",
        draw=_validation_chart,
        draw_all=overlay.validation_overlay,
        more=_undrawn_validations,
    ),
    Panel(
        "vllm_kl",
        "KL between the engines",
        "A flat line is healthy, at any height far below the thresholds. A straight climb on this logarithmic axis is "
        "exponential growth, which ends in collapse: act while the predicted crossing is far away.",
        missing="No log-probabilities of the rollout were compared.",
        override=ours.GAP.override,
        draw=kl.kl_chart,
        metric=K3,
        instead=LOG_RATIO,
        log=True,
        more=lambda run: sentence_of(growth_clause(run.readings)),
    ),
    Panel(
        "prob_diff",
        "Probability difference of a token",
        "|p rollout - p training| of the sampled tokens. The largest difference jumps with single tokens; the mean "
        "should stay flat. Training was seen to fail past 0.05.",
        missing="No log-probabilities of the rollout were compared.",
        override=ours.GAP.override,
        curves=(
            ("vllm_kl/prob_diff_max", "max", VERMILION),
            ("vllm_kl/prob_diff_mean", "mean", BLUE),
        ),
        metric="vllm_kl/prob_diff_mean",
        log=True,
    ),
    Panel(
        "dropped",
        "Tokens dropped by the correction",
        "Share of tokens whose ratio training/rollout left the band, below and above. IcePop's authors saw 0.1 to "
        "0.2 %. More than 5 % for many steps means that the gap is the problem, not the band.",
        "If the share falls while k3 grows, the band does not catch the gap: try stability=kpop.",
        "No correction was on.",
        curves=(
            ("correction/dropped_low", METRICS["correction/dropped_low"].label, SKY),
            ("correction/dropped_high", METRICS["correction/dropped_high"].label, VERMILION),
            ("correction/dropped", "both", MUTED),
        ),
        metric="correction/dropped",
        zero=True,
        under=_healthy_band,
    ),
    Panel(
        "dropped_entropy",
        "Entropy of dropped and kept tokens",
        "Dropped tokens should be the uncertain ones, with a line well above that of the kept. If the two lines meet, "
        "confident tokens are dropped, and the gap is more than rounding: check for a missed weight sync or another "
        "precision.",
        missing="No correction was on, or it dropped nothing.",
        curves=(
            ("correction/entropy_dropped", "dropped", VERMILION),
            ("correction/entropy_kept", "kept", BLUE),
        ),
        metric="correction/entropy_dropped",
        zero=True,
        unit="nats",
    ),
    Panel(
        "by_probability",
        "Mismatch by probability of the token",
        "k3 of tokens by their probability in the rollout. Rare tokens disagree most in every run; if k3 of likely "
        "tokens climbs, the engines compute different functions.",
        missing="No log-probabilities of the rollout were compared, or stability.breakdown is off.",
        override=ours.GAP.override,
        **_bucket_figure("prob", "probability of the token"),
    ),
    Panel(
        "by_position",
        "Mismatch by position in the response",
        "k3 of tokens by their position in the response. Lines that fan out upwards mean that the gap builds up "
        "along the sequence.",
        "Shorter responses or a sequence mask (stability=geo_mask) help first.",
        "All responses are in one bucket (the first ends at 256 tokens), or stability.metrics was off.",
        **_bucket_figure("position", "position in the response"),
    ),
    Panel(
        "by_lag",
        "Mismatch by age of the rollout",
        "k3 of trajectories by how many weight versions they are behind. 0 shows only the engines' gap, and so does "
        "`engines`, from rescored trajectories. If only old trajectories climb, the policy moves faster than the "
        "rollout follows.",
        "Then try stability=opsm.",
        "No rollout was older than the policy, or its age was not logged (only the asynchronous modes have it).",
        **_bucket_figure(
            "lag", "weight versions behind the policy", (*BUCKET_COLOURS, PURPLE, MUTED), engines="vllm_kl/engine/k3"
        ),
    ),
    Panel(
        "by_replica",
        "Mismatch by server of the rollout",
        "k3 of the tokens of each server, numbered as at the start of the run. All servers get prompts at random, so a "
        "line far above the others is a server that computes something else.",
        missing="The rollout has one server, or stability.breakdown is off.",
        override=ours.GAP.override,
        **_bucket_figure("replica", "server of the rollout", [*islice(cycle(LINE_COLOURS), len(BUCKETS["replica"]))]),
    ),
    Panel(
        "router_agreement",
        "Router agreement by layer",
        "Share of a token's experts that both engines chose; dark is worse. A stripe through all layers is one bad "
        "step; spreading darkness means that the routing drifts apart, which routing replay (stability=r3) prevents.",
        missing="The experts of the two engines were not compared.",
        override=ours.ROUTING.override,
        draw=columns.layer_chart(columns.AGREEMENT, "same experts", 0.99, ".2~%"),
        metric=columns.AGREEMENT,
        draw_all=_layer_overlay(columns.AGREEMENT, ".4~%"),
        compared="Share of a token's experts that both engines chose, at the end of each run; lower is worse. If one "
        "run is far below, routing replay (stability=r3) brings its engines together.",
    ),
    Panel(
        "expert_load",
        "Load of the experts by layer",
        "Tokens of a layer's busiest expert over the mean of its experts: 1 is even, dark is uneven. A layer that "
        "darkens sends its tokens to ever fewer experts: look at router/load_effective and router/load_idle.",
        missing="The experts of the two engines were not compared.",
        override=ours.ROUTING.override,
        draw=columns.layer_chart(columns.LOAD, "busiest over mean", 2.0, ".3~g"),
        metric=columns.LOAD,
        draw_all=_layer_overlay(columns.LOAD, ".3~g"),
        compared="Tokens of a layer's busiest expert over the mean, at the end of each run; 1 is even.",
    ),
    Panel(
        "response_length",
        "Response length",
        "Tokens of a response. Growth is often learning; a jump together with the KL is often not. Check the clipped "
        "share too: the reward of a cut response is not reliable.",
        missing="No response_length/mean: verl logs it at every training step.",
        curves=(
            ("response_length/max", "max", MUTED),
            ("response_length/mean", "mean", BLUE),
        ),
        metric="response_length/mean",
        zero=True,
        unit="tokens",
    ),
    Panel(
        "entropy",
        "Entropy of the policy",
        "A slow fall is normal. Near 0 the policy stops exploring, and a higher upper clip helps. A steep rise can "
        "precede a collapse.",
        "stability=dapo has the higher clip.",
        "No actor/entropy was logged.",
        "actor_rollout_ref.actor.calculate_entropy=true",
        curves=(("actor/entropy", "", BLUE),),
        metric="actor/entropy",
        zero=True,
        unit="nats",
    ),
    Panel(
        "reference_kl",
        "KL to the reference",
        "How far the policy has moved from the reference model. A steady rise is learning; a jump, or growth that does "
        "not slow down, often ends in garbled answers.",
        missing="No KL to the reference was computed.",
        override="actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0",
        curves=(("actor/kl_loss", "", BLUE),),
        metric="actor/kl_loss",
        unit="nats per token",
    ),
    Panel(
        "clipping",
        "Clipping",
        "Shares of tokens clipped in the loss, and of responses that were cut. A few percent of clipping is normal. If "
        "many responses are cut, allow more length, or leave their tokens out of the loss.",
        "verl's share is of the responses as long as the longest of their batch: it is large if all have one length, "
        "too. stability.filters leaves cut responses out.",
        "No clip fractions were logged.",
        curves=(
            ("actor/pg_clipfrac", "tokens, ratio of the policy", BLUE),
            ("actor/pg_clipfrac_lower", "tokens, dual clip", SKY),
            ("response_length/clip_ratio", "responses of the largest length", ORANGE),
            ("answers/cut", "responses cut at the limit", GREEN),
        ),
        metric="actor/pg_clipfrac",
        zero=True,
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "Norm before clipping. Spikes in the same steps as spikes of the KL between the engines come from the gap, "
        "other spikes from the loss or the data.",
        "A batch skip (stability.batch_skip) removes those of the gap.",
        "No actor/grad_norm was logged.",
        curves=(("actor/grad_norm", "", BLUE),),
        metric="actor/grad_norm",
        log=True,
    ),
    Panel(
        "step_time",
        "Where the time goes",
        "Stages as shares of a step. The rollout usually takes most of it; if weight sync or old log-probs grow, "
        "check memory and offloading.",
        missing="No timing_s/step: verl logs it at every training step.",
        draw=columns.share_chart,
        metric=columns.STEP_TIME,
        zero=True,
        draw_all=overlay.profile_overlay(
            columns.stage_seconds, "stage of a step", ".6~g", order=columns.STAGE_ORDER, unit="seconds", zero=True
        ),
        compared="Mean seconds of a step by stage, over each whole run. The rollout usually takes most of it; if "
        "weight sync or old log-probs are long, check memory and offloading.",
        more=_time_shares,
    ),
)
