"""A batch's way through the step, from its log-probabilities to its update."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.errors import HookError
from verl_ext.base.names import ADVANTAGES, HEAD_SUMS, LAG, LOSS_MASK, RESPONSE_MASK, REWARDS, ROUTER_SUMS, WEIGHTS
from verl_ext.core.filters import FilterTally, put_together
from verl_ext.core.head import head_metrics
from verl_ext.core.measure import split_gap
from verl_ext.core.tokens import Tokens, jagged
from verl_ext.guard.state import Decision
from verl_ext.trainer.active import Active
from verl_ext.trainer.batch import FIELDS, FILTER_FIELDS, filter_batch, lag_of
from verl_ext.trainer.captured import sampled_counts
from verl_ext.trainer.exchange import one_exchange
from verl_ext.trainer.in_blocks import InBlocks, Part
from verl_ext.trainer.step import (
    Judged,
    Outcome,
    judge,
    judge_before,
    judge_by_advantage,
    leave_out,
    loss_weights,
    refusal,
)
from verl_ext.trainer.transfer import of_rows

if TYPE_CHECKING:
    from verl_ext.trainer.stability_run import StabilityRun


class BatchStep:
    """Compared and judged where verl reads the batch for its advantages, filtered where it writes them.

    Compared before verl's own rejection takes the worst tokens out of response_mask: they are what is measured.
    Filtered after the advantages, because filters may ask for their sign, and because the rewards of what they drop
    still belong to its group.

    Args:
        run: whose batch it is.
        metrics: of the step; ours are added.
    """

    def __init__(self, run: "StabilityRun", batch: KVBatchMeta, metrics: dict[str, float], tokenizer: Any):
        self._run, self._batch, self._metrics, self._tokenizer = run, batch, metrics, tokenizer
        self._active = run.active
        self._judged: Judged | None = None
        self._advantages: Tensor | None = None

    @cached_property
    def _blocks(self) -> InBlocks:
        lag = lag_of(self._batch.tags, self._run.guard.step) if self._active.asynchronous else None
        return InBlocks(self._batch, lag, partial(_to_loss, self._active))

    @contextmanager
    def beside_advantages(self) -> Iterator[None]:
        """Around verl's computing of the advantages."""
        active = self._active
        if not active.compares_routing and (counts := sampled_counts(self._batch, active.config)) is not None:
            self._run.judge_routing(counts, counts.metrics, self._metrics)
        if not (active.compares_engines or active.compares_routing or self._reads_heads):
            yield
            return
        with one_exchange(self._names(), self._read, self._write):
            yield

    def finish(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Once verl has written the advantages; `batch` is what it returned of them."""
        if self._judged is None:
            return batch
        if not self._blocks.whole:
            self._settle()
        if self._run.dump is not None:
            refused = self._run.outcome.refused
            self._run.dump.write(batch, self._tokenizer, skipped=refused.reason if refused else "")
        return batch

    @property
    def _reads_heads(self) -> bool:
        return self._active.has_heads and not self._active.measures_in_update

    def _names(self) -> list[str]:
        """What is read with verl's own read: sums of trajectories, and of a batch that is one block its tokens."""
        active, names = self._active, list[str]()
        if active.compares_engines and self._blocks.whole:
            names += [*FIELDS, REWARDS, *(FILTER_FIELDS if active.filters else ())]
        names += [ROUTER_SUMS] * active.compares_routing + [HEAD_SUMS] * self._reads_heads
        return names

    def _read(self, data: TensorDict) -> None:
        """With what verl reads for the advantages."""
        run, active, metrics = self._run, self._active, self._metrics
        if active.compares_routing:
            run.compare_routing(self._batch, data, metrics)
        if self._reads_heads:
            run.judge_heads(_compared_heads(data), metrics)
        if not active.compares_engines:
            return
        if self._blocks.whole:
            self._blocks.take(data)
        metrics["critic/score/mean"] = self._blocks.mean_score()  # verl logs it after the update
        if rescored := run.take_rescored():
            rows = [self._batch.keys.index(key) for key in rescored]
            metrics.update(split_gap(self._blocks.tokens_of(rows), list(rescored.values())))
        if active.measures_in_update:
            self._blocks.pass_on()
        first = judge_before if active.measures_in_update else judge
        self._judged = first(self._blocks, metrics, active.stability, run.guard, run.actions.due)
        metrics.update(self._judged.metrics)
        run.actions.carry_out(self._judged.decision)
        if run.dump is not None:
            run.dump.look_at(self._blocks, run.guard.step)

    def _write(self, fields: TensorDict) -> dict[str, Tensor]:
        """With what verl writes of the advantages."""
        self._advantages = fields[ADVANTAGES]
        if self._judged is None or not self._blocks.whole:
            return {}
        self._blocks.take(fields)
        self._settle()
        return self._blocks.written

    def _settle(self) -> None:
        """Filter, and settle what becomes of the batch."""
        assert self._judged is not None and self._advantages is not None
        run, active, judged = self._run, self._active, self._judged
        if active.stability.breakdown and not active.measures_in_update:
            sums = self._blocks.sums_by_sign(self._advantages)
            judged, found = judge_by_advantage(judged, sums, self._metrics, active.stability, run.guard)
            run.actions.carry_out(found)
        refused = judged.decision.refusal
        run.settle(Outcome(refused) if refused or not active.filters else self._filter(), self._metrics)

    def _filter(self) -> Outcome:
        """Take what is left out of the loss out of its masks; they stay as they are where nothing would be left."""
        run, tallies, waiting = self._run, list[FilterTally](), list[tuple[Part, Tensor, Tensor]]()
        kept = self._active.stability.denominator == "kept"
        for part, data in self._blocks.read((*FIELDS, LOSS_MASK, *FILTER_FIELDS)):
            tokens = self._blocks.measured(part, data)
            view = filter_batch(tokens, part.batch.keys, data, self._active.config.actor_rollout_ref, self._tokenizer)
            left = leave_out(view, self._blocks.weight(tokens) if kept else None, self._active.stability)
            tallies.append(left)
            waiting.append((part, left.keep_N, tokens.offsets))
            tally = put_together(tallies)
            while waiting and not tally.empty:
                written, keep_N, offsets = waiting.pop()
                # verl 0.9.1 divides token-mean by the tokens of loss_mask, a copy made at rollout: both have to change.
                mask = jagged(keep_N.long(), offsets)
                self._blocks.write(written, {RESPONSE_MASK: mask, LOSS_MASK: mask})
        self._metrics.update(tally.metrics)
        for name, key in tally.examples.items():
            print(f"verl_ext: step {run.guard.step}: filter {name} dropped tokens of {key}", flush=True)
        if not tally.empty:
            return Outcome(filter_scale=tally.scale)
        refused = refusal(run.guard.step, "filters", tally.reason)
        run.actions.carry_out(Decision((refused,)))
        return Outcome(refused)


def _to_loss(active: Active, tokens: Tokens, weight: Tensor | None) -> dict[str, Tensor]:
    fields = {WEIGHTS: loss_weights(tokens, weight, active.loss_reads_k)}
    if tokens.lag is not None and active.our_loss:
        fields[LAG] = tokens.lag.buckets()[tokens.row_of_token()]
    return {name: values for name, values in fields.items() if values is not None}


def _compared_heads(data: TensorDict) -> dict[str, float]:
    """`vllm_kl/head*`, from the sums that compute_log_prob left in the batch.

    Raises:
        HookError: there are none.
    """
    if HEAD_SUMS not in data.keys():  # noqa: SIM118 (a TensorDict)
        raise HookError(
            "compute_log_prob read no heads: the rollout's batch has no sampler_head_ids",
            otherwise="check that VERL_USE_EXTERNAL_PLUGINS, where set, names verl_ext on all nodes",
        )
    return head_metrics(of_rows(data[HEAD_SUMS]))
