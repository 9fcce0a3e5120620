"""Checks that weight syncs happen, on a few trajectories that both engines score again and again: after each update,
and after the sync that brings it to the rollout.

Before the first update of a run the gap on them is the engines' own (with a LoRA, that of B = 0). From then on, a
change of the training engine's log-probabilities must show in those of every rollout engine.

A token's log-probability under the training engine moves by x between two scorings, under the rollout engine by y. A
weight sync in between makes y = x up to rounding; a sync that did not happen leaves y = 0. So the share that arrived is
E[x y] / E[x^2]: a matched filter, which detects updates far below the gap of the engines, because the gap does not move
with x. The training engine rounds differently in each scoring. This noise counts only in E[x^2] and makes the quotient
too small. Its power is at most twice that of the gap, which is subtracted for the upper end.

A part of an update, say of some layers, moves some tokens and not others. An update that arrived multiplied by a factor
moves every token by the same share, as long as the updates are small. So the first syncs are always checked, and the
median of y / x is logged with its spread. How far the rollout has moved since the last check tells a small part from
nothing at all: an engine whose weights stayed the same gives each token the same score again, up to its own noise.

On verl the trajectories are kept in TransferQueue next to the batch, and scored by workers and servers at temperature
1, without top-k and top-p, because that is how a server scores given tokens.

Shape legend: N response tokens of these trajectories that the model generated, except the last of each.
"""

import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.errors import HookError
from verl_ext.base.names import OWN_ROUTES, PROMPTS, RESPONSE_MASK, RESPONSES, ROLLOUT_LOG_PROBS
from verl_ext.features.settings import SyncCanarySettings
from verl_ext.guard.state import Decision, Event
from verl_ext.trainer.queue import MODEL_INPUTS, get_fields, part_of

FEWEST = 16  # tokens
SIGMAS = 4.0  # standard errors, to either side
MISSING = 0.75  # an upper end below it: at least a part of the update did not arrive
ARRIVED = 0.5  # a lower end above it: the update arrived
LEAST_REST = 1e-9  # of 1 - leverage, which rounding may make 0
FIRST_CHECKS = 3  # syncs that are checked whatever `every` says, because updates are still small


@dataclass(frozen=True)
class Arrival:
    """The share of an update that reached the rollout, as an interval.

    Attributes:
        low, high: its ends; `high` is infinite while the gap may hide the update. From 0 to infinity: nothing is known.
        moved: root mean square of x, in nats per token.
        median: the median of y / x, over the half of the tokens that training moved most; nan if it moved none.
        spread: the median distance of y / x from it.
    """

    low: float
    high: float
    moved: float
    median: float = math.nan
    spread: float = math.nan

    @property
    def known(self) -> bool:
        return self.low > 0 or math.isfinite(self.high)

    @property
    def missing(self) -> bool:
        return self.high < MISSING

    @property
    def arrived(self) -> bool:
        return self.low > ARRIVED and not self.missing


