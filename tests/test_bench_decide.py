"Rules, costs and prices; the earlier document's arithmetic where it is right."
import copy, json, re
from datetime import date

import numpy as np
import pytest

from foxhunt.bench.epochs import merge
from foxhunt.bench.decide import cloud_cost, decide, hours_for, lines, local_cost, measured_speedup, model_rows, money, read_bench
from foxhunt.bench.prices import load_prices
from foxhunt.core import UserError, jsonable

PRICES = load_prices(today=date(2026, 8, 1))
LAPTOP = "NVIDIA GeForce RTX 3050 Ti Laptop GPU"


def bench(gpu=LAPTOP, scale=1.0, leave_out=(), peak=500.0):
    rng, models = np.random.default_rng(0), {}
    for name, s in (("dqn", 0.03), ("ppo", 0.18), ("mamba2", 1.2), ("tft", 0.5)):
        if name not in leave_out:
            models[name] = {"model": name, "batch": 32, "precision": "fp32", "config": {}, "data": {"hash": "x"}, "epoch": {"samples": (s * scale * (1 + 0.03 * rng.standard_normal(60))).tolist()},
                            "health": {"stable": True, "warnings": []}, "memory": {"device_used_mib": peak if gpu else None, "reserved_mib": None}}
    return {"format": "foxhunt-bench-1", "device": {"type": "cuda" if gpu else "cpu", "name": "cuda:0" if gpu else "cpu", "gpu": gpu}, "machine": {"cpu": "a CPU"}, "models": models}


def test_arithmetic_of_the_earlier_document():
    g4dn = PRICES.offer("g4dn.xlarge")
    assert round((1000 * 0.149e-3 + 2000 * 0.1819) / 3600, 3) == 0.101
    assert [money(local_cost(h, PRICES)) for h in (0.101, 48)] == ["$0.0023", "$1.08"]
    assert [money(cloud_cost(h, g4dn)) for h in (0.101, 24, 48)] == ["$0.053", "$12.62", "$25.25"]


@pytest.mark.parametrize("gone", [("tft",), ("mamba2", "tft"), ("dqn", "ppo", "mamba2", "tft")])
def test_a_missing_model_makes_it_incomplete_by_name(gone):
    d = decide(bench(leave_out=gone), {}, PRICES)
    assert d.recommendation == "incomplete" and set(d.missing) == set(gone) and all(m in lines(d)[0] for m in gone) and not d.all_stable
    assert {r["model"] for r in model_rows(d)} == {"dqn", "ppo", "mamba2", "tft"}


def test_a_model_that_failed_is_missing_and_its_error_is_shown():
    b = bench(leave_out=("tft",)); b["models"]["tft"] = {"model": "tft", "error": "out of memory: 4 GiB"}
    d = decide(b, {}, PRICES)
    assert d.missing == ("tft",) and any("out of memory" in w for w in d.warnings)


@pytest.mark.parametrize("scale, answer", [(1, "local"), (22, "your choice"), (40, "your choice"), (60, "cloud")])
def test_rules(scale, answer): assert decide(bench(scale=scale), {}, PRICES).recommendation == answer


def test_buffer_and_deadline():
    b = bench(scale=22)
    assert decide(b, {}, PRICES, buffer=0.0).recommendation == "local" and decide(b, {}, PRICES, deadline=28).recommendation == "local" and decide(b, {}, PRICES, deadline=20).recommendation == "cloud"
    for bad in ({"buffer": -0.1}, {"deadline": 0}, {"deadline": -3}, *({k: x} for k in ("buffer", "deadline") for x in (float("nan"), float("inf")))):
        with pytest.raises(UserError, match=f"--{[*bad][0]}"): decide(b, {}, PRICES, **bad)


def test_numbers_that_are_none():
    "NaN is below no limit and above none: it must not slip through a comparison."
    for s in (float("nan"), float("inf"), 0, -1):
        with pytest.raises(UserError, match="--speedup: g4dn.xlarge"): decide(bench(), {}, PRICES, speedup={"g4dn.xlarge": s})
    with pytest.raises(UserError, match="nothing to decide"): decide(bench(), dict.fromkeys(("dqn", "ppo", "mamba2", "tft"), 0), PRICES)


