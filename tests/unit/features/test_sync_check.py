"""The runs in which the sync check can act, and what the start-up table shows of it."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from tests.support.problems import check_run, features_of
from verl_ext.base.errors import ConfigError, HookError
from verl_ext.features.feature import Engines
from verl_ext.features.sync_check import LAYOUTS
from verl_ext.features.table import table_lines, verify
from verl_ext.trainer.trainers import StabilityTrainerSync, classes_of_workers
from verl_ext.upstream import engine_calls
from verl_ext.upstream.sync_record import Recorded

ON, ROLLOUT = "stability.sync_check={}", "actor_rollout_ref.rollout"
VLLM, SGLANG = f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.name=sglang"
LORA = "actor_rollout_ref.model.lora_rank=8"


@pytest.fixture
def asked(compose):
    """asked(overrides...) -> the run's features."""

    def asked(*overrides):
        config = compose("actor_rollout_ref.actor.strategy=fsdp2", "algorithm.adv_estimator=grpo", *overrides)
        return features_of(config, read_model=False)

    return asked


@pytest.mark.parametrize(
    "overrides", [(VLLM,), (SGLANG,), (VLLM, LORA), (SGLANG, LORA, "++actor_rollout_ref.model.lora.merge=true")]
)
def test_it_is_accepted_where_both_ends_are_seen(asked, overrides):
    check_run(asked(*overrides, ON))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (f"{ROLLOUT}.name=trtllm", "sees the weights of vllm and sglang, not of"),
        (f"{VLLM} {ROLLOUT}.checkpoint_engine.backend=delta_sharded", "delta_sharded sends differences"),
        (f"{VLLM} ++{ROLLOUT}.disaggregation.enabled=true", "asks one server of each replica"),
        (f"{SGLANG} {ROLLOUT}.quantization=fp8", "fp8 quantises SGLang's after that"),
        (f"{SGLANG} {LORA}", "does not see a LoRA that SGLang takes as an adapter"),
        (f"{VLLM} {LORA} stability.sync_check.action=resync", "sends no base of an adapter again, as action=resync"),
    ],
)
def test_it_is_refused_where_one_end_is_not_seen(asked, overrides, said):
    with pytest.raises(ConfigError) as error:
        check_run(asked(*overrides.split(), ON))
    assert "stability.sync_check " in str(error.value) and said in str(error.value)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("{}", "the first sync; warn"),
        ("{every:1,action:stop}", "the first sync and each later one; stop"),
        ("{every:20,action:resync}", "the first sync, then every 20 steps; resync"),
    ],
)
def test_its_settings_are_shown(asked, given, shown):
    (check,) = (one for one in table_lines(asked(f"stability.sync_check={given}")) if one.name == "sync check")
    assert check.setting == shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{every:-1}", "stability.sync_check.every=-1 must be a number of steps"),
        ("{action:skip}", "stability.sync_check.action"),
        ("{often:1}", "stability.sync_check.often is not known"),
        ("true", "stability.sync_check=True must be a mapping"),
    ],
)
def test_other_values_are_refused(asked, given, said):
    with pytest.raises(ConfigError) as error:
        asked(f"stability.sync_check={given}")
    assert said in str(error.value)


def test_the_workers_that_record_are_ours(asked):
    assert classes_of_workers(asked(ON)) and not classes_of_workers(asked())


def test_a_rule_on_wrong_tensors_needs_the_check_and_no_canary(asked):
    rule = "stability.guard.rules.sync={signal:sync/wrong_tensors,above:0,action:rollback}"
    check_run(asked(rule, ON, "trainer.save_freq=5"))
    with pytest.raises(ConfigError) as error:
        check_run(asked(rule, "trainer.save_freq=5"))
    assert "sync/wrong_tensors is not logged" in str(error.value) and "set stability.sync_check={}" in str(error.value)


@pytest.fixture
def row_of(asked, monkeypatch):
    """row_of(overrides, records...) -> the place in the start-up table, with these records of the rollout."""

    def row(overrides, *records):
        answers = [None if record is None else asdict(record) for record in records]
        monkeypatch.setattr(engine_calls, "call", lambda server, function: answers)
        engines = Engines(None, [SimpleNamespace(server_handles=["server"])])
        return verify(asked(*overrides.split(), ON), StabilityTrainerSync, engines)[-1].where

    return row


SEEN = Recorded(163, 7, unwritten={})
WIDENED = replace(SEEN, widened={"a.bias": "bfloat16 to float32", "b": ""})
TENSOR_2 = f"{ROLLOUT}.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("overrides", "records", "processes", "more"),
    [
        (VLLM, (SEEN, SEEN), 2, f"; off: {LAYOUTS}"),
        (VLLM, (None, SEEN), 1, f"; off: {LAYOUTS}"),
        (VLLM, (Recorded(163, 7),), 1, f"; off: {LAYOUTS}; off: which parameters are written ("),
        (f"{VLLM} {LORA}", (SEEN,), 1, "; off: what vLLM makes of the adapter"),
        (f"{SGLANG} {TENSOR_2}", (SEEN,), 1, f"; off: {LAYOUTS}; off: SGLang's tensor-parallel ranks but the first"),
        (VLLM, (WIDENED,), 1, "; kept in a wider dtype than sent: a.bias (bfloat16 to float32) and 1 more"),
    ],
)
def test_the_table_says_what_was_seen_and_what_is_off(row_of, overrides, records, processes, more):
    seen, found, rest = row_of(overrides, *records).partition(" of the rollout")
    assert seen == f"163 tensors in {processes} process(es)" and found
    assert rest.startswith(more)


def test_a_rollout_that_recorded_nothing_stops_the_run(row_of):
    for records in ((), (None,), (Recorded(0, 0),)):
        with pytest.raises(HookError, match="no process of the rollout saw a tensor"):
            row_of(VLLM, *records)
