"""One picture of a run: is it learning, how far apart are the engines, what was done about it."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_ext.report.load import Run, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which stays apart under every common colour blindness.
BLUE, ORANGE, GREEN, VERMILION, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#6B6B6B"
HEALTHY_DROPPED = (1.0, 2.0)  # percent of tokens; IcePop, "Small Leak Can Sink a Great Ship"
MARKERS_UP_TO = 60  # steps; a longer line is drawn without a dot at every step

# Said in a panel that has nothing to draw: what would make the run log it.
NEEDS_REWARD = "no critic/score/mean in this run"
NEEDS_LOG_PROBS = "Not logged. Add\nstability.metrics=true"
NEEDS_CORRECTION = "Not logged. Choose a correction,\nfor example stability=icepop"
NEEDS_ROUTING = "Not logged. Add\nstability.router_agreement=true"
NEEDS_TIME = "no timing_s/step in this run"


def write_figure(run: Run, out: Path) -> Path:
    """Draw the run and write it as a PNG; folders on the way are made."""
    figure = draw(run)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    return out


def draw(run: Run) -> "Figure":
    """Six panels, 2 x 3. Needs no display: the figure is tied to the Agg canvas, not to pyplot."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#E6E6E6",
        "legend.frameon": False,
    }
    panels = (_reward, _kl, _probability, _step_time, _dropped, _router)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.04, hspace=0.06)
    with rc_context(style):
        figure = Figure(figsize=(15, 8.4), layout=layout)
        FigureCanvasAgg(figure)
        figure.suptitle(
            f"{run.file.name}, steps {run.steps[0]} to {run.steps[-1]}", x=0.012, ha="left", fontweight="bold"
        )
        for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
            panel(axes, run)
    return figure


def _reward(axes: "Axes", run: Run) -> None:
    _title(axes, "Reward", "mean score of each batch; should rise")
    if (reward := run.get("critic/score/mean")) is None:
        return _missing(axes, NEEDS_REWARD)
    _line(axes, reward, BLUE)


def _kl(axes: "Axes", run: Run) -> None:
    """k1 may be negative, so its size is drawn, hollow where it is below zero."""
    _title(axes, "KL between the two engines", "flat is healthy; a steady climb warns of collapse")
    k1, k3 = run.get("vllm_kl/k1"), run.get("vllm_kl/k3")
    if k1 is None and k3 is None:
        return _missing(axes, NEEDS_LOG_PROBS)
    if k1 is not None:
        size = Series(k1.steps, np.abs(k1.values))
        _line(axes, size, ORANGE, "|k1|, hollow where negative")
        negative = k1.values < 0
        axes.plot(k1.steps[negative], size.values[negative], "o", ms=4, mfc="white", mec=ORANGE, ls="none", zorder=3)
    if k3 is not None:
        _line(axes, k3, BLUE, "k3")
    if (threshold := run.get("guard/threshold")) is not None:
        axes.plot(threshold.steps, threshold.values, color=VERMILION, ls="--", label="skip threshold")
    _log_axis(axes)
    if (skipped := run.get("guard/skipped")) is not None:
        _mark_skipped(axes, skipped)
    # Between the threshold, where there is one, and the curves of a healthy run.
    axes.legend(fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.92))


def _probability(axes: "Axes", run: Run) -> None:
    _title(axes, "Probability difference of a token", "|p rollout - p training| of response tokens; low is good")
    drawn = [
        _line(axes, series, colour, label)
        for label, colour in (("max", VERMILION), ("mean", BLUE))
        if (series := run.get(f"vllm_kl/prob_diff_{label}")) is not None
    ]
    if not drawn:
        return _missing(axes, NEEDS_LOG_PROBS)
    _log_axis(axes)
    axes.legend(fontsize=9)


def _step_time(axes: "Axes", run: Run) -> None:
    _title(axes, "Step time", "all stages of one step")
    if (seconds := run.get("timing_s/step")) is None:
        return _missing(axes, NEEDS_TIME)
    _line(axes, seconds, GREEN)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds")


def _dropped(axes: "Axes", run: Run) -> None:
    _title(axes, "Tokens dropped by the correction", "ratio training/rollout outside the band")
    drawn = [
        _line(axes, Series(series.steps, 100 * series.values), colour, label)
        for name, label, colour in (
            ("correction/dropped_low", "ratio too low", SKY),
            ("correction/dropped_high", "ratio too high", VERMILION),
            ("correction/dropped", "both", GREY),
        )
        if (series := run.get(name)) is not None
    ]
    if not drawn:
        return _missing(axes, NEEDS_CORRECTION)
    axes.axhspan(*HEALTHY_DROPPED, color=GREEN, alpha=0.15, lw=0, label="healthy: 1 to 2 %")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("% of tokens")
    axes.legend(fontsize=9)


def _router(axes: "Axes", run: Run) -> None:
    from matplotlib.ticker import MaxNLocator

    _title(axes, "Router agreement by layer", "share of experts that both engines chose; dark is worse")
    layers = run.layers("router/agreement")
    if not layers:
        return _missing(axes, NEEDS_ROUTING)
    steps = np.unique(np.concatenate([series.steps for series in layers.values()]))
    agreement = np.full((max(layers) + 1, len(steps)), np.nan)
    for layer, series in layers.items():
        agreement[layer, np.searchsorted(steps, series.steps)] = 100 * series.values
    step_edges = np.append(steps - 0.5, steps[-1] + 0.5)
    layer_edges = np.arange(len(agreement) + 1) - 0.5
    axes.grid(False)
    axes.set_facecolor("#E6E6E6")  # a cell without a value
    # At least one percent from end to end: near-perfect agreement must not look like a dramatic picture.
    lowest = min(float(np.nanmin(agreement)), 99.0)
    cells = np.ma.masked_invalid(agreement)
    image = axes.pcolormesh(step_edges, layer_edges, cells, cmap="cividis", vmin=lowest, vmax=100)
    axes.figure.colorbar(image, ax=axes, label="% of experts", pad=0.02)
    axes.set_ylabel("layer")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _title(axes: "Axes", title: str, how_to_read: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontweight="bold", pad=20)
    axes.text(0, 1.02, how_to_read, transform=axes.transAxes, fontsize=9, color=GREY, va="bottom")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def _line(axes: "Axes", series: Series, colour: str, label: str | None = None):
    marker = "o" if len(series.steps) <= MARKERS_UP_TO else None
    return axes.plot(series.steps, series.values, color=colour, label=label, marker=marker, ms=4, lw=1.6)


def _missing(axes: "Axes", message: str) -> None:
    axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[], xlabel="")
    axes.spines[:].set_visible(False)


def _mark_skipped(axes: "Axes", skipped: Series) -> None:
    """Crosses on the upper edge: a step may have been skipped because its KL was not a number."""
    steps = skipped.steps[skipped.values > 0]
    if not steps.size:
        return
    edge = axes.get_xaxis_transform()  # x in steps, y from 0 to 1 over the panel
    (crosses,) = axes.plot(steps, np.ones(len(steps)), "x", color=VERMILION, transform=edge, clip_on=False)
    crosses.set(label="update skipped", markersize=9, markeredgewidth=2.5, zorder=4)


def _log_axis(axes: "Axes") -> None:
    """Logarithmic, unless there is only zero to draw: two engines that agree exactly."""
    if any((np.asarray(line.get_ydata()) > 0).any() for line in axes.lines):
        axes.set_yscale("log", nonpositive="mask")