@pytest.mark.parametrize("name, gpu, same", [("RTX 3050", "NVIDIA GeForce RTX 3050 Ti Laptop GPU", False), ("rtx3050-ti laptop", LAPTOP, True), ("T4", "Tesla T4", True), ("H100", "NVIDIA H100 80GB HBM3", False)])
def test_a_card_is_known_by_its_whole_name(name, gpu, same):
    import dataclasses
    assert (decide(bench(gpu), {}, dataclasses.replace(PRICES, local=name)).basis == "local GPU") == same


def test_the_data_behind_the_hours_is_named():
    b = bench()
    for m in b["models"].values(): m["data"] = {"hash": "x", "rows": 6225, "unit": "bars", "synthetic": None}
    assert any("6,225 bars" in r for r in decide(b, {}, PRICES).reasons) and not decide(b, {}, PRICES).warnings
    b["models"]["tft"]["data"] = {"hash": "y", "rows": 4096, "unit": "bars", "synthetic": "random walk"}
    warnings = " | ".join(decide(b, {}, PRICES).warnings)
    assert "tft: measured on a synthetic table" in warnings and "dqn, ppo, mamba2 on 6,225 bars; tft on 4,096 bars" in warnings


def test_hours_of_two_machines_do_not_add_up():
    one, two = (bench(None, leave_out=gone) for gone in (("dqn", "ppo"), ("mamba2", "tft")))
    assert not decide(merge([one, two]), {}, PRICES).missing
    with pytest.raises(UserError, match="two devices: .*a CPU.* and .*another"): merge([one, two | {"machine": {"cpu": "another"}}])


def test_what_would_change_a_cloud_answer_is_something_that_changes_it():
    "A missed deadline within hours: no talk of 24 h."
    d = decide(bench(), {}, PRICES, deadline=0.1)
    assert d.recommendation == "cloud" and any("deadline of" in c for c in d.would_change) and not any("below 24 h" in c for c in d.would_change)


@pytest.mark.parametrize("gpu", [None, "NVIDIA H200", "Tesla T4", "NVIDIA GeForce RTX 3050 Laptop GPU", "NVIDIA GeForce RTX 3050 Ti"])
def test_no_other_device_counts_as_the_local_gpu(gpu):
    for scale in (1, 40, 100):
        d = decide(bench(gpu, scale), {}, PRICES)
        assert d.local_gpu_hours is None and d.recommendation == ("local" if gpu is None and scale == 1 else "incomplete") and "unknown" in lines(d)[1]


def test_speedup_is_unknown_unless_measured_or_given():
    d = decide(bench(scale=60), {}, PRICES)
    assert all(c.speedup is None and c.hours is None and c.usd is None and c.usd_per_hour_saved is None for c in d.cloud) and "unknown" in " ".join(d.reasons)
    k = measured_speedup(bench(scale=6), bench("Tesla T4", scale=2)); assert abs(k - 3) < 1e-9
    c = {c.name: c for c in decide(bench(scale=60), {}, PRICES, speedup={"g4dn.xlarge": k}).cloud}["g4dn.xlarge"]
    assert abs(c.hours * 3 - d.hours) < 1e-9 and abs(c.usd_per_hour_saved - (c.usd - d.local_usd) / (d.hours - c.hours)) < 1e-12
    other = bench("Tesla T4"); other["models"]["tft"]["batch"] = 4
    with pytest.raises(UserError, match="tft was measured with another batch"): measured_speedup(bench(), other)
    with pytest.raises(UserError, match="tft not measured there"): measured_speedup(bench(), bench(leave_out=("tft",)))


def test_the_card():
    assert decide(bench(peak=900.0), {}, PRICES).card.side_by_side and decide(bench(peak=1500.0), {}, PRICES).card.side_by_side is False
    d = decide(bench(peak=4500.0), {}, PRICES)
    assert not d.card.one_after_another and d.high > 3 * d.hours and any("accumulation" in r for r in d.reasons)
    assert decide(bench(None), {}, PRICES, memory=dict.fromkeys(("dqn", "ppo", "mamba2", "tft"), 900.0)).card.side_by_side


