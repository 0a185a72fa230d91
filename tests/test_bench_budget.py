"The budget from outside its notebook: every batch from two recordings, the seed's arithmetic, bad input."
import dataclasses, json

import pytest
from typer.testing import CliRunner

from foxhunt.bench.budget import LIMIT, Case, batch_of, budget_report, read_measured, footprint, largest_of, record_all, stretch, the_card
from foxhunt.bench.epochs import run_benchmark
from foxhunt.core import UserError
from foxhunt.hardware.memory import CARDS, MIB, Trace, static_footprint
from foxhunt.params import Params
from foxhunt.train.registry import MODELS

CFG, CARD = Params(), CARDS["RTX 3050 Ti Laptop"]
EVERY = tuple(m if m == "mamba2" else pytest.param(m, marks=pytest.mark.slow) for m in MODELS)


@pytest.mark.parametrize("model", EVERY)
def test_sizes_are_linear_in_the_batch(model):
    "A recording at four times the batch equals the line through two others; recorded and drawn agree to 1 %."
    b = batch_of(model, CFG) // (1 if model == "tft" else 2)       # with fewer rows TFT takes several variables at a time: another program, and no line
    cases = [Case(model, batch=n) for n in (b, 2 * b, 4 * b)]
    one, two, four = (record_all(cases, CFG)[c] for c in cases)
    line = stretch(one, two, (b, 2 * b), 4 * b)
    assert line is not None
    drawn, direct = footprint(line, cases[2], 4 * b, CARD), footprint(four, cases[2], 4 * b, CARD)
    assert abs(drawn.allocated / direct.allocated - 1) < 0.01 and abs(drawn.reserved / direct.reserved - 1) < 0.05


def test_the_largest_batch_grows_with_the_card():
    a, b = record_all([Case("mamba2", batch=n, length=16) for n in (32, 64)], CFG).values()
    found = [largest_of(a, b, (32, 64), the_card(gb)) for gb in (0.45, 0.6, 1, 4)]
    assert found == sorted(found) and 0 < found[0] < found[2] <= LIMIT


def test_a_case_that_cannot_run_says_why(monkeypatch):
    from foxhunt.bench import budget
    def fail(c, params): raise RuntimeError("mat1 and mat2\n must have the same dtype")
    monkeypatch.setattr(budget, "recorded", fail)
    assert record_all([Case("ppo")], CFG) == {Case("ppo"): "RuntimeError: mat1 and mat2 must have the same dtype"}
    with pytest.raises(UserError, match="^ppo: its training step fails .*foxhunt audit --models ppo"): budget_report(["ppo"], CFG)


def test_one_recording_fails_and_the_rest_stands(monkeypatch):
    from foxhunt.bench import budget
    trace, = record_all([Case("mamba2", batch=8, length=16)], CFG).values()
    def half(c, params):
        if c.precision == "bf16": raise RuntimeError("no bf16 here")
        return trace
    monkeypatch.setattr(budget, "recorded", half)
    t = budget_report(["mamba2"], CFG)["tables"]
    assert {r["precision"] for r in t["Predicted peak of a training update"]} == {"fp32", "amp"}
    assert {r["error"] for r in t["Cannot be trained so"]} == {"RuntimeError: no bf16 here"}
    assert {r["precision"] for r in t["Training plans"]} == {"fp32", "amp"}


def test_the_seeds_footprint():
    "6.07, 1.54 and 3.05 MB (seed 004): two networks of 791,051 values and a batch of 32 x 256."
    assert [round(v, 2) for v in static_footprint(791_051, 2, 32 * 256).values()] == [6.07, 1.54, 3.05]


def test_sequences_that_differ_are_not_stretched():
    assert stretch(Trace([(4, 0)], {0: "batch"}), Trace([(8, 0), (4, 1)], {0: "batch", 1: "batch"}), (1, 2), 4) is None
    assert stretch(Trace([(4, 0)], {0: "batch"}), Trace([(8, 0)], {0: "other"}), (1, 2), 4) is None
    assert stretch(Trace([(4, 0), (-4, 0)], {0: "batch"}), Trace([(8, 0), (-8, 0)], {0: "batch"}), (1, 2), 5).events == [(20, 0), (-20, 0)]


