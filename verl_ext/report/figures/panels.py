"""The figures of a report, their captions, and what to add to a run where a figure is empty."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from verl_ext.base.metrics import METRICS, find, ours
from verl_ext.base.names import BUCKETS
from verl_ext.report.figures import columns, gap
from verl_ext.report.figures.lines import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    ORDERED,
    PURPLE,
    SERIES,
    SKY,
    VERMILION,
    Line,
    data,
    line_chart,
)
from verl_ext.report.run import Run
from verl_ext.report.signals import K3, LAST, now_of

HEALTHY_DROPPED = (0.001, 0.002)  # share of tokens; IcePop, "Small Leak Can Sink a Great Ship", figure 10
NEARLY_ALL = 0.99  # a share above it is told from 1 by a fourth digit


@dataclass(frozen=True)
class Panel:
    """One figure of the page.

    Attributes:
        key: names its file and its place in the page.
        reading: how to read it and what to do, one sentence.
        chart: of a run, None where it has nothing to draw.
        missing: shown instead of the figure, with the `override` that would make the run log it.
        metric: the one that a comparison of runs draws, and the text below the figure is about.
        log, zero: of that metric's axis.
        compared: replaces `reading` if a comparison of runs draws another kind of figure.
    """

    key: str
    title: str
    reading: str
    chart: Callable[[Run], alt.LayerChart | None]
    missing: str
    override: str = ""
    metric: str = ""
    log: bool = False
    zero: bool = False
    compared: str = ""

    @property
    def percent(self) -> bool:
        return is_share(self.metric)

    def facts(self, run: Run) -> str:
        """This run's numbers, in a sentence; "" where there are none."""
        series = run.get(self.metric)
        if series is None:
            return ""
        count = min(LAST, len(series.steps))
        of = f"median of the last {count} readings" if count > 1 else "one reading"
        now = now_of(series)
        ends = {"highest": int(np.argmax(series.values)), "lowest": int(np.argmin(series.values))}
        at = [f"{word} {self._say(float(series.values[i]))} in step {series.steps[i]}" for word, i in ends.items()]
        return f"Now {self._say(now)} ({of}); {', '.join(at)}."

    def _say(self, value: float) -> str:
        if not self.percent:
            return f"{value:.3g}"
        return f"{100 * value:.4g} %" if value > NEARLY_ALL else f"{100 * value:.3g} %"


def is_share(metric: str) -> bool:
    found = find(metric)
    return found is not None and found.unit == "share"


def step_span(run: Run) -> tuple[int, int]:
    return int(run.steps[0]), int(run.steps[-1])


def _line_chart_of(
    *of: tuple[str, str, str], under: Callable[[tuple[int, int]], list[alt.Chart]] = lambda steps: [], **axis: Any
) -> Callable[[Run], alt.LayerChart | None]:
    """A chart of (metric, label, colour)s of one unit; those that the run has not are left out."""
    percent = is_share(of[0][0])

    def chart(run: Run) -> alt.LayerChart | None:
        lines = [Line(label, s, colour) for metric, label, colour in of if (s := run.get(metric)) is not None]
        return (
            line_chart(lines, step_span(run), under=under(step_span(run)), percent=percent, **axis) if lines else None
        )

    return chart


def _validation_chart(run: Run) -> alt.LayerChart | None:
    names = run.validations()[: len(SERIES)]
    lines = [
        Line(name.removeprefix("val-core/"), series, colour)
        for name, colour in zip(names, SERIES, strict=False)
        if (series := run.get(name)) is not None
    ]
    return line_chart(lines, step_span(run)) if lines else None


def _bucket_chart(axis: str, colours: Sequence[str] = ORDERED, **beside: str) -> Callable[[Run], alt.LayerChart | None]:
    """Draws k3 of each bucket, and the metrics in `beside`, label=metric, next to them."""

    def chart(run: Run) -> alt.LayerChart | None:
        found = run.parts(K3, f"{axis}/")
        named = [(name, colour) for name, colour in zip(BUCKETS[axis], colours, strict=True) if name in found]
        lines = [Line(name, found[name], colour) for name, colour in named]
        lines += [Line(label, s, INK) for label, metric in beside.items() if (s := run.get(metric)) is not None]
        return line_chart(lines, step_span(run), log=True, unit="nats per token") if lines else None

    return chart


