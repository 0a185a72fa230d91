"Timing against a pretend device, and a whole small benchmark."
import dataclasses
from pathlib import Path

import pytest
import torch

from foxhunt.bench import epochs as e
from foxhunt.bench.decide import decide
from foxhunt.core import UserError, read_json
from foxhunt.hardware.audit import named_tensors
from foxhunt.params import Params


class PretendDevice:
    "Queues at once; each piece of work takes `work` seconds on the device."
    def __init__(self, work=1.0): self.now = self.done = 0.0; self.work = work; self.waits = 0
    def queue(self): self.now += 1e-4; self.done = max(self.done, self.now) + self.work
    def wait(self): self.waits += 1; self.now = max(self.now, self.done)
    def clock(self): return self.now


class Trainer:
    name, device = "dqn", torch.device("cpu")
    def __init__(self, pretend): self.pretend, self.model = pretend, torch.nn.Linear(2, 1)
    def run_epoch(self):
        self.pretend.queue(); self.model(torch.ones(2)).sum().backward()
        return {"loss": 1.0, "grad_norm": 1.0}


def test_a_missing_synchronisation_is_caught():
    d = PretendDevice(); right = e.time_epochs(Trainer(d), 8, wait=d.wait, clock=d.clock)
    assert d.waits == 16                                   # before both clock reads, each time
    d = PretendDevice(); wrong = e.time_epochs(Trainer(d), 8, wait=lambda: None, clock=d.clock)
    assert abs(right["epoch"]["summary"]["mean"] - 1) < 1e-3 and wrong["epoch"]["summary"]["mean"] < 1e-3


def test_work_that_was_running_before_does_not_count():
    d = PretendDevice(); trainer = Trainer(d); [d.queue() for _ in range(5)]
    assert abs(e.time_epochs(trainer, 3, wait=d.wait, clock=d.clock)["epoch"]["first_epoch_s"] - 1) < 1e-3


def test_the_first_epoch_is_a_field_of_its_own():
    d = PretendDevice(); trainer = Trainer(d); run = trainer.run_epoch
    def slow_first():
        d.work = 60.0 if trainer.pretend.done == 0 else 1.0
        return run()
    trainer.run_epoch = slow_first
    r = e.time_epochs(trainer, 12, wait=d.wait, clock=d.clock, budget_s=1e9)["epoch"]
    assert r["first_epoch_s"] > 59 and abs(r["summary"]["mean"] - 1) < 1e-3 and len(r["samples"]) == 11


@pytest.fixture(scope="module")
def small():
    p = Params(); t = p.train
    f = {"stride": 32, "lookback": 32, "batch": 16}
    return dataclasses.replace(p, train=dataclasses.replace(t, dqn=dataclasses.replace(t.dqn, hidden=(16,), updates_per_epoch=4), ppo=dataclasses.replace(t.ppo, hidden=(16,), passes=1),
        mamba2=dataclasses.replace(t.mamba2, d_model=16, n_layers=1, d_state=8, head=8, **f), tft=dataclasses.replace(t.tft, hidden=8, heads=1, **f), tlob=dataclasses.replace(t.tlob, hidden=8, n_layers=1)))


def test_a_whole_benchmark_and_its_decision(small, tmp_path):
    out = tmp_path / "bench.json"
    b = e.run_benchmark(["dqn", "ppo", "mamba2", "tft", "tlob"], None, small, 7, out, "cpu", budget_s=5.0, batches=(4,), seconds=0.05, target=0.0)
    assert read_json(out)["models"].keys() == b["models"].keys() == {"dqn", "ppo", "mamba2", "tft", "tlob"}
    for name, m in b["models"].items():
        assert m["precision"] == "fp32" and len(m["data"]["hash"]) == 16 and m["inference"] and m["batch"] and m["config"]
        if name == "tlob": assert "epoch" not in m; continue
        s = m["epoch"]["summary"]
        assert s["used"] + s["warm_up"] == len(m["epoch"]["samples"]) == len(m["history"]) - 1 and m["epoch"]["stopped"] and m["health"]["trend"] in ("converging", "flat", "diverging")
        assert m["batch_scaling"][0]["samples_per_s"] > 0 and m["update"]["unit"] == "seconds per update" and m["cpu_vs_gpu"].get("why", "x")
    assert len(e.summary_rows(b)) == 5
    assert decide(b).basis == "CPU" and not decide(b).missing
    assert e.merge([{**b, "models": {"dqn": b["models"]["dqn"]}}, {**b, "models": {"ppo": b["models"]["ppo"]}}])["models"].keys() == {"dqn", "ppo"}


