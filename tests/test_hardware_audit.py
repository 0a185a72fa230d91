"The audit and the prediction from outside their notebooks: named factories, fresh interpreters, planted faults of other kinds."
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foxhunt.core import UserError
from foxhunt.hardware import memory
from foxhunt.hardware.audit import PLACES, PRETEND, Workload, audit, audit_here, can_fork, in_fork, in_fresh, named_tensors, result_from_dict


def small(**over):
    kw = dict(name="small", model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), optimizer=lambda m: torch.optim.AdamW(m.parameters()),
              batch=lambda n, d: (torch.randn(n, 8, device=d), torch.randn(n, 1, device=d)), loss=lambda m, b: F.mse_loss(m(b[0]), b[1]), infer=lambda m, b: m(b[0]),
              step=lambda m, b: m(b[0]))
    return Workload(**kw | over)


def test_a_named_factory_runs_in_a_process_of_its_own():
    r = audit("foxhunt.hardware.audit:selftest", index=1)
    assert r.ok and r.index == 1 and not hasattr(torch, PRETEND)
    fresh = result_from_dict(in_fresh("foxhunt.hardware.audit:_audit_json", "foxhunt.hardware.audit:selftest", {}, 1, "float32", 3))
    assert dataclasses.replace(fresh, seconds=r.seconds) == r
    with pytest.raises(UserError, match="write package.module:function"): audit("foxhunt.hardware.audit:nothing")


BESIDE_A_GPU = """
import dataclasses, json, torch
from foxhunt.core import UserError
from foxhunt.hardware import audit as A
from foxhunt.hardware.batch_size import search_batch
from foxhunt.hardware.device import device_report
from foxhunt.hardware.memory import largest_batch, predict
from foxhunt.train.registry import workload

def asked(**kw):
    found = dict(footprint=dataclasses.asdict(predict(NAME, **kw)), batch=search_batch(NAME, limit=64, **kw).batch)
    return found | dict(audit=dataclasses.asdict(A.audit(NAME, 1, **kw)) | dict(seconds=0))

NAME, kw, out = "foxhunt.train.registry:workload", dict(kwargs=dict(name="ppo")), {}
out["forked"] = json.loads(json.dumps(asked(**kw)))   # by a fork, where no GPU is
A.register_pretend(); out["can_fork"] = A.can_fork()
torch.ones(1, requires_grad=True).sum().backward()
report = device_report("cpu"); out["report"] = [report.ok, report.text()]
out["fresh"], out["said"] = asked(**kw), []
w = workload("ppo")
for f in (lambda: A.audit(A.selftest), lambda: predict(w), lambda: largest_batch(w)):
    try: f(); out["said"].append("nothing")
    except UserError as e: out["said"].append(str(e))
print(json.dumps(out))
"""


def test_beside_an_accelerator_named_work_runs_and_a_callable_is_told():
    "The pretend backend stands in for a GPU: torch starts its threads at the first backward pass, and no fork can train after it."
    run = subprocess.run([sys.executable, "-c", BESIDE_A_GPU], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    got = json.loads(run.stdout.splitlines()[-1])
    assert got["can_fork"] is False and got["report"][0], got["report"][1]
    assert got["fresh"] == got["forked"] and not any(p["fault"] for p in got["fresh"]["audit"]["places"])
    assert all("before any training" in s and "package.module:function" in s and "\n" not in s for s in got["said"]), got["said"]


def test_a_fork_hands_on_a_user_error_and_does_not_wait_for_ever():
    def refuse(): raise UserError("no such thing")
    with pytest.raises(UserError, match="^no such thing$"): in_fork(refuse)
    import time
    with pytest.raises(RuntimeError, match="has not ended after 0.2 s"): in_fork(time.sleep, 60, timeout=0.2)
    assert can_fork() == (not torch.accelerator.is_available())


class Hidden(nn.Module):
    "A tensor that is neither parameter nor buffer, made by numpy."
    def __init__(self): super().__init__(); import numpy as np; self.lin = nn.Linear(8, 1); self.scale = torch.from_numpy(np.ones(8, np.float32))
    def forward(self, x): return self.lin(x * self.scale)


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, g): return g * torch.ones(g.shape)      # on the host


def test_kinds_of_faults():
    cases = dict(
        hidden=small(model=Hidden, loss=lambda m, b: m(b[0]).mean(), infer=lambda m, b: m(b[0])),
        backward=small(loss=lambda m, b: BadBackward.apply(m(b[0])).mean()),
        cuda=small(infer=lambda m, b: m(b[0]).cuda()),
        numpy=small(infer=lambda m, b: m(b[0].numpy())),
        bug=small(infer=lambda m, b: m(b[1])),
        loop=small(infer=lambda m, b: [b for _ in iter(lambda: bool((b[0] > 0).any()), False)]))
    def run(): return {k: {p: (f.kind, f.source) for p, f in audit_here(w, 0, updates=0).mixups.items()} for k, w in cases.items()}
    got = in_fork(run)
    assert got["hidden"]["train"][0] == "device" and "x * self.scale" in got["hidden"]["train"][1]
    assert set(got["backward"]) == {"train"} and got["backward"]["train"][0] == "device" and "torch.ones(g.shape)" in got["backward"]["train"][1]
    assert set(got["cuda"]) == {"eval"} and set(got["numpy"]) == {"eval"}
    assert got["bug"]["eval"][0] == "error"
    assert set(got["loop"]) == {"eval"}                     # a loop on a device value ends


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_hard_coded_device(index):
    w = small(loss=lambda m, b: F.mse_loss(m(b[0]) + torch.zeros(1, device=f"{PRETEND}:0"), b[1]))
    assert ("train" in audit(w, index).mixups) == (index == 1)