def _healthy_band(steps: tuple[int, int]) -> list[alt.Chart]:
    low, high = HEALTHY_DROPPED
    ends = [{"step": step, "value": low, "high": high, "label": "IcePop's authors: 0.1 to 0.2 %"} for step in steps]
    area = alt.Chart(data(ends)).mark_area(color=GREEN, opacity=0.18, clip=True).encode(y2="high:Q")
    text = alt.Chart(data([{**ends[0], "value": high}])).mark_text(color=GREEN, align="left", dx=4, dy=-6, fontSize=10)
    return [area, text.encode(text="label:N")]


PANELS = (
    Panel(
        "reward",
        "Reward",
        "Mean score of each batch; it should rise. Where it falls while the engines stay together, look at the "
        "learning rate, the clipping and the KL to the reference rather than at the correction.",
        _line_chart_of(("critic/score/mean", "", BLUE)),
        "No critic/score/mean: verl logs it at every training step.",
        metric="critic/score/mean",
    ),
    Panel(
        "validation",
        "Validation",
        "Scores on the validation files; believe them before the batch reward. If reward rises and they do not, the "
        "policy has found a way around the reward.",
        _validation_chart,
        "No val-core/*: this run had no validation.",
        "trainer.test_freq=10",
    ),
    Panel(
        "vllm_kl",
        "KL between the engines",
        "Flat is healthy, at any height far below the lines. A straight climb on this axis is the compounding that "
        "ends in collapse: act while the predicted crossing is far.",
        gap.kl_chart,
        "No log-probabilities of the rollout were compared.",
        ours.GAP.override,
        metric=K3,
        log=True,
    ),
    Panel(
        "prob_diff",
        "Probability difference of a token",
        "|p rollout - p training| of the sampled tokens. Single tokens make the largest jump; the mean should stay "
        "flat, and past 0.05 training was seen to fail.",
        _line_chart_of(("vllm_kl/prob_diff_max", "max", VERMILION), ("vllm_kl/prob_diff_mean", "mean", BLUE), log=True),
        "No log-probabilities of the rollout were compared.",
        ours.GAP.override,
        metric="vllm_kl/prob_diff_mean",
        log=True,
    ),
    Panel(
        "dropped",
        "Tokens dropped by the correction",
        "Share of tokens whose ratio training/rollout left the band, below and above. IcePop's authors saw 0.1 to "
        "0.2 %; more than 5 % for many steps means that the gap is the problem, not the band; fewer and fewer while k3 "
        "grows, that the band does not see it: try stability=kpop.",
        _line_chart_of(
            ("correction/dropped_low", METRICS["correction/dropped_low"].label, SKY),
            ("correction/dropped_high", METRICS["correction/dropped_high"].label, VERMILION),
            ("correction/dropped", "both", MUTED),
            under=_healthy_band,
            zero=True,
        ),
        "No correction was on.",
        ours.CORRECTIONS.override,
        metric="correction/dropped",
        zero=True,
    ),
    Panel(
        "dropped_entropy",
        "Entropy of dropped and kept tokens",
        "Dropped tokens should be the uncertain ones, well above the kept. If the two meet, confident tokens are being "
        "dropped: the gap is no rounding any more, look for a missed weight sync or another precision.",
        _line_chart_of(
            ("correction/entropy_dropped", "dropped", VERMILION),
            ("correction/entropy_kept", "kept", BLUE),
            zero=True,
            unit="nats",
        ),
        "No correction was on, or it dropped nothing.",
        ours.CORRECTIONS.override,
        metric="correction/entropy_dropped",
        zero=True,
    ),
    Panel(
        "by_probability",
        "Mismatch by probability of the token",
        "k3 of tokens by the probability that the rollout gave them. Rare tokens disagree most in every run; if the "
        "likely ones climb, the engines compute different functions.",
        _bucket_chart("prob"),
        "No log-probabilities of the rollout were compared, or stability.breakdown is off.",
        ours.GAP.override,
    ),
    Panel(
        "by_position",
        "Mismatch by position in the response",
        "k3 of tokens by how far into the response they are. Lines that fan out upwards say that the gap builds up "
        "along the sequence: shorter responses or a sequence mask (stability=geo_mask) help first.",
        _bucket_chart("position"),
        "All responses are in one bucket (the first ends at 256 tokens), or stability.metrics was off.",
    ),
    Panel(
        "by_lag",
        "Mismatch by age of the rollout",
        "k3 of trajectories by how many weight versions they are behind; 0 is the engines alone, as is `engines`, of "
        "rescored ones. If only the old ones climb, the policy moves faster than the rollout follows: stability=opsm.",
        _bucket_chart("lag", (*ORDERED, PURPLE, MUTED), engines="vllm_kl/engine/k3"),
        "No rollout was older than the policy, or it was not logged: of the asynchronous modes.",
    ),
    Panel(
        "router_agreement",
        "Router agreement by layer",
        "Share of a token's experts that both engines chose; dark is worse. A stripe through all layers is one bad "
        "step; darkness that spreads is the routing moving apart, which routing replay (stability=r3) holds "
        "together.",
        columns.agreement_chart,
        "The experts of the two engines were not compared.",
        ours.ROUTING.override,
        metric=columns.AGREEMENT,
        compared="Share of a token's experts that both engines chose, at the end of each run; lower is worse. Where "
        "one run lies far below, routing replay (stability=r3) holds the engines together.",
    ),
    Panel(
        "response_length",
        "Response length",
        "Tokens of a response. Growth is often learning; a jump together with the KL is often not. Look at the clipped "
        "share, too: cut responses carry no honest reward.",
        _line_chart_of(
            ("response_length/max", "max", MUTED), ("response_length/mean", "mean", BLUE), zero=True, unit="tokens"
        ),
        "No response_length/mean: verl logs it at every training step.",
        metric="response_length/mean",
        zero=True,
    ),
    Panel(
        "entropy",
        "Entropy of the policy",
        "A slow fall is normal. Towards 0 the policy stops exploring (clip-higher: stability=dapo); a steep rise "
        "can come before a collapse.",
        _line_chart_of(("actor/entropy", "", BLUE), zero=True, unit="nats"),
        "No actor/entropy was logged.",
        "actor_rollout_ref.actor.calculate_entropy=true",
        metric="actor/entropy",
        zero=True,
    ),
    Panel(
        "clipping",
        "Clipping",
        "Shares of tokens clipped in the loss, and of responses as long as the longest of their batch, which many are "
        "only where they are all alike or cut. Clipping of some percent is at work; many cut responses ask for more "
        "length or an overlong filter (stability.filters).",
        _line_chart_of(
            ("actor/pg_clipfrac", "tokens, ratio of the policy", BLUE),
            ("actor/pg_clipfrac_lower", "tokens, dual clip", SKY),
            ("response_length/clip_ratio", "responses of the largest length", ORANGE),
            zero=True,
        ),
        "No clip fractions were logged.",
        metric="actor/pg_clipfrac",
        zero=True,
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "Before clipping. Spikes that come with those of the KL come from the gap, and a batch skip takes them out; "
        "others come from the loss or the data.",
        _line_chart_of(("actor/grad_norm", "", BLUE), log=True),
        "No actor/grad_norm was logged.",
        metric="actor/grad_norm",
        log=True,
    ),
    Panel(
        "step_time",
        "Where the time goes",
        "Stages as shares of a step. The rollout usually takes most of it; if weight sync or old log-probs grow, "
        "look at memory and offloading.",
        columns.share_chart,
        "No timing_s/step: verl logs it at every training step.",
        metric=columns.STEP,
        zero=True,
        compared="Mean seconds of a step by stage, over each whole run. The rollout usually takes most of it; if "
        "weight sync or old log-probs stand out, look at memory and offloading.",
    ),
)


def facts(panel: Panel, run: Run) -> str:
    """The panel's sentence about this run, with what only the figure of its kind knows."""
    more: Iterable[str] = ()
    if panel.key == "vllm_kl":
        more = [gap.growth_sentence(run)]
    if panel.key == "validation" and (left := run.validations()[len(SERIES) :]):
        more = [f"Not drawn, for want of colours: {', '.join(name.removeprefix('val-core/') for name in left)}."]
    if panel.key == "step_time" and (seconds := columns.stage_seconds(run)):
        total = sum(seconds.values())
        shares = [f"{name} {100 * value / total:.0f} %" for name, value in seconds.items() if total]
        return panel.facts(run).replace("Now", "Seconds: now") + (f" {', '.join(shares)}." if shares else "")
    return " ".join(text for text in (panel.facts(run), *more) if text)
