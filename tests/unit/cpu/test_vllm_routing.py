"""Delivery of routed experts by vLLM's CPU runner of 0.31. Its connector is a stand-in; the real one needs an
engine."""

from types import SimpleNamespace

import numpy as np
import pytest

from verl_ext.cpu import vllm as routing


class Connector:
    """Records the requests that it gets."""

    def __init__(self):
        self.steps, self.batches = [], []

    def begin_step(self, metadata):
        self.steps.append(metadata)

    def prepare_output(self, input_batch):
        self.batches.append(input_batch)
        return SimpleNamespace(enqueue_cpu_copy=self.copied, process_output=lambda: {"a": self.sampled.tolist()})

    def copied(self, num_sampled, num_rejected):
        self.sampled = num_sampled
        assert not num_rejected.any()


@pytest.fixture
def runner():
    """Two requests: one in the middle of its prompt, one that decodes."""
    return SimpleNamespace(
        execute_model_state=object(),
        input_batch=SimpleNamespace(req_ids=["a", "b"], num_computed_tokens_cpu=np.array([32, 7, 99])),
        query_start_loc=SimpleNamespace(np=np.array([0, 31, 32, 77])),
        **{routing.HELD: Connector()},
    )


def sample(runner, grammar_output):
    runner.execute_model_state = None
    runner.query_start_loc.np[:] = 0  # vLLM uses its buffers again
    return SimpleNamespace(sampled_token_ids=[[], [5]])


def test_what_a_step_was_routed_to_goes_with_its_output(runner):
    connector = getattr(runner, routing.HELD)
    metadata = object()
    scheduled_steps = []
    routing._begin(
        lambda runner, scheduled: scheduled_steps.append(scheduled),
        runner,
        SimpleNamespace(aux_output_connector_metadata=metadata),
    )
    assert connector.steps == [metadata] and len(scheduled_steps) == 1
    output = routing._attach(sample, runner, None)
    (batch,) = connector.batches
    assert batch.req_ids == ["a", "b"]
    assert batch.query_start_loc_np.tolist() == [0, 31, 32] and batch.num_computed_tokens_np.tolist() == [32, 7]
    assert output.aux_output_connector_output == {"a": [0, 1]}


def test_without_a_connector_or_a_step_the_output_is_vllms(runner):
    runner.execute_model_state = None
    assert not hasattr(routing._attach(sample, runner, None), "aux_output_connector_output")
    delattr(runner, routing.HELD)
    runner.execute_model_state = object()
    assert not hasattr(routing._attach(sample, runner, None), "aux_output_connector_output")


def test_a_compiled_engine_is_refused():
    returns_routing = SimpleNamespace(aux_output_config=SimpleNamespace(enabled=True))
    runner = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False), vllm_config=returns_routing)
    with pytest.raises(ValueError, match="enforce_eager=True"):
        routing._connect(lambda runner, cache, profiling: None, runner, None)
