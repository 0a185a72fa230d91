"The readiness matrix from outside its notebook: honest counts, planted faults, what is not run is not passed."
import dataclasses

import pytest
import torch
from typer.testing import CliRunner

from foxhunt.bench import readiness as R
from foxhunt.core import UserError
from foxhunt.params import Params
from foxhunt.train.registry import MODELS, spec, synthetic, workload

CFG = Params()
GOOD = R.Cell("fine", True, "x")
ALL = ("audit 0", "audit 1", "memory", *R.TRAINING, "bf16", "fp16", "latency", "cuda")


def test_every_check_alone_decides():
    "One failure in any check is named in its verdict, and production is never ready with it."
    for k in ALL:
        v = R.verdicts({n: GOOD for n in ALL} | {k: R.Cell("bad", False, "x", "found")})
        assert v["production_ready"] == f"no: {k}"
        assert v["training_ready"] == (f"no: {k}" if k in R.TRAINING else "yes")
        assert v["cuda_ready"] == (f"no: {k}" if k in ("audit 0", "audit 1", "cuda") else "yes (run on the GPU)")


def test_without_a_gpu_nothing_is_production_ready():
    v = R.verdicts({n: GOOD for n in ALL} | {"cuda": R.Cell("not run", None, "x")})
    assert v["production_ready"].startswith("not proven") and v["cuda_ready"] == "yes (pretend GPU 0 and 1)"


def test_every_check_has_a_next_step_and_failures_are_ordered():
    cells = {n: R.Cell("bad", False, "x", "found") for n in ALL}
    rows = R.failures({"m": cells}); order = [R.SEVERITY.index(r["severity"]) for r in rows]
    assert {r["check"] for r in rows} == set(ALL) and order == sorted(order) and all(r["next"] and r["command"] for r in rows)


def test_kinds_of_failures():
    def raises(e):
        def run(): raise e
        return R.look(run, "x")
    assert [raises(e).kind for e in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Expected all tensors to be on the same device"), ValueError("bug"))] == ["memory", "device", "error"]
    with pytest.raises(KeyboardInterrupt): raises(KeyboardInterrupt())


def broken_workload(name, params):
    w = workload(name, params); return dataclasses.replace(w, infer=lambda m, b: m.actor(b[0]) + torch.ones(11))


def test_a_planted_mixup_is_counted(monkeypatch):
    "A model that makes a tensor on the host is not CUDA ready, and its fault has a source line."
    monkeypatch.setattr(R, "WORKLOAD", "test_bench_readiness:broken_workload")
    monkeypatch.setattr(R, "latency", lambda w, device: {1: 1.0}); monkeypatch.setattr(R, "resume", lambda *a: ("skipped here", None))
    found = R.readiness(["ppo"], CFG); row, = found["matrix"]
    assert row["device_errors"] == 2 and row["cuda_ready"] == "no: audit 0, audit 1" and row["training_ready"] == "yes"
    assert found["failures"][0]["severity"] == "critical" and "torch.ones(11)" in found["failures"][0]["found"]
    assert row["passed"] == f"{sum(c['ok'] is True for c in found['cells']['ppo'].values())}/{sum(c['ok'] is not None for c in found['cells']['ppo'].values())}"


@pytest.mark.parametrize("kept, ok", [(0, True), (512, False)])
def test_memory_that_does_not_come_back_fails_the_row(kept, ok, monkeypatch):
    "The count alone, with the card's counters replaced: the updates run on the host."
    counted = iter([1_000, 1_000 + kept])
    monkeypatch.setattr(R, "held", lambda d: next(counted))
    for name, value in {"reset_peak_memory_stats": None, "max_memory_allocated": 1_000 + R.MIB, "get_device_name": "a card"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda d, value=value: value)
    said, fine = R.on_card(workload("ppo", CFG), R.HOST)
    assert fine is ok and "peak 1 MiB" in said and ("512 bytes are not given back" in said) != ok and ("all given back" in said) == ok


@pytest.mark.gpu
def test_memory_comes_back_on_a_gpu():
    "Whatever an earlier model kept, this one leaves nothing; a tensor held by somebody is found."
    d = torch.device("cuda", 0); w = workload("ppo", CFG); kept = []
    assert R.on_card(w, d)[1]
    said, ok = R.on_card(dataclasses.replace(w, loss=lambda m, b: kept.append(b) or w.loss(m, b)), d)
    assert not ok and "bytes are not given back" in said


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_training_ready(model):
    row, = R.readiness([model], CFG)["matrix"]
    assert row["training_ready"] == "yes" and row["cuda_ready"].startswith("yes") and row["device_errors"] == row["out_of_memory"] == 0


@pytest.mark.parametrize("model", ("dqn", "tlob"))
def test_causality_finds_a_leak_in_the_data(model, monkeypatch):
    "A state that looks one row ahead."
    s = spec(model); table = synthetic(s.kind, CFG.seed); w = s.workload(CFG, table); real = R.seen_at
    assert R.causality(model, w, CFG, table)[1]
    monkeypatch.setattr(R, "seen_at", lambda name, params, t, row: real(name, params, t, row + 1))
    said, ok = R.causality(model, w, CFG, table)
    assert not ok and "input changes by 0 " not in said


def test_tests_are_counted_as_written(tmp_path):
    (tmp_path / "test_dqn.py").write_text("import pytest\n@pytest.mark.unit\n@pytest.mark.device\ndef test_x(): pass\ndef test_y(): pass\n")
    (tmp_path / "test_other.py").write_text("import pytest\n@pytest.mark.integration\ndef test_tft_and_ppo(): pass\n@pytest.mark.unit\ndef test_none(): pass\n")
    c = R.count_tests(tmp_path, MODELS)
    assert dict(c["dqn"]) == dict(unit=1, integration=0, device=1, checkpoint=0) and c["tft"]["integration"] == c["ppo"]["integration"] == 1 and sum(c["mamba2"].values()) == 0


def test_bad_input():
    with pytest.raises(UserError, match="^unknown model 'dqm'; did you mean dqn"): R.readiness(["dqm"], CFG)
    from foxhunt.cli import app
    r = CliRunner().invoke(app, ["readiness", "--models", "lstm", "--out", "never.json"])
    assert r.exit_code == 2 and len(r.output.strip().splitlines()) == 1 and "unknown model 'lstm'" in r.output