def test_a_decision_is_plain_json(): assert json.loads(json.dumps(jsonable(decide(bench(), {}, PRICES).to_json()), allow_nan=False))["recommendation"] == "local"


def test_an_old_price_table_warns_and_a_broken_one_is_named(tmp_path):
    assert decide(bench(), {}, load_prices(today=date(2027, 3, 1))).warnings
    f = tmp_path / "p.toml"
    whole = '[meta]\nas_of = {}\n[cloud.x]\nusd_per_hour = 1\ngpu = "T4"\ngpu_count = 1\nvram_gb = 16\n{}'
    f.write_text(whole.format("2026-07-30", "")); assert load_prices(f, date(2026, 8, 1)).offer("x").vram_gb == 16
    f.write_text(whole.format("2099-01-01", "")); assert "has not come" in load_prices(f, date(2026, 8, 1)).warnings[0]
    for text, says in ((whole.format("2026-07-30T10:00:00", ""), "expected a day"), (whole.format("2026-07-30", "usd_hour = 3"), "unknown key usd_hour"), ("[cloud]\nx = 3\n[meta]\nas_of = 2026-07-30", "expected a table"),
                       ("meta = 3", "expected a table"), ("local = 3", "expected a table"), ("cloud = [1]\n[meta]\nas_of = 2026-07-30", "expected a table"), ("[local]\nwatt = 3", "unknown key watt"), ('[local]\nname = " "', "name is empty"), ('[meta]\ncurrency = "EUR"', "USD"),
                       ('[cloud.x]\nusd_per_hour = -1\n[meta]\nas_of = 2026-01-01', "more than 0"), ("[local]\nwatts = nan", "watts must be more than 0"), ("[cloud]\n", "as_of is missing"), ("[cloud]\n[meta]\nas_of = 2026-01-01", "no .cloud")):
        f.write_text(text)
        with pytest.raises(UserError, match=says): load_prices(f)


def test_what_is_no_benchmark_is_named(tmp_path):
    f = tmp_path / "b.json"; good = jsonable(bench()); f.write_text(json.dumps(good)); assert read_bench(f) == good
    without = lambda *path: json.dumps(drop(json.loads(json.dumps(good)), path))
    def drop(x, path): (drop(x[path[0]], path[1:]) if path[1:] else x.pop(path[0])); return x
    cases = ["{}", "[]", "", "3", without("format"), without("device"), without("device", "gpu"), without("models"), without("models", "dqn", "health"), without("models", "tft", "epoch", "samples"), json.dumps(good).replace("[0.0", '["x", 0.0', 1)]
    cases += [json.dumps(good).replace("[0.0", f"[{x}, 0.0", 1) for x in ("NaN", "Infinity", "-1", "0", "true", "null")] + [json.dumps(good).replace('"device_used_mib": 500.0', f'"device_used_mib": {x}', 1) for x in ('"lots"', "-5", "NaN")]
    cases += [json.dumps(good).replace('"stable": true', '"stable": "no"', 1), json.dumps(good).replace('"model": "dqn"', '"model": "ppo"', 1), json.dumps(good).replace('"epoch": {', '"epoch": null, "x": {', 1)]
    assert json.dumps(good) not in cases
    for text in cases:
        f.write_text(text)
        with pytest.raises(UserError, match="b.json") as e: read_bench(f)
        assert "\n" not in str(e.value)


def test_a_sixth_model_of_the_benchmark_is_part_of_the_decision():
    b = bench(); b["models"]["gru"] = copy.deepcopy(b["models"]["tft"]) | {"model": "gru"}
    d = decide(b)
    assert "gru" in [f.model for f in d.models] and d.hours > decide(bench()).hours
    assert "gru" not in [f.model for f in decide(b, {"gru": 0}).models]


def test_a_deadline_that_the_cpu_misses_is_not_missed_by_the_local_gpu():
    d = decide(bench(None), {}, PRICES, deadline=0.1)
    assert (d.recommendation, d.choice) == ("incomplete", None) and "deadline of 0.1 h" in d.reasons[0] and "run `foxhunt bench` on it" in d.reasons[0]
    assert decide(bench(None), {}, PRICES, deadline=5).recommendation == "local" and decide(bench(), {}, PRICES, deadline=0.1).recommendation == "cloud"