def test_out_of_memory_is_recorded_and_the_rest_goes_on(small, monkeypatch, tmp_path):
    real = e.bench_model
    def bench_model(name, *a, **k):
        if name == "ppo": raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB")
        return real(name, *a, **k)
    monkeypatch.setattr(e, "bench_model", bench_model)
    b = e.run_benchmark(["ppo", "dqn"], None, small, 3, tmp_path / "b.json", "cpu", batches=(4,), seconds=0.02)
    assert "out of memory" in b["models"]["ppo"]["error"] and b["models"]["dqn"]["epoch"] and "ppo" in decide(b).missing


@pytest.mark.parametrize("models, options, says", [([], {}, "no models"), (["dqn", "alstm"], {}, "unknown model"), (["dqn"], {"device": "cuda:7"}, "not there")])
def test_bad_requests(small, models, options, says):
    with pytest.raises(UserError, match=says): e.run_benchmark(models, None, small, 3, None, **({"device": "cpu"} | options))


@pytest.mark.parametrize("out, says", [("/dev/null/b.json", "cannot be written"), ("/proc/b.json", "cannot be written"), (".", "is a folder")])
def test_a_place_that_cannot_be_written_is_told_before_the_measuring(small, monkeypatch, out, says):
    monkeypatch.setattr(e, "bench_model", lambda *a, **k: pytest.fail("measured first"))
    with pytest.raises(UserError, match=says): e.run_benchmark(["dqn"], None, small, 3, out, "cpu")


def test_the_profile_holds_kernels_and_memory_over_time(small):
    b = e.run_benchmark(["ppo"], None, small, 3, None, "cpu", True, batches=(4,), seconds=0.02)["models"]["ppo"]["profile"]
    assert b["kernels"] and 0 < sum(k["share"] for k in b["kernels"]) <= 1 and len(b["memory"]) > 5 and max(r["mib"] for r in b["memory"]) > 0


def test_a_run_in_half_precision_evaluates_in_it(small):
    cpu = torch.device("cpu"); w = e.in_precision(e.spec("ppo").workload(small, e.synthetic("agent")), "bf16", cpu); m = e.build(w, cpu)
    assert {t.dtype for _, t in named_tensors(w.infer(m, w.batch(2, cpu)))} == {torch.bfloat16}


def test_a_model_without_code_is_named(monkeypatch):
    monkeypatch.setattr(e, "spec", lambda name: type("S", (), {"modules": ("foxhunt.train.nowhere",)}))
    with pytest.raises(UserError, match="tft: its code is not there .foxhunt.train.nowhere"): e.require_code("tft")


@pytest.mark.integration
def test_the_verb_loads_the_table_of_the_models_kind(tmp_path, monkeypatch):
    "A book folder for tlob, as `foxhunt train` takes it; beside other models it has a flag of its own."
    from typer.testing import CliRunner
    from foxhunt.cli import app
    from foxhunt.data.book import load_book, make_book
    from foxhunt.data.windows import load_table, save_table, synthetic_table
    from foxhunt.train.coordinator import content_hash
    book, bars, seen = tmp_path / "book", tmp_path / "bars", {}; make_book(Path(__file__).parents[1] / "data" / "book_synthetic.parquet", book); save_table(synthetic_table(512), bars)
    monkeypatch.setattr(e, "run_benchmark", lambda names, tables, *rest: seen.update(names=names, tables={k: content_hash(t) for k, t in tables.items()}) or {"models": {n: {"error": "not run"} for n in names}})
    run = lambda *args: CliRunner().invoke(app, ["bench", "--out", str(tmp_path / "bench.json"), *map(str, args)])
    want = {"book": content_hash(load_book(book)), "bars": content_hash(load_table(bars))}
    for args, kinds in ((["tlob", "--features", book], ["book"]), (["dqn,tlob", "--features", bars, "--book", book], ["bars", "book"]), (["dqn", "--features", bars], ["bars"]), (["dqn,tlob"], [])):
        assert (r := run("--models", *args)).exit_code == 0, r.output
        assert seen["tables"] == {k: want[k] for k in kinds} and seen["names"] == args[0].split(",")
    r = run("--models", "dqn,tlob", "--features", bars); assert r.exit_code == 2 and "pass --book, or take tlob alone" in r.stderr