def arrival(train: tuple[Tensor, Tensor], infer: tuple[Tensor, Tensor]) -> Arrival:
    """Compares log-probabilities of the same tokens, [N] before and [N] after the update and its sync.

    Tokens with a value that is not finite are left out. With fewer than FEWEST, or if none moved, nothing is known.
    """
    before, after, infer_before, infer_after = _finite_scores(train, infer)
    x, y = after - before, infer_after - infer_before
    power = x.square().mean().item() if len(x) >= FEWEST else 0.0
    if power == 0:
        return Arrival(0.0, math.inf, 0.0)
    common = (x * y).mean().item()
    # Of a slope through 0, by HC3 (MacKinnon and White, 1985): `rest` is a token's distance from the slope of the other
    # tokens. A token whose experts flipped in one engine may have moved further than all others together. It would
    # lie on its own slope, and make a wrong share look sure.
    rest = (y - common / power * x) / (1 - x.square() / x.square().sum()).clamp_min(LEAST_REST)
    error = SIGMAS * math.sqrt((x * rest).square().mean().item() / len(x))
    least = power - 2 * (before - infer_before).var().item()  # of what the weights moved
    high = max(common + error, 0.0) / least if least > 0 else math.inf
    most = x.abs().topk(-(-len(x) // 2)).indices
    shares = (y[most] / x[most])[x[most] != 0]
    median = shares.quantile(0.5)
    spread = (shares - median).abs().quantile(0.5)
    return Arrival(max(common - error, 0.0) / power, high, math.sqrt(power), median.item(), spread.item())


def movement(train: tuple[Tensor, Tensor], infer: tuple[Tensor, Tensor]) -> float:
    """Returns the median movement of a token's score in the rollout, over that in training, between two checks.

    The arguments are those of `arrival`. nan with fewer than FEWEST finite tokens, or if training's did not move.
    """
    before, after, infer_before, infer_after = _finite_scores(train, infer)
    moved = (after - before).abs().median().item() if len(before) >= FEWEST else 0.0
    return (infer_after - infer_before).abs().median().item() / moved if moved else math.nan


def _finite_scores(train: tuple[Tensor, Tensor], infer: tuple[Tensor, Tensor]) -> Tensor:
    scores_4N = torch.stack([*train, *infer]).double()
    return scores_4N[:, scores_4N.isfinite().all(0)]


RULE = "weight_sync"  # of its events, and of the guard's jump
SIGNAL = "sync/arrived_high"


@dataclass
class Replica:
    """The state of a rollout engine.

    Attributes:
        train, infer: [N] scores after the last sync that arrived.
        step: of that sync.
        last: [N] scores at the last check.
        missing: the last update did not arrive.
    """

    train: Tensor
    infer: Tensor
    step: int
    last: Tensor
    missing: bool = False


class SyncCanary:
    """Compares the scores after a sync with those after the last one that arrived.

    Args:
        every: check every this many syncs, and the first ones.
    """

    def __init__(self, every: int = 1) -> None:
        self._replicas: list[Replica] = []
        self._last_train = torch.empty(0)
        self._every, self._checks = every, 0

    @property
    def begun(self) -> bool:
        return bool(self._replicas)

    def is_due(self, step: int) -> bool:
        """Returns True if the sync of this step is to be checked."""
        return self._checks < FIRST_CHECKS or step % self._every == 0

    def begin(self, step: int, train_N: Tensor, infer: Sequence[Tensor]) -> None:
        """Stores these scores, of training and of each rollout engine, as those of the same weights."""
        self._replicas = [Replica(train_N, infer_N, step, infer_N) for infer_N in infer]
        self._last_train = train_N

    def check(self, step: int, train_N: Tensor, infer: Sequence[Tensor]) -> tuple[dict[str, float], Decision]:
        """Checks a sync. Returns `sync/*`, the worst of the rollout engines, and what has begun or ended in this
        step."""
        found, followed = [], []
        events: list[Event] = []
        self._checks += 1
        for number, (replica, infer_N) in enumerate(zip(self._replicas, infer, strict=True)):
            seen = arrival((replica.train, train_N), (replica.infer, infer_N))
            found.append(seen)
            followed.append(movement((self._last_train, train_N), (replica.last, infer_N)))
            replica.last = infer_N
            engine = f"rollout engine {number} of {len(infer)}"
            if seen.missing and not replica.missing:
                reason = (
                    f"at most {seen.high:.0%} of the change by the updates since step {replica.step} "
                    f"({seen.moved:.2g} nats per token) is in {engine}; check that the weight sync reaches it, and "
                    "under names that it takes"
                )
                events.append(Event(step, RULE, SIGNAL, seen.high, MISSING, "warn", reason))
            if seen.arrived:
                if replica.missing:
                    reason = f"{engine} has the weights again"
                    events.append(Event(step, RULE, SIGNAL, min(seen.high, 1.0), MISSING, "recover", reason))
                replica.train, replica.infer, replica.step = train_N, infer_N, step
            replica.missing = (replica.missing or seen.missing) and not seen.arrived
        metrics = {"sync/moved": max(seen.moved for seen in found)}
        if lows := [seen.low for seen in found if seen.known]:
            metrics["sync/arrived_low"] = min(lows)
        if math.isfinite(high := min(seen.high for seen in found)):
            metrics[SIGNAL] = high
        if moved := [seen for seen in found if not math.isnan(seen.median)]:
            furthest = max(moved, key=lambda seen: abs(seen.median - 1))
            metrics |= {"sync/arrived_median": furthest.median, "sync/arrived_spread": furthest.spread}
        self._last_train = train_N
        if known := [share for share in followed if not math.isnan(share)]:
            metrics["sync/followed"] = min(known)
        return metrics, Decision(tuple(events))


PARTITION = "verl_ext_canary"  # the replay buffer looks into "train"
OFF = ("stability.sync_canary.trajectories=0", "stability.sync_canary.every=1")
TIMEOUT_S = 600.0
# One forward pass per trajectory: a batch as small as this need not fit the run's micro-batches.
ONE_A_PASS = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0, "micro_batch_size_per_gpu": 1}


def has_other_inputs(data: TensorDict) -> bool:
    """Returns True if any trajectory has images or the like; verl gives all of them the field, and leaves it empty for
    text."""
    return MODEL_INPUTS in data.keys() and any(data[MODEL_INPUTS])  # noqa: SIM118 (a TensorDict has no `in`)


class CanaryTrajectories:
    """Some trajectories of a batch, and their scores by either engine.

    Attributes:
        ids: the token ids of each trajectory, without its last token: a server generates one more, and a full
            trajectory has no room for it.
        l_infer_N: the log-probabilities that the rollout returned.
        positions_N: the position of each of these tokens in its response, from 0.

    Args:
        batch: the batch, with the fields that compute_log_prob gets.
        count: the number of trajectories, rounded up so that each of the `ranks` has the same number.

    Raises:
        HookError: they have images or other inputs, which a server would need too, or there are too few.
    """

    def __init__(self, batch: KVBatchMeta, count: int, ranks: int):
        real = (number for number, tag in enumerate(batch.tags) if not tag.get("is_padding", False))
        rows = list(islice(real, -(-count // ranks) * ranks))
        if len(rows) % ranks:
            raise HookError(f"stability.sync_canary: {len(rows)} trajectories for {ranks} ranks", fix=OFF)
        chosen = part_of(batch, rows)
        data = get_fields(chosen, batch.fields)
        if has_other_inputs(data):
            raise HookError("stability.sync_canary scores only text, and this batch has other inputs", fix=OFF)
        self._batch = tq.kv_batch_put(keys=chosen.keys, partition_id=PARTITION, fields=data, tags=chosen.tags)
        self._lengths = [len(response) for response in data[RESPONSES].unbind()]
        self._mask_N = self._all_but_last(data[RESPONSE_MASK].unbind()).bool()
        self.ids = [
            torch.cat([prompt, response[:-1]]).tolist()
            for prompt, response in zip(data[PROMPTS].unbind(), data[RESPONSES].unbind(), strict=True)
        ]
        self.l_infer_N = self._packed(data[ROLLOUT_LOG_PROBS].unbind())
        self.positions_N = self._packed([torch.arange(length) for length in self._lengths])

    def score_in_workers(
        self, workers: Any, *, replays: bool = True, adapter: bool = True, tokens_at_once: int = 0
    ) -> Tensor:
        """Returns [N] from the training engine as it is.

        Args:
            replays: with routing replayed, where the run does that.
            adapter: with its LoRA, where it has one.
            tokens_at_once: trajectories share a forward pass up to so many tokens; 0 for a pass each.
        """
        from verl.workers.utils.padding import response_from_nested

        settings: dict[str, Any] = {} if replays else {OWN_ROUTES: True}
        settings |= {} if adapter else {"no_lora_adapter": True}
        settings |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": tokens_at_once} if tokens_at_once else {}
        self._batch.extra_info = ONE_A_PASS | settings
        workers.compute_log_prob(self._batch)
        data = get_fields(self._batch, ("log_probs", RESPONSE_MASK))
        return self._packed(response_from_nested(data["log_probs"], data[RESPONSE_MASK]).unbind())

    def score_in_servers(self, handles: Sequence[Any]) -> list[Tensor]:
        """Returns [N] from each rollout engine as it is.

        Raises:
            HookError: one does not answer.
        """
        import ray

        asked = [[_ask_server(handle, ids) for ids in self.ids] for handle in handles]
        try:
            answers = [ray.get(each, timeout=TIMEOUT_S) for each in asked]
        except ray.exceptions.RayError as error:
            said = f"stability.sync_canary: a rollout engine did not score {len(self.ids)} trajectories ({error!r})"
            raise HookError(said, fix=OFF) from error
        return [self._packed(map(_response_scores, each, self._lengths)) for each in answers]

    def pass_through_server(self, handle: Any, most: int) -> None:
        """Makes a rollout engine score the first `most` tokens of each trajectory, one after another."""
        import ray

        for ids in self.ids:
            ray.get(_ask_server(handle, ids[:most]))

    def _packed(self, rows: Iterable[Tensor]) -> Tensor:
        return self._all_but_last(rows)[self._mask_N]

    def _all_but_last(self, rows: Iterable[Tensor]) -> Tensor:
        return torch.cat([row[: length - 1].cpu() for row, length in zip(rows, self._lengths, strict=True)])


def _response_scores(answer: Any, length: int) -> Tensor:
    """Returns [r - 1] of a server's answer, which has the next token's score at each token of prompt and response
    except the last."""
    rows = answer.extra_fields["prompt_logprobs"]
    return torch.tensor([row[0] for row in rows[:-1]][len(rows) - length :])


def _ask_server(handle: Any, ids: list[int]) -> Any:
    """Asks one of verl 0.9.1's servers, vLLM's or SGLang's, which score prompts for distillation teachers."""
    return handle.generate.remote(
        prompt_ids=ids,
        sampling_params={"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        request_id=uuid.uuid4().hex,
    )


class CanaryRun:
    """The canary in a run's steps: before the first update, after each one, after its sync.

    Args:
        settings: trajectories, every.
        comparable: whether a rollout's log-probabilities equal a server's for given tokens, so that those of the first
            batch serve as the first comparison.
        required: whether the user asked for it. A canary that is on by default and cannot work prints why and is off.
    """

    def __init__(self, settings: SyncCanarySettings, comparable: bool, required: bool = True):
        self.canary = SyncCanary(settings.every)
        self.metrics: dict[str, float] = {}
        self._settings, self._comparable, self._required = settings, comparable, required
        self._off = False
        self._trajectories: CanaryTrajectories | None = None
        self._first: Tensor | None = None
        self._train: Tensor | None = None

    def before_update(self, batch: KVBatchMeta, workers: Any) -> None:
        """Chooses the trajectories in the first batch, and scores them.

        Raises:
            HookError: they cannot be scored, and the user asked for it.
        """
        if self._trajectories is None and not self._off:
            ranks = max(workers._dispatch_info["actor"]) + 1  # verl has computed it, to balance the batch
            try:
                self._trajectories = CanaryTrajectories(batch, self._settings.trajectories or 0, ranks)
            except HookError as error:
                self._switch_off(error)
                return
            self._first = self._trajectories.score_in_workers(workers) if self._comparable else None

    def after_update(self, step: int, workers: Any) -> None:
        """Scores while the workers have the engine to themselves: at the sync they may give way to the rollout."""
        self._train = None
        if self._trajectories is not None and self.canary.is_due(step):
            self._train = self._trajectories.score_in_workers(workers)

    def after_sync(self, step: int, handles: Sequence[Any]) -> Decision:
        """Checks the sync of this step; `metrics` are what it logs.

        Raises:
            HookError: a rollout engine does not score, and the user asked for it.
        """
        self.metrics = {}
        if self._trajectories is None or self._train is None:
            return Decision()
        try:
            infer = self._trajectories.score_in_servers(handles)
        except HookError as error:
            self._switch_off(error)
            return Decision()
        if not self.canary.begun:
            if self._first is None:
                self.canary.begin(step, self._train, infer)
                return Decision()
            self.canary.begin(step - 1, self._first, [self._trajectories.l_infer_N] * len(infer))
        self.metrics, decision = self.canary.check(step, self._train, infer)
        return decision

    def _switch_off(self, error: HookError) -> None:
        if self._required:
            raise error
        self._off, self._trajectories, self._train = True, None, None
        print(f"verl_ext: weight syncs are not checked: {error}", flush=True)
