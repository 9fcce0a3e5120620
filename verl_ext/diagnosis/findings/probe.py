"""Findings of a probe: which readings of the same tokens differ, where the states come apart, what a sync and an update
change.

A difference of two k3 counts only if it is more than noise, by the paired test of `probe.readings.chance_of`.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from verl_ext.base.names import HEAD, INDEXER, ROUTER
from verl_ext.diagnosis.findings.registry import Seen, finding
from verl_ext.diagnosis.probed import (
    BASE,
    DECODE,
    FLOORS,
    PACKED,
    PREFILL,
    READING_WORDS,
    REPLAYED,
    SIDES,
    SYNC,
    TRAIN,
    UPDATE,
    Pair,
    Probe,
)
from verl_ext.diagnosis.series import Readings, require_logged

ROUNDED_NATS = 1e-9  # nats per token: the gap that float32 leaves
CAUSE_SHARE = 0.5  # share of the gap that a cause must explain
# The sampling path is the cause if the rollout engine's gap to itself is this many times its gap to training. The ratio
# is 1 if all three readings are equally noisy, and 2 if only the rollout's two readings are noisy.
OWN_RATIO = 1.5
NOISE_P = 0.05  # p-value above which two k3 of the same tokens differ by no more than noise
# Relative error that a dtype leaves in hidden states.
ROUNDING_ERROR = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
JUMP_RATIO = 8.0  # times the error of the previous place
CLOSED_SHARE = 0.1  # share of the gap that another reading, or float32, may leave if it closes the gap
AMPLIFIED_RATIO = 1e4  # k3 with equal heads is at most this many times the squared error of the last state
WIDER_RATIO, ARRIVED_SHARE = 2.0, 0.5  # times the earlier gap; share of the training engine's movement
WHOLE_SHARE = (0.8, 1.25)  # range of this share if the whole update arrives
FLOOR_SHARE = 0.1  # share of the gap from which the noise of an engine is worth a sentence
FEWEST_BATCHES = 4  # with fewer, growth is not reported


Look = Callable[[Readings], Seen]
FP32 = "probe_fp32"
PROBE_SHOWS = {  # finding.level -> how a report says that the probe shows it; docs/probe.md explains the readings
    "probe_gap.none": "no gap, because it samples from all tokens at temperature 1, with new weights, one answer per "
    "pass",
    "probe_decode.apart": "the rollout engine apart from itself: `decode` far from both `prefill` and `train`",
    f"{FP32}.closes": "no gap with fp32",
    f"{FP32}.stays": "a gap with fp32 too (or an engine that refuses fp32)",
    "probe_start.router": "states that start to differ at a router, by no more than 16-bit rounding",
    "probe_start.choice": "next to no gap with the rollout's experts (`replayed`), and routers whose logits agree",
    "probe_replay.harms": "a larger gap with the rollout's experts (`replayed`) than without (`train`)",
    "probe_start.layer": "states that start to differ in one layer, by more than 16-bit rounding",
    "probe_first_layer.attention": "states that start to differ in layer 0's attention, by more than 16-bit rounding",
    "probe_start.head": "states that agree, and log-probabilities that do not (`head`)",
    "probe_update.lost": "an update that moves training and not the rollout",
    "probe_update.part": "an update that moves the rollout differently from training, and widens the gap",
    "probe_values.rollout": "NaN or infinite values in the rollout's readings",
    "probe_packing.harms": "a larger gap with several sequences in a pass (`packed`) than with one (`train`)",
    "probe_adapter.closes": "with a LoRA, a smaller gap to the training engine without it (`base`)",
}


# ------------------------------------------------------------------------------------------------- the same tokens


@finding("probe_values", "rollout training states no_token | finite")
def probe_values(run: Readings) -> Seen:
    """Whether all log-probabilities and states of the probe are finite, and where not."""
    probe = require_logged(run.probe)
    counts: dict[str, int] = {}
    for pair in probe.pairs:
        for name, count in ((pair.one, pair.one_not_finite), (pair.other, pair.other_not_finite)):
            counts[name] = max(count, counts.get(name, 0))
    whole, said = probe.pairs[0], list[str]()
    if words := not_finite_words(counts, whole.tokens):
        said.append(words)
    if place := next((place for place in probe.places if place.not_finite), None):
        sides = {"rollout": place.rollout_not_finite, "training": place.train_not_finite}
        where = " and ".join(f"{count} tokens on the {side} side" for side, count in sides.items() if count)
        said.append(f"the hidden states have NaN or infinity from {place.point} on: {where}")
    if not said:
        return ("finite", "all values are finite") if whole.k3 is not None else ("no_token", "no token was scored")
    if whole.k3 is not None:
        said.append(f"k3 is {whole.k3:.1e} over the {whole.tokens - whole.not_finite} other tokens only")
    return "rollout" if counts.get(DECODE) else "training" if any(counts.values()) else "states", "; ".join(said)


def not_finite_words(counts: Mapping[str, int], tokens: int) -> str:
    """Returns in words how many tokens are not finite in each reading, from reading -> count; "" if all are finite."""
    words = [
        f"{count} of {tokens}{'' if number else ' tokens have a log-probability of NaN or infinity'} "
        f"on the {SIDES[name]} side ({name})"
        for number, (name, count) in enumerate((name, count) for name, count in counts.items() if count)
    ]
    return ", ".join(words)


def _sound(run: Readings) -> Probe:
    """Returns the probe. Raises NotLoggedError if there is none, or if k3 is of the finite tokens only."""
    return require_logged(run.probe if run.probe is not None and run.probe.is_finite else None)


@finding("probe_gap", "apart | none")
def probe_gap(run: Readings) -> Seen:
    """Whether the engines differ on the same tokens."""
    probe = _sound(run)
    own, *others = (probe.pair(DECODE, other) for other in (PREFILL, REPLAYED, PACKED))
    if not _is_apart(probe) and not any(_harms(probe, each) for each in others):
        return "none", f"the engines agree: k3 is {probe.whole:.1e} nats per token"
    told = [f"{probe.whole:.1e}", *([f"within the rollout engine {own.k3:.1e}"] if own is not None else [])]
    told += [f"with the rollout's experts replayed {others[0].k3:.1e}"] if others[0] is not None else []
    return "apart", f"the two engines differ on the same tokens: k3 is {', '.join(told)}"


def _instead_of_train(name: str, reading: str, levels: str, how: str, closes: str = "", harms: str = "") -> Look:
    """Registers a finding of another reading instead of `train`, with what is wrong if it closes or widens the gap."""

    def seen(run: Readings) -> Seen:
        probe = _sound(run)
        pair = require_logged(probe.pair(DECODE, reading))
        text = f"{how}, k3 goes from {probe.whole:.1e} to {_k3(pair):.1e}"
        if harms and _harms(probe, pair):
            return "harms", f"{harms}: {text}"
        if not closes or not _is_apart(probe) or not _closes(probe, pair):
            return "no_change", text
        if pair.chance > NOISE_P:
            return "undecided", f"{text}{_noise(pair)}"
        level = "closes" if _k3(pair) < CLOSED_SHARE * probe.whole else "halves"
        return level, f"{(probe.whole - _k3(pair)) / probe.whole:.0%} of the gap is {closes}: {text}"

    seen.__doc__ = f"Whether the gap changes {how}."
    return finding(name, levels)(seen)


LEVELS = "closes halves undecided | no_change"
probe_adapter = _instead_of_train(
    "probe_adapter", BASE, LEVELS, "without the LoRA in training", closes="the LoRA, which the rollout samples without"
)
probe_replay = _instead_of_train(
    "probe_replay",
    REPLAYED,
    f"harms {LEVELS}",
    "with the rollout's experts replayed",
    closes="routing",
    harms="replaying the rollout's experts does harm",
)
probe_packing = _instead_of_train(
    "probe_packing",
    PACKED,
    "harms | no_change",
    "with several in a pass",
    harms="in the training engine, sequences in the same forward pass change each other",
)


@finding("probe_decode", "apart undecided | agrees")
def probe_decode(run: Readings) -> Seen:
    """Whether the rollout engine agrees with itself: its log-probabilities while sampling, and for the same tokens at
    once."""
    probe = _sound(run)
    own, rest = require_logged(probe.pair(DECODE, PREFILL)), require_logged(probe.pair(PREFILL, TRAIN))
    signs = ((own, _k3(own) >= OWN_RATIO * probe.whole), (rest, _closes(probe, rest)))
    found = [pair for pair, holds in signs if holds and _is_apart(probe)]
    if not found:
        return "agrees", f"k3 within the rollout engine is {_k3(own):.1e}"
    text = f"k3 between its log-probs while sampling and for the same tokens at once is {_k3(own):.1e}"
    text = f"{text}; its gap to training is {probe.whole:.1e} while sampling, and {_k3(rest):.1e} at once"
    if all(pair.chance > NOISE_P for pair in found):
        return "undecided", f"the rollout engine may not agree with itself: {text}{_noise(found[0])}"
    return "apart", f"the rollout engine does not agree with itself: {text}"


@finding("probe_floor", "noisy")
def probe_floor(run: Readings) -> Seen:
    """Whether an engine that scores the same tokens twice differs from itself by much of the gap."""
    probe = require_logged(run.probe)
    floors = [(one, probe.pair(one, again)) for one, again in FLOORS]
    noisy = [
        f"{READING_WORDS[one]}, scored twice, differs from itself by a k3 of {_k3(pair):.1e}"
        for one, pair in floors
        if _k3(pair) > max(FLOOR_SHARE * probe.whole, ROUNDED_NATS)
    ]
    return ("noisy", f"noise floor: {'; '.join(noisy)}; what is not larger is noise") if noisy else None


@finding(FP32, "closes stays")
def probe_fp32(run: Readings) -> Seen:
    """Whether a sweep found the gap with float32 in both engines too."""
    probe = _sound(run)
    k3 = require_logged(probe.swept.get("fp32"))
    if probe.whole < ROUNDED_NATS:
        return None
    text = f"with float32 in both engines, k3 is {k3:.1e} instead of {probe.whole:.1e}"
    return ("closes" if k3 < CLOSED_SHARE * probe.whole else "stays"), text


def _k3(pair: Pair | None) -> float:
    return 0.0 if pair is None or pair.k3 is None else pair.k3


def _is_apart(probe: Probe) -> bool:
    """Returns True if what was sampled has another probability at once, in either engine."""
    return max(probe.whole, _k3(probe.pair(DECODE, PREFILL))) >= ROUNDED_NATS


def _closes(probe: Probe, pair: Pair) -> bool:
    """Returns True if another reading in the place of one closes CAUSE_SHARE of the gap."""
    return probe.whole > 0 and probe.whole - _k3(pair) >= CAUSE_SHARE * probe.whole


def _harms(probe: Probe, pair: Pair | None) -> bool:
    """Returns True if the gap is larger with another reading in the place of `train`."""
    return pair is not None and _k3(pair) > max(probe.whole / CAUSE_SHARE, ROUNDED_NATS) and pair.chance <= NOISE_P


def _noise(pair: Pair) -> str:
    return f" (p = {pair.chance:.2g}): over {pair.tokens} tokens, such a difference is within noise"


# --------------------------------------------------------------------------------------------- where states come apart


def start_of(probe: Probe) -> str:
    """Returns where the engines come apart: the first place that is not finite, or whose error is above rounding and
    JUMP_RATIO times the last; HEAD if that is after the last state; "" if nowhere."""
    least = ROUNDING_ERROR[probe.dtype]
    before = least / JUMP_RATIO
    for place in probe.places:
        if place.error is None or place.not_finite or place.error > JUMP_RATIO * max(before, least / JUMP_RATIO):
            return place.point
        before = place.error
    rest = probe.pair(PREFILL, TRAIN) or probe.pairs[0]
    last = (probe.places[-1].error or 0.0) if probe.places else None
    amplified = probe.is_finite and last is not None and _k3(rest) > max(AMPLIFIED_RATIO * last**2, ROUNDED_NATS)
    return HEAD if amplified else ""


@finding("probe_start", "head router choice layer rounding nowhere not_judged")
def probe_start(run: Readings) -> Seen:
    """The place where the states of the engines come apart: of one cause, in a layer, or behind the last layer.

    Not judged if another finding explains the gap, or may. Different weights also change the choice of experts, so a
    replay closes most of their gap too. The choice is named only if a replay closes nearly all of it.
    """
    probe, gap = require_logged(run.probe), probe_gap(run)
    start = start_of(probe)
    if gap is not None and gap[0] == "none":
        return None
    text = f"they come apart at {start}" if start else ""
    looks = (probe_adapter, probe_replay, probe_packing, probe_decode)
    adapter, replay, *others = ((look(run) or ("",))[0] for look in looks)
    if gap is None or adapter in ("closes", "halves") or {adapter, replay, *others} & {"harms", "apart", "undecided"}:
        return ("not_judged", text) if text else None
    if start == HEAD:
        return "head", text
    error = next((place.error for place in probe.places if place.point == start), None) or 0.0
    if error <= ROUNDING_ERROR["bfloat16"]:
        if start.endswith(ROUTER):
            return "router", text
        if text:
            return "rounding", text
        stands_out = "place stands out" if probe.places else "states were recorded, which may show where"
        return "nowhere", f"no {stands_out}; this may be the rounding of {probe.dtype}"
    return ("choice" if start.endswith(".experts") and replay == "closes" else "layer"), text


@finding("probe_first_layer", "| attention behind")
def probe_first_layer(run: Readings) -> Seen:
    """Whether the states of a layer that differs come apart in the first attention already, where positions enter."""
    seen = require_logged(probe_start(run))
    if seen[0] != "layer":
        return None
    first = start_of(require_logged(run.probe)) == "0.attention"
    return ("attention", "the first attention differs") if first else ("behind", "the first attention agrees")


@finding("probe_dtypes", "differ")
def probe_dtypes(run: Readings) -> Seen:
    """Which parts of a layer, and whether the logits, have other dtypes in the other engine."""
    probe = require_logged(run.probe)
    differing = Counter(
        (place.point.rpartition(".")[2], place.rollout_dtype, place.train_dtype)
        for place in probe.places
        if place.rollout_dtype != place.train_dtype and not place.point.endswith(INDEXER)
    )
    parts = [
        f"the output of {count} x {part} is {ours} in the rollout and {theirs} in training"
        for (part, ours, theirs), count in differing.items()
    ]
    ours, theirs = probe.head
    if ours and theirs and ours != theirs:
        parts.append(f"the logits are {ours} in the rollout and {theirs} in training")
    return ("differ", "; ".join(parts)) if parts else None


# -------------------------------------------------------------------------- batches with the same weights, and updates


@finding("probe_batches", "grows not_finite | steady")
def probe_batches(run: Readings) -> Seen:
    """Whether the gap grows from batch to batch while the weights stay the same.

    It grows if each batch of the second half has a larger k3 than each of the first, and their mean is WIDER_RATIO
    times as large. By chance, the first happens in 1 of 6 cases with 4 batches, in 1 of 20 with 6, in 1 of 70 with 8.
    """
    batches = require_logged(run.probe).batches
    k3 = [one.k3 for one in batches if one.k3 is not None and not one.not_finite]
    if not batches:
        return None
    if len(k3) < len(batches):
        text = f"{len(batches) - len(k3)} of {len(batches)} batches with the same weights have NaN or infinity"
        return "not_finite", text
    half = len(k3) // 2
    first, last = k3[:half], k3[-half:]
    if len(k3) < FEWEST_BATCHES or min(last) <= max(first) or not _widens(sum(first) / half, sum(last) / half):
        seen = f"k3 is {min(k3):.1e} to {max(k3):.1e}: no growth is seen"
        return "steady", f"over {len(k3)} batches with the same weights, {seen}"
    text = f"the gap grows while the weights stay the same: k3 is {sum(first) / half:.1e} over the first {half} of"
    return "grows", f"{text} {len(k3)} batches and {sum(last) / half:.1e} over the last {half}"


AFTER = {SYNC: "a sync of the same weights", UPDATE: "an update and its sync"}


@finding("probe_sync", "widens moves not_finite not_known | same")
def probe_sync(run: Readings) -> Seen:
    """Whether a sync of the same weights changes what the rollout computes."""
    return _after(run, SYNC, _of_sync)


def _of_sync(before: float, after: float, rollout_moved: float, train_moved: float) -> tuple[str, str]:
    if _widens(before, after):
        text = f"a weight sync widens the gap: k3 was {before:.1e} and is {after:.1e}"
        return "widens", f"{text}; it sends weights other than those that the rollout had"
    if _widens(before, rollout_moved**2):
        return "moves", f"a sync of the same weights moves the rollout by {rollout_moved:.1e} nats per token"
    return "same", "a weight sync does not widen the gap"


@finding("probe_update", "lost part widens nothing not_finite not_known | arrives")
def probe_update(run: Readings) -> Seen:
    """Whether an update and its sync move the rollout as far as training, as far as the gap does not hide it."""
    return _after(run, UPDATE, _of_update)


def _of_update(before: float, after: float, rollout_moved: float, train_moved: float) -> tuple[str, str]:
    if train_moved == 0:
        return "nothing", "the update changed nothing: its learning rate is 0, or its gradients are"
    moved = f"training moved by {train_moved:.1e} nats per token, the rollout by {rollout_moved:.1e}"
    if not _widens(before, after):
        return "arrives", f"after an update, {moved}; k3 is {after:.1e}"
    if (arrived := rollout_moved / train_moved) < ARRIVED_SHARE:
        return "lost", f"the update does not arrive in the rollout: {moved}"
    text = f"one update widens the gap: k3 was {before:.1e} and is {after:.1e}; {moved}"
    return ("widens" if WHOLE_SHARE[0] < arrived < WHOLE_SHARE[1] else "part"), text


def _after(run: Readings, name: str, judge: Callable[[float, float, float, float], tuple[str, str]]) -> Seen:
    """Judges the numbers of a stage; says so if they are not known."""
    stage = require_logged(next((each for each in require_logged(run.probe).stages if each.name == name), None))
    if stage.numbers is not None:
        return judge(*stage.numbers)
    counts = {PREFILL: stage.rollout_not_finite, TRAIN: stage.train_not_finite}
    if words := not_finite_words(counts, stage.tokens):
        return "not_finite", f"after {AFTER[stage.name]}, {words}"
    return "not_known", f"before {AFTER[stage.name]}, no token was finite in both engines, so the change is not known"


def _widens(before: float, after: float) -> bool:
    """Returns True if a k3 is more than rounding, and WIDER_RATIO times an earlier one."""
    return after > WIDER_RATIO * max(before, ROUNDED_NATS)