def test_a_machine_known_to_miss_the_deadline_is_not_chosen_without_a_word():
    names = [o.name for o in PRICES.offers]
    d = decide(bench(scale=60), {}, PRICES, deadline=10, speedup={"g4dn.xlarge": 1.5})
    unknown = next(r for r in d.reasons if "unknown speed" in r)
    assert d.choice != "g4dn.xlarge" and unknown.startswith(d.choice) and all(n in unknown for n in names if n != "g4dn.xlarge")
    assert any(r.startswith("too slow for the deadline of 10 h: g4dn.xlarge (") for r in d.reasons)
    d = decide(bench(scale=60), {}, PRICES, deadline=5, speedup=dict.fromkeys(names, 1.5) | {names[-1]: 2.0})
    assert d.choice == names[-1] and any(r.startswith(f"no known machine meets it; {names[-1]} is the fastest: ") for r in d.reasons)
    d = decide(bench(scale=60), {}, PRICES, deadline=20, speedup={"g4dn.xlarge": 1.5, names[-1]: 4.0})
    assert d.choice == names[-1] and not any("no known machine" in r for r in d.reasons)


@pytest.mark.parametrize("gpu", [LAPTOP, None])
@pytest.mark.parametrize("deadline", [None, 0.1, 5, 20, 30, 60, 500])
@pytest.mark.parametrize("scale", [1, 15, 22, 30, 36, 60])
def test_what_is_said_to_change_the_answer_changes_it(scale, deadline, gpu):
    "Bars scale the hours exactly, so both sides of what is said can be tried."
    d = decide(bench(gpu, scale), {}, PRICES, deadline)
    said = {k: float(m[1]) for k, words in (("deadline", r"a deadline of (\S+) h or more"), ("fewer", r"([\d.e+-]+) times fewer"), ("more", r"more than ([\d.e+-]+) times as many")) if (m := re.search(words, " | ".join(d.would_change)))}
    assert said.keys() >= {"local": {"more"}, "cloud": {"fewer"}}.get(d.recommendation, set())
    answer = lambda by=1.0, until=deadline: decide(bench(gpu, scale * by), {}, PRICES, until).recommendation
    if x := said.get("deadline"): assert answer(until=x) == "local" and answer(until=0.98 * x) == d.recommendation
    if x := said.get("more"): assert answer(1.01 * x) != "local" and answer(0.98 * x) == "local"
    if x := said.get("fewer"): assert answer(0.98 / x) == "local"


def test_an_interval_of_few_or_alike_epochs_is_shown_but_not_promised():
    from foxhunt.bench.stats import ar1, forecast, summarize
    rng = np.random.default_rng(0)
    for n in (5, 6, 9, 10, 14, 60):
        for rho in (0.0, 0.6, 0.9):
            for x in 1 + 0.03 * ar1(n, rho, rng, 30):
                s, h = summarize(x), hours_for(x, 100)
                assert h.promised == (s.steady_state and s.used >= 10 and s.n_eff >= 3)
                if s.low is not None: assert (h.low, h.high) == (forecast(s, 100).low / 3600, forecast(s, 100).high / 3600)
    b = bench(); b["models"]["tft"]["epoch"]["samples"] = [0.5, 0.51, 0.49, 0.5, 0.52, 0.49]
    b["models"]["ppo"]["epoch"]["samples"] = np.repeat([0.17, 0.19, 0.18, 0.16, 0.2, 0.175], 5).tolist()
    d = decide(b, {}, PRICES); training = {r["model"]: r["training"] for r in model_rows(d)}
    assert "no promise" in training["tft"] and any(r.startswith("tft: only 6 epochs measured: their interval is no promise") for r in d.reasons)
    assert "no promise" in training["ppo"] and any(r.startswith("ppo: 30 correlated epochs are worth ") for r in d.reasons)
    assert "no promise" not in training["dqn"] + training["mamba2"]
