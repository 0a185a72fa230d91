"Twenty-five planted device mix-ups, five places in each of the five models' real workloads: each is found at its place and nowhere else."
import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

from foxhunt.hardware.audit import PLACES, audit_here, in_process
from foxhunt.train.registry import MODELS, workload


def is_float(x): return isinstance(x, torch.Tensor) and x.is_floating_point()


def left_behind(batch):
    "The last tensor of the batch stays on the host."
    leaves, form = pytree.tree_flatten(batch)
    k = max(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
    leaves[k] = torch.zeros(leaves[k].shape, dtype=leaves[k].dtype)
    return pytree.tree_unflatten(leaves, form)


def plant(w, place):
    slips = {"data": dict(batch=lambda n, device: left_behind(w.batch(n, device))),
             "train": dict(loss=lambda m, b: w.loss(m, b) + (next(m.parameters()).flatten()[:3] * torch.ones(3)).sum()),
             "eval": dict(infer=lambda m, b: next(filter(is_float, pytree.tree_leaves(w.infer(m, b)))) * torch.ones(1)),
             "load": dict(load=lambda m, state: m.load_state_dict(state, assign=True)),
             "step": dict(step=lambda m, b: pytree.tree_leaves(w.step(m, b))[0] + torch.ones(1))}
    return dataclasses.replace(w, **slips[place]) if place in slips else w


def caught(name, index):
    "Planted place -> places where a fault was found, with its kind."
    w = workload(name)
    return {p: {k: f.kind for k, f in audit_here(plant(w, p), index, updates=0).mixups.items()} for p in ("nothing", *PLACES)}


@pytest.mark.slow
@pytest.mark.unit
@pytest.mark.device
@pytest.mark.parametrize("model", MODELS)
def test_a_planted_mixup_is_found_at_its_place_only(model):
    assert in_process("test_planted_mixups:caught", model, 1) == {"nothing": {}} | {p: {p: "device"} for p in PLACES}
