"""Calls of SGLang's schedulers, and the states that they record, with stand-ins for a scheduler and its model's runner.

The real ones, and vLLM's, run in tests/stack.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from verl_ext.base.errors import HookError
from verl_ext.upstream import engine_calls, engine_states
from verl_ext.upstream.engine_calls import CALL, answer_in_scheduler
from verl_ext.upstream.engine_states import read_states

IO_STRUCT = "sglang.srt.managers.io_struct"


@pytest.fixture(autouse=True)
def sglangs_answer(monkeypatch):
    """Provides the class of SGLang's answers, also if SGLang is not installed."""
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    io_struct = ModuleType(IO_STRUCT)
    io_struct.GetInternalStateReqOutput = SimpleNamespace
    monkeypatch.setitem(sys.modules, IO_STRUCT, io_struct)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.mlp.gate = torch.nn.Linear(4, 8)

    def forward(self, hidden, residual):
        hidden = self.mlp(self.self_attn(hidden))
        self.mlp.gate(hidden)
        return hidden, residual.add_(1)  # in place, as fused norms do


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.layers, self.norm = torch.nn.Embedding(9, 4), torch.nn.ModuleList([Layer()]), Norm()

    def forward(self, ids):
        embedded = self.embed_tokens(ids)
        hidden, residual = self.layers[0](embedded, embedded)
        return self.norm(hidden + residual)


class Norm(torch.nn.Module):
    def forward(self, hidden):
        return 2 * hidden


class Runner:
    def __init__(self, tp_size=1, dp_size=1, **arguments):
        self.model, self.tp_size = torch.nn.Module(), tp_size
        self.server_args = SimpleNamespace(dp_size=dp_size, **arguments)
        self.model.model = Model()

    def forward(self, forward_batch, skip=False):
        return self.model.model(forward_batch.ids)


def batch(*ids, extends=True):
    mode = SimpleNamespace(is_extend=lambda: extends)
    return SimpleNamespace(ids=torch.tensor(ids), forward_mode=mode)


@pytest.fixture
def scheduler():
    """scheduler(settings of its runner...) -> one whose `get_internal_state` is ours."""
    undos = []

    def make(**settings):
        class Scheduler:
            def __init__(self):
                self.tp_worker = SimpleNamespace(model_runner=Runner(**settings))

            def get_internal_state(self, recv_req):
                return "SGLang's own"

        undos.append(answer_in_scheduler(SimpleNamespace(Scheduler=Scheduler, __name__="scheduler")))
        return Scheduler()

    yield make
    for undo in undos:
        undo()


def ask(scheduler, function):
    asked = SimpleNamespace(**{CALL: (f"{engine_states.__name__}:{function}",)})
    ((answer,),) = scheduler.get_internal_state(asked).internal_state.values()
    return answer


@torch.no_grad()
def test_passes_over_prompts_are_recorded_and_no_others(scheduler):
    made = scheduler()
    runner = made.tp_worker.model_runner
    embedded = runner.model.model.embed_tokens(torch.tensor([1, 2, 3])).clone()
    runner.forward(batch(7, 8))
    assert ask(made, "begin") is None
    runner.forward(batch(1, 2, 3), skip=True)
    runner.forward(batch(4, extends=False))
    runner.forward(batch(5, 6))
    passes = read_states(ask(made, "end"))
    assert set(passes) == {"embedding", "0.attention", "0.router", "0.experts", "0.layer", "norm"}
    assert [len(part) for part in passes["norm"]] == [3, 2]
    assert torch.equal(passes["embedding"][0], embedded), "what came later changed the model's tensor, in place"
    assert torch.equal(passes["norm"][0], 2 * passes["0.layer"][0])
    assert "forward" not in vars(runner), "the runner is as it was"


def test_another_request_for_the_state_is_sglangs(scheduler):
    assert scheduler().get_internal_state(SimpleNamespace()) == "SGLang's own"


@pytest.mark.parametrize(("fused", "layers"), [(False, {"0.layer"}), (True, set())])
@torch.no_grad()
def test_with_tensor_parallelism_parts_of_a_sum_are_left_out(scheduler, fused, layers):
    made = scheduler(tp_size=2, enable_flashinfer_allreduce_fusion=fused)
    ask(made, "begin")
    made.tp_worker.model_runner.forward(batch(1, 2))
    assert set(read_states(ask(made, "end"))) == {"embedding", "0.router", "norm"} | layers


@torch.no_grad()
def test_with_data_parallelism_each_scheduler_has_some_of_the_sequences_and_none_is_taken(scheduler):
    made = scheduler(dp_size=2)
    ask(made, "begin")
    made.tp_worker.model_runner.forward(batch(1, 2))
    assert read_states(ask(made, "end")) == {}


def handle_of(server):
    """An actor whose calls run here."""

    def remote(function, *args):
        return function(server, *args)

    return SimpleNamespace(__ray_call__=SimpleNamespace(remote=remote))


def test_an_engine_without_the_plugin_does_not_answer(monkeypatch):
    monkeypatch.setattr("ray.get", lambda value, **_: value)
    monkeypatch.setattr(engine_calls, "_ask", lambda *_: [("of one that answers",), None])
    with pytest.raises(HookError, match=r"does not answer verl_ext.upstream.engine_states:begin: is"):
        engine_states.begin_states(handle_of(SimpleNamespace()))