def test_times_come_from_a_real_benchmark_file(tmp_path):
    small = dataclasses.replace(CFG, train=dataclasses.replace(CFG.train, dqn=dataclasses.replace(CFG.train.dqn, hidden=(16,), updates_per_epoch=4, epochs=7)))
    bench = run_benchmark(["dqn"], None, small, 4, tmp_path / "bench.json", "cpu", batches=(4,), seconds=0.02)
    summary = bench["models"]["dqn"]["epoch"]["summary"]
    assert read_measured([tmp_path / "bench.json"], ["dqn", "tft"], small).seconds == {"dqn": 7 * summary["mean"]} and summary["mean"] > 0
    bench["models"] = {"dqn": {"model": "dqn", "error": "out of memory"}}; (tmp_path / "failed.json").write_text(json.dumps(bench))
    assert read_measured([tmp_path / "failed.json"], ["dqn"], small).seconds == {}


GOOD = {"device": {"gpu": None}, "machine": {"cpu": "a slow CPU"}, "models": {"ppo": {"epoch": {"summary": {"mean": 2.0}}}, "dqn": {"inference": [{"batch": 1, "summary": {"p50": 0.002}}]}}}


def test_whose_times_they_are_is_said(tmp_path):
    "Times of a CPU under the memory of a card: the plans name the CPU, and the DQN's latency meets its threshold."
    f = tmp_path / "b.json"; f.write_text(json.dumps(GOOD)); r = budget_report(["ppo"], CFG, benches=[f])
    assert r["measured_on"] == "a slow CPU" and any("measured on a slow CPU" in line for line in r["plans"]) and r["seconds"] == {"ppo": 2.0 * CFG.train.ppo.epochs}
    assert read_measured([f], ["ppo"], CFG).latency_ms == 2.0


def test_several_benchmarks_are_of_one_device_and_of_different_models(tmp_path):
    one, two = tmp_path / "ppo.json", tmp_path / "tft.json"; one.write_text(json.dumps(GOOD))
    say = lambda model, cpu: two.write_text(json.dumps({"device": {"gpu": None}, "machine": {"cpu": cpu}, "models": {model: {"epoch": {"summary": {"mean": 3.0}}}}}))
    say("tft", "a slow CPU"); got = read_measured([two, one], ["ppo", "tft"], CFG)
    assert got.seconds == {"ppo": 2.0 * CFG.train.ppo.epochs, "tft": 3.0 * CFG.train.tft.epochs} and got.latency_ms == 2.0
    say("ppo", "a slow CPU")
    with pytest.raises(UserError, match="tft.json: ppo measured twice"): read_measured([one, two], ["ppo"], CFG)
    say("tft", "a quick CPU")
    with pytest.raises(UserError, match="tft.json: measured on a quick CPU, the others on a slow CPU"): read_measured([one, two], ["ppo", "tft"], CFG)


@pytest.mark.parametrize("text, says", [("NaN", "is nan"), ("-1", "is -1"), ("0", "is 0"), ('"2"', "is '2'"), ("true", "is True"), ("null", "is None"), ("Infinity", "is inf")])
def test_a_time_that_is_none(tmp_path, text, says):
    f = tmp_path / "b.json"; f.write_text(json.dumps(GOOD).replace("2.0", text))
    with pytest.raises(UserError, match=f"b.json: ppo: mean epoch {says}; expected seconds"): read_measured([f], ["ppo"], CFG)


@pytest.mark.parametrize("broken", [{"device": None}, {"machine": {}}, {"models": {"ppo": {"epoch": None}}}, {"models": {"ppo": 3}}, {"models": {"ppo": {"epoch": {}}}}])
def test_a_damaged_benchmark(tmp_path, broken):
    f = tmp_path / "b.json"; f.write_text(json.dumps(GOOD | broken))
    with pytest.raises(UserError, match="b.json: damaged"): read_measured([f], ["ppo"], CFG)


@pytest.mark.parametrize("gb", [float("nan"), float("inf"), -1, 0, 4096])
def test_a_card_of_no_size(gb):
    "4096 are MiB: wrong units are told."
    with pytest.raises(UserError, match="--vram-gb .*: expected the card's memory in GB"): the_card(gb)


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match="^unknown model 'lstm'; known: dqn, ppo"): budget_report(["lstm"], CFG)
    with pytest.raises(UserError, match="CUDA context alone takes 420 MiB"): the_card(0.2)
    bad = tmp_path / "bench.json"; bad.write_text(json.dumps({"rows": []}))
    with pytest.raises(UserError, match="no `models` in it"): read_measured([bad], ["ppo"], CFG).seconds
    with pytest.raises(UserError, match="missing.json"): read_measured([tmp_path / "missing.json"], ["ppo"], CFG).seconds
    assert the_card(4).memory == 4096 * MIB


def test_the_verb_refuses_in_one_line():
    from foxhunt.cli import app
    r = CliRunner().invoke(app, ["budget", "--models", "lstm"])
    assert r.exit_code == 2 and len(r.output.strip().splitlines()) == 1 and "unknown model 'lstm'" in r.output
