"""The sync check: every tensor of a weight sync is compared where training sends it and where the rollout takes it."""

from collections.abc import Iterator, Sequence
from functools import partial

from omegaconf import OmegaConf

from verl_ext.base.errors import HookError, Problem
from verl_ext.features.feature import Demand, Engines, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.settings import RESYNC
from verl_ext.features.verl_config import DISAGGREGATED, MERGE_LORA, ROLLOUT, ROLLOUTS, rollout_name, sends_adapter

SETTING = "stability.sync_check"
WITHOUT_CHECK = (f"{SETTING}=null",)
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
QUANTIZATION = f"{ROLLOUT}.quantization"
LAYOUTS = "layouts and scales that kernels make of the weights"


def needs(run: RunFeatures) -> Iterator[Demand]:
    if run.stability.sync_check is not None:
        yield Demand(SETTING, frozenset({Need.SENT_WEIGHTS}), off=WITHOUT_CHECK)


def problems(run: RunFeatures) -> Iterator[Problem]:
    """Checks that what the rollout takes can be compared with what was sent.

    Source: verl 0.9.1. `DeltaCheckpointEngine` sends differences; `sglang_rollout.py` quantises to fp8 before it sends,
    and sends an adapter by a request of its own, which does not reach the model's `load_weights`; a disaggregated
    replica has several servers behind one handle.
    """
    if (asked := run.stability.sync_check) is None:
        return
    config, name = run.config, rollout_name(run.config)
    if name not in ROLLOUTS:
        yield _refused(f"sees the weights of {' and '.join(ROLLOUTS)}, not of {ROLLOUT}.name={name}")
        return
    if (backend := OmegaConf.select(config, BACKEND)) == "delta_sharded":
        yield _refused(f"compares whole tensors, and {BACKEND}={backend} sends differences")
    if OmegaConf.select(config, DISAGGREGATED):
        yield _refused(f"asks one server of each replica, and {DISAGGREGATED}=true makes several")
    if name == "sglang" and (format := OmegaConf.select(config, QUANTIZATION)):
        yield _refused(f"compares tensors as they were sent, and {QUANTIZATION}={format} quantises SGLang's after that")
    if sends_adapter(config, "sglang"):
        yield _refused("does not see a LoRA that SGLang takes as an adapter", MERGE_LORA)
    if asked.action == RESYNC and sends_adapter(config):
        why = f"sends no base of an adapter again, as action={RESYNC} asks: verl sends it only in the first sync"
        yield _refused(why, f"{SETTING}.action=stop")


def _refused(why: str, *fix: str) -> Problem:
    return Problem(f"{SETTING} {why}", fix=fix or WITHOUT_CHECK, leave_out=WITHOUT_CHECK)


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if (asked := run.stability.sync_check) is not None:
        proof = partial(_confirmed_record, parts_off(run))
        yield TableLine("sync check", str(asked), "both ends of a weight sync", proof=proof)


def parts_off(run: RunFeatures) -> list[str]:
    """Returns the parts of the check that are off in this run, as far as its config tells."""
    off = ["what vLLM makes of the adapter" if sends_adapter(run.config) else LAYOUTS]
    ranks = OmegaConf.select(run.config, f"{ROLLOUT}.tensor_model_parallel_size") or 1
    if rollout_name(run.config) == "sglang" and ranks > 1:
        off.append("SGLang's tensor-parallel ranks but the first")
    return off


def _confirmed_record(off: Sequence[str], engines: Engines) -> str:
    """Returns what the rollout's processes recorded of the first sync, and the parts that are off."""
    from verl_ext.upstream.sync_record import Recorded, last_record

    # In separate_async, the training ranks' own servers have no record.
    records = [Recorded(**record) for record in engines.ask(last_record) if record is not None]
    if not any(record.count for record in records):
        raise HookError(f"{SETTING}: no process of the rollout saw a tensor of the first sync", fix=WITHOUT_CHECK)
    if any(record.unwritten is None for record in records):
        off = [*off, "which parameters are written (the engine quantises them, or got only an adapter)"]
    wider = {name: dtypes for record in records for name, dtypes in record.widened.items()}
    said = [f"{max(record.count for record in records)} tensors in {len(records)} process(es) of the rollout"]
    if wider:
        (name, dtypes), *others = wider.items()
        more = f" and {len(others)} more" if others else ""
        said.append(f"kept in a wider dtype than sent: {name} ({dtypes}){more}")
    return "; ".join([*said, *(f"off: {part}" for part in off)])


def idle(run: RunFeatures) -> Iterator[Idle]:
    if run.stability.sync_check is None:
        yield Idle("sync/wrong_tensors", "no sync is checked tensor by tensor", (f"{SETTING}={{}}",))


SYNC_CHECK = Feature(needs, problems, lines=lines, idle=idle)
