"""Forms of an optimizer that no CPU has, and what an undo leaves; tests/stack has the engines."""

import pytest
import torch

from verl_ext.base.errors import HookError
from verl_ext.workers.undo import KeptUpdate, ScheduleSteps, UpdateParts


class Scaler:
    """A scaler of the loss in fp16."""

    def __init__(self):
        self.scale, self.growth = 1024.0, 3

    def state_dict(self):
        return {"scale": self.scale, "growth": self.growth}

    def load_state_dict(self, state):
        self.scale, self.growth = state["scale"], state["growth"]


class ScaledAdam:
    """Transformer Engine's FusedAdam with 16-bit moments: scales next to them, and the step in the group."""

    def __init__(self, weight):
        self.param_groups, self.state, self._scales = [{"params": [weight], "lr": 0.1}], {}, {}

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        (weight,) = group["params"]
        group["step"] = group.get("step", 0) + 1
        state = self.state.setdefault(weight, {"exp_avg": torch.zeros_like(weight, dtype=torch.float16)})
        scales = self._scales.setdefault(weight, {"exp_avg": torch.ones(1)})
        state["exp_avg"] += group["step"]
        scales["exp_avg"] *= 2
        weight -= group["lr"] * state["exp_avg"] * scales["exp_avg"]


class Schedule:
    num_steps = 0


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.arange(4.0))


def everything(weight, optimizer, schedule):
    (group,) = optimizer.param_groups
    held = [held.get(weight, {}).get("exp_avg") for held in (optimizer.state, optimizer._scales)]
    settings = {key: value for key, value in group.items() if key != "params"}
    numbers = [value if value is None else value.tolist() for value in (*held, weight.detach())]
    return numbers, settings, schedule.num_steps


@pytest.mark.parametrize("before", [0, 2])
def test_scales_of_moments_and_the_step_in_a_group_are_taken_back(weight, before):
    optimizer, schedule = ScaledAdam(weight), Schedule()

    def update():
        optimizer.step()
        schedule.num_steps += 1

    for _ in range(before):
        update()
    kept = KeptUpdate(UpdateParts(lambda: {"weight": weight}, dict, [optimizer], [ScheduleSteps(schedule)]))
    was = everything(weight, optimizer, schedule)
    kept.keep(7)
    update()
    update()
    moved = everything(weight, optimizer, schedule)
    assert moved != was
    assert kept.take_back(6) == 7 and everything(weight, optimizer, schedule) == was
    update()
    update()
    assert everything(weight, optimizer, schedule) == moved


@pytest.mark.parametrize(("now", "left"), [(512.0, 512.0), (2048.0, 1024.0), (1024.0, 1024.0)])
def test_a_loss_scale_that_an_overflow_lowered_stays_low(weight, now, left):
    scaler = Scaler()
    kept = KeptUpdate(UpdateParts(lambda: {"weight": weight}, dict, [torch.optim.Adam([weight])], [scaler]))
    kept.keep(1)
    scaler.scale, scaler.growth = now, 0
    assert kept.take_back(0) == 1
    assert scaler.scale == left and scaler.growth == (0 if left < 1024 else 3)


def test_buffers_are_those_before_the_first_pass(weight):
    buffer = torch.zeros(2)
    parts = UpdateParts(lambda: {"weight": weight}, lambda: {"bias": buffer}, [torch.optim.Adam([weight])], [])
    kept = KeptUpdate(parts)
    kept.begin(1)
    buffer += 1  # in the first pass, whose step is refused
    kept.begin(1)
    kept.keep(1)
    buffer += 1
    assert kept.take_back(0) == 1 and buffer.tolist() == [0, 0]


def test_a_quantised_weight_is_refused():
    class Quantised(torch.Tensor):
        pass

    weight = torch.zeros(2).as_subclass(Quantised)
    kept = KeptUpdate(UpdateParts(lambda: {"weight": weight}, dict, [], []))
    with pytest.raises(HookError, match="an update of a Quantised cannot be taken back"):
        kept.keep(1)