def test_host_work_stays_real():
    "Numpy tables, generators and control flow of the data path run for real under the audit."
    def batch(n, d):
        import numpy as np
        table = torch.from_numpy(np.arange(80, dtype=np.float32).reshape(10, 8))
        rows = torch.arange(10)[table[:, 0] > 15]                   # a mask on the host needs no device
        assert len(rows) == 8 and table.sum().item() == 3160.0
        gen = torch.Generator(d).manual_seed(1)
        return table[rows].to(d)[torch.randint(0, 8, (n,), device=d, generator=gen)], torch.ones(n, 1, device=d)
    r = audit(small(batch=batch), 1)
    assert r.ok and r.syncs == 0 and r.places[PLACES.index("data")].transfers == 1


class Copied(nn.Module):
    "A target network as most code makes it."
    def __init__(self): super().__init__(); import copy; self.q = nn.Linear(8, 1); self.target = copy.deepcopy(self.q).requires_grad_(False)
    def forward(self, x): return self.q(x) + self.target(x).detach()


def test_no_false_alarm_for_a_deep_copy_and_a_tensor_rate():
    "What CUDA can do the pretend accelerator can do: deep copies, fused Adam with its learning rate in a tensor."
    def opt(m): return torch.optim.Adam(m.q.parameters(), lr=torch.tensor(1e-3), fused=True)
    r = audit(small(model=Copied, optimizer=opt), 1)
    assert r.ok, r.mixups


def test_named_tensors_walks_everything():
    from typing import NamedTuple
    class T(NamedTuple): a: torch.Tensor; b: dict
    @dataclasses.dataclass
    class D: x: torch.Tensor
    t = torch.zeros(1)
    assert [n for n, _ in named_tensors((t, T(t, {"k": [t]}), D(t)))] == ["[0]", "[1].a", "[1].b.k[0]", "[2].x"]


class Lstm(nn.Module):
    def __init__(self): super().__init__(); self.lstm, self.out = nn.LSTM(8, 64, batch_first=True), nn.Linear(64, 1)
    def forward(self, x): return self.out(F.silu(self.lstm(x)[0][:, -1]))


def lstm(): return Workload("lstm", Lstm, lambda m: torch.optim.Adam(m.parameters()), lambda n, d: (torch.randn(n, 24, 8, device=d), torch.randn(n, 1, device=d)),
                            lambda m, b: F.mse_loss(m(b[0]), b[1]), lambda m, b: m(b[0]), batch_size=32)


def within(real, ours, share=0.02):
    for f in dataclasses.fields(real):
        r, o = getattr(real, f.name), getattr(ours, f.name)
        assert abs(r - o) <= share * r, (f.name, r, o)


def test_law_holds_for_an_lstm():
    w = lstm(); within(memory.measure_host(w), memory.predict_host(w))


def test_law_holds_with_momentum_and_no_state():
    for opt in (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)):
        w = small(optimizer=opt, model=lambda: nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 1)), batch_size=256)
        within(memory.measure_host(w), memory.predict_host(w))


@pytest.mark.slow
@pytest.mark.parametrize("precision", memory.PRECISIONS)
@pytest.mark.parametrize("batch", [1, 16, 200])
def test_law_over_precisions_and_batches(precision, batch):
    w = small(model=lambda: nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 1)))
    within(memory.measure_host(w, batch, precision), memory.predict_host(w, batch, precision))


def test_resident_tables_count():
    "A table made before the run and moved to the device takes memory there."
    table = torch.randn(20_000, 8)
    def batch(n, d):
        resident = cache.setdefault(d, table.to(d))
        return resident[torch.randint(0, 20_000, (n,), device=d)], torch.zeros(n, 1, device=d)
    cache = {}; with_table = memory.predict(small(batch=batch)); without = memory.predict(small())
    assert with_table.categories["batch"] - without.categories["batch"] >= table.numel() * 4


def test_unknown_precision():
    with pytest.raises(UserError, match="fp32, amp, bf16, fp16"): memory.record(small(), precision="int8")


def wide(): return small(model=lambda: nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1)), batch_size=4096)


@pytest.mark.gpu
def test_prediction_on_a_gpu():
    "Within 5 % of max_memory_allocated and 10 % of max_memory_reserved."
    if not torch.cuda.is_available(): pytest.skip("no CUDA device")
    from foxhunt.hardware.audit import build, training_step
    d = torch.device("cuda", 0); card = memory.card_from_device(0)
    w, f = wide(), memory.predict("test_hardware_audit:wide", card=card)        # by name: tests before it have trained here
    torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(d)
    m = build(w, d); opt = w.optimizer(m)
    for _ in range(2): training_step(w, m, opt, w.batch(w.batch_size, d))
    torch.cuda.synchronize()
    assert abs(f.allocated / torch.cuda.max_memory_allocated(d) - 1) < 0.05
    assert abs(f.reserved / torch.cuda.max_memory_reserved(d) - 1) < 0.10
