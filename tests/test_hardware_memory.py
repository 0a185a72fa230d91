"The law of the memory prediction on the five models themselves: what torch's profiler records for the real step."
import dataclasses

import pytest
import torch
from torch import nn

from foxhunt.hardware import memory
from foxhunt.hardware.audit import Workload, in_fork
from foxhunt.train.registry import MODELS, workload


def within(real, ours, share=0.02):
    for f in dataclasses.fields(real):
        r, o = getattr(real, f.name), getattr(ours, f.name)
        assert abs(r - o) <= share * r, (f.name, r, o)


@pytest.mark.parametrize("model", MODELS)
def test_every_category_within_two_percent(model):
    w = workload(model); within(memory.measure_host(w), memory.predict_host(w))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ("amp", "bf16"))
@pytest.mark.parametrize("model", MODELS)
def test_other_precisions_within_two_percent(model, precision):
    w = workload(model); within(memory.measure_host(w, precision=precision), memory.predict_host(w, precision=precision))


def both(w, **kw): return [memory.record(w, whole=q, **kw) for q in (False, True)]


@pytest.mark.parametrize("model", ("ppo", pytest.param("dqn", marks=pytest.mark.slow), "mamba2", *(pytest.param(m, marks=pytest.mark.slow) for m in ("tft", "tlob"))))
def test_the_second_update_is_the_first_again(model):
    "The copied update has the very events of a recorded one."
    copied, whole = in_fork(both, workload(model))
    assert copied.events == whole.events and copied.category == whole.category and copied.marks == whole.marks


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_second_update_under_autocast(model):
    "Autocast drops its weight copies in an order of its own; sizes and peaks are the same."
    copied, whole = in_fork(lambda: both(workload(model), precision="amp"))
    assert sorted(copied.events) == sorted(whole.events) and copied.peak()[0] == whole.peak()[0]


class Sliced(nn.Module):
    "One parameter whose gradient is a slice of a much larger one, joined by a second share: the real engine adds them into a new tensor."
    def __init__(self): super().__init__(); self.bias, self.big = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(4096, 8))
    def forward(self, x): return (torch.cat((self.bias[None], self.big)) @ x).square().sum() + torch.stack((self.bias, self.bias * 2)).sum()


def test_a_sliced_gradient_does_not_keep_its_whole():
    w = Workload("sliced", Sliced, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda n, d: (torch.randn(8, n, device=d),), lambda m, b: m(b[0]), None, batch_size=4)
    real, ours = memory.measure_host(w), memory.predict_host(w)
    within(real, ours)


class Keeps(nn.Module):
    "Makes its mask in the first forward pass and keeps it."
    def __init__(self): super().__init__(); self.lin, self.mask = nn.Linear(8, 64), None
    def forward(self, x):
        if self.mask is None: self.mask = torch.ones(512, 64, device=x.device)
        return self.lin(x) * self.mask[: len(x)]


def test_what_a_model_keeps_is_made_once():
    w = Workload("keeps", Keeps, lambda m: torch.optim.AdamW(m.parameters()), lambda n, d: (torch.randn(n, 8, device=d),), lambda m, b: m(b[0]).mean(), None, batch_size=16)
    copied, whole = in_fork(both, w)
    assert copied.events == whole.events and sum(b == 512 * 64 * 4 for b, _ in copied.events) == 1
