"""The learning rate of every step."""

import math

import pytest
import torch

from project.errors import UserError
from project.model import CNN
from project.optim import decay_weights_only, warmup_then_decay


def rates(num_steps: int, warmup: float, decay: str | None) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = warmup_then_decay(optimizer, num_steps, warmup, decay)
    seen = []
    for _ in range(num_steps + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def expected(step: int, decay: str | None) -> float:
    """100 steps, 20 of them warm-up."""
    if step < 20:
        return 2 * (step + 1) / 20
    done = (step - 20) / 80
    return {None: 2.0, "linear": 2 * (1 - done), "cosine": 1 + math.cos(math.pi * done)}[decay]


@pytest.mark.parametrize("decay", [None, "linear", "cosine"])
def test_the_rate_rises_linearly_then_decays_to_zero_after_the_last_step(decay):
    wanted = [expected(step, decay) for step in range(101)]
    assert rates(100, 0.2, decay) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("warmup", [0.0, 0.01, 0.02])
def test_short_warmups_reach_the_full_rate(warmup):
    assert max(rates(100, warmup, "cosine")) == 2.0


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("decay", [None, "linear", "cosine"])
def test_the_shortest_trainings_have_a_schedule(num_steps, decay):
    assert all(0 <= rate <= 2 for rate in rates(num_steps, 0.5, decay))


def test_bad_values_are_refused():
    with pytest.raises(UserError, match="linear, cosine or null"):
        rates(10, 0.1, "exponential")
    with pytest.raises(UserError, match="fraction"):
        rates(10, 5, "linear")


def test_biases_and_norms_are_not_decayed():
    net = CNN(10)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, weight_decay=0.5)
    decay_weights_only(optimizer)
    before = {name: value.clone() for name, value in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in net.named_parameters():
        factor = 0.5 if parameter.ndim > 1 else 1
        assert torch.equal(parameter, before[name] * factor), name


def test_an_optimizer_without_decay_keeps_its_one_group():
    optimizer = torch.optim.Adam(CNN(10).parameters())
    decay_weights_only(optimizer)
    assert len(optimizer.param_groups) == 1
