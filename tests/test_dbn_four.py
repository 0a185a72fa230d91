"""Four contracts as four parent downloads, each in a folder of its own with its manifest: described in params.yaml alone, rolled, side by side in one table, trained together, and never mixed."""
import datetime as dt
from pathlib import Path

import databento_dbn as dbn
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from _dbn import DAY, MINUTE, manifest, ns, tape, write
from foxhunt.core import read_json
from foxhunt.data.bars import load_bars
from foxhunt.data.windows import TRAIN, load_table, window_ends
from foxhunt.market.contracts import contract
from foxhunt.market.env import make_market, observe, reset, step
from foxhunt.params import Env
from foxhunt.train.checkpoint import load_weights

pytestmark = pytest.mark.integration
FOUR = {"6E": 1.1, "ES": 4700.0, "NQ": 16_500.0, "ZN": 112.0}      # first price
DAYS, PER_DAY = 8, 260
PARAMS = """
data: {source: src, contracts: [6E, ES, NQ, ZN], roll: volume, interval: %d}
features: {embargo: 4}
train:
  dqn: {epochs: 1, updates_per_epoch: 2, lanes: 8, hidden: [16], batch: 16, learn_starts: 16}
  tft: {epochs: 1, batch: 64, lookback: 16, horizon: 3, stride: 16, hidden: 8, heads: 2}
"""


def foxhunt(*args):
    from foxhunt.cli import app
    result = CliRunner().invoke(app, [str(a) for a in args]); assert result.exit_code == 0, result.output
    return result.output


def parent(folder: Path, k: int, root: str, schema: str) -> None:
    "Eight sessions of two expiries and their spread, minute by minute; the volume moves to the second after the fifth."
    spec, rng = contract(root), np.random.default_rng(k); tick = round(spec.tick * 1e9); first = round(FOUR[root] / spec.tick)
    ids = {f"{root}H4": 10 * k + 1, f"{root}M4": 10 * k + 2, f"{root}H4-{root}M4": 10 * k + 3}; ask = dict(stype_in="parent", names=[f"{root}.FUT"])
    ts = (ns(dt.date(2024, 1, 7)) + 15 * 3600 * 10**9 + DAY * (1 + np.arange(11))[[0, 1, 2, 3, 4, 7, 8, 9]][:, None] + np.arange(PER_DAY) * MINUTE).ravel(); n = len(ts)
    walk, late = np.cumsum(rng.integers(-4, 5, n)), np.arange(n) // PER_DAY >= 5; parts = []
    for i, (symbol, id) in enumerate(ids.items()):
        there = rng.random(n) < 0.95; c = (first + walk + 90 * i if i < 2 else np.full(n, -90)) * tick; volume = rng.integers(1, 50, n) + 500 * (late == i if i < 2 else 0)
        if schema == "trades": parts.append(np.concatenate([tape(schema, ts[there] + o, c[there] + j * tick, volume[there], id) for o, j in ((0, 0), (10**9, 2), (2 * 10**9, -1), (59 * 10**9, 1))])); continue
        recs = np.zeros(there.sum(), np.dtype(dbn.OHLCVMsg._dtypes))
        for name, v in dict(length=14, rtype=33, publisher_id=1, instrument_id=id, ts_event=ts[there], open=c[there], high=c[there] + 2 * tick, low=c[there] - tick, close=c[there] + tick, volume=volume[there]).items(): recs[name] = v
        parts.append(recs)
    recs = np.concatenate(parts); recs = recs[np.argsort(recs["ts_recv" if schema == "trades" else "ts_event"], kind="stable")]
    write(folder / f"{root}.{schema}.dbn.zst", recs.tobytes(), schema, ids, **ask)
    facts = [dbn.InstrumentDefMsg(1, id, ts[0] - DAY, ts[0] - DAY, tick, 10**9, s, root, "FUT", dbn.InstrumentClass("S" if "-" in s else "F"), dbn.SecurityUpdateAction.ADD, expiration=ns(dt.date(2024, 3 + 3 * ("M4" in s), 15)), unit_of_measure_qty=round(spec.multiplier * 1e9)) for s, id in ids.items()]
    write(folder / f"{root}.definition.dbn.zst", facts, "definition", ids, **ask)


@pytest.fixture(scope="module", params=["ohlcv-1m", "trades"])
def house(request, tmp_path_factory):
    "Bars, features and one epoch of an agent (from bars) or of a forecaster (from trades), by the verbs and a parameter file."
    here = tmp_path_factory.mktemp("four"); (here / "src").mkdir()
    for k, root in enumerate(FOUR): (here / "src" / root).mkdir(); parent(here / "src" / root, k, root, request.param); manifest(here / "src" / root)
    (here / "params.yaml").write_text(PARAMS % (60 if request.param == "trades" else 0)); p = ("--params", here / "params.yaml")
    foxhunt("bars", here / "src", here / "bars", *p); foxhunt("features", here / "bars", here / "features", *p)
    foxhunt("train", model := {"ohlcv-1m": "dqn", "trades": "tft"}[request.param], "--features", here / "features", "--out", here / "run", "--device", "cpu", *p)
    return here, model


def test_every_contract_is_rolled_and_keeps_its_own_specification(house):
    here, model = house; bars, facts, table = load_bars(here / "bars"), read_json(here / "bars/bars.json")["contracts"], load_table(here / "features")
    assert list(bars) == list(FOUR) == list(table.contracts)
    for c, (root, f) in enumerate(bars.items()):
        spec, q = contract(root), facts[root]["quality"]; at = np.flatnonzero(np.diff(f.instrument_id)); mine = table.contract == c
        assert len(at) == 1 and f.instrument_id.tolist()[::len(f) - 1] == [10 * c + 1, 10 * c + 2] and 0.9 < len(f) / (DAYS * PER_DAY) < 1 and facts[root]["interval_ns"] == MINUTE and facts[root]["calendar"] == spec.calendar
        assert q["dbn"]["spreads"].keys() == {f"{r}H4-{r}M4" for r in FOUR} and set(q["dbn"]["other_roots"]) == set(FOUR) - {root} and (f.low > 0).all()
        assert (table.tick[c], table.multiplier[c], table.cost[c]) == (spec.tick, spec.multiplier, spec.cost) and np.array_equal(table.close[mine], f.close)
        assert len(np.unique(table.segment[mine])) == 2 and (np.diff(table.segment[mine]) != 0).nonzero()[0].tolist() == at.tolist()
        for k in range(3): assert (mine & (table.split == k)).sum() > 20
    assert len(np.unique(table.segment)) == 8 and len({*zip(table.multiplier, table.cost)}) == 4


def test_no_window_and_no_episode_crosses_a_contract_or_a_splice(house):
    here, model = house; table = load_table(here / "features"); own = lambda rows: (len(set(table.contract[rows])), len(set(table.segment[rows])), len(set(table.split[rows])))
    for k in range(3):
        ends = window_ends(table, k, 16, 3); assert set(table.contract[ends]) == {0, 1, 2, 3}
        assert all(own(slice(e - 15, e + 4)) == (1, 1, 1) for e in ends)
    env = Env(episode_bars=10**6, slippage_ticks=0.0); m = make_market(table, TRAIN, env); s = reset(m, env, 256, 0); before = s
    assert set(table.contract[m.rows[m.starts]]) == {0, 1, 2, 3}; seen = set()
    for _ in range(120):
        s, out = step(m, env, s, torch.full((256,), 10)); a, b = m.rows[before.bar], m.rows[out.bar]                            # the true next state, before a restart
        assert (b - a == 1).all() and (table.contract[a] == table.contract[b]).all() and (table.segment[a] == table.segment[b]).all() and (s.position[out.terminated | out.truncated] == 0).all()
        seen |= set(table.contract[b].tolist()); before = s
    assert seen == {0, 1, 2, 3} and torch.isfinite(observe(m, s.bar, s.position, torch.zeros(256, dtype=torch.float64), 11, 5)).all()


def test_an_agent_and_a_forecaster_train_on_all_four(house):
    here, model = house; weights, meta = load_weights(next((here / "run").glob(f"{model}_final_epoch1.safetensors")))
    assert all(torch.isfinite(w).all() for w in weights.values()) and read_json(here / "run/summary.json")["epochs"] == 1
    if model == "tft": assert meta["contracts"] == list(FOUR) and any(w.ndim == 2 and len(w) == 5 for w in weights.values())      # one embedding each, and one for contracts it does not know


@pytest.mark.parametrize("house", ["trades"], indirect=True)
def test_the_data_report_shows_all_four(house):
    "The cells of the report, one after the other, on Databento files."
    import json, matplotlib
    matplotlib.use("Agg"); import matplotlib.pyplot as plt
    here, model = house; cells = [c for c in json.loads((Path(__file__).parents[1] / "nbs/reports/data.ipynb").read_text())["cells"] if c["cell_type"] == "code"]; shown = []; g: dict = {}
    for c in cells:
        exec("".join(c["source"]), g)
        if "parameters" in c["metadata"].get("tags", ()): g |= dict(bars_dir=here / "bars", features_dir=here / "features")
        g["display"] = shown.append
        for f in map(plt.figure, plt.get_fignums()): assert all(a.get_xlabel() and a.get_ylabel() or a.get_title() == "gaps begin after" or a.get_shared_x_axes().joined(a, f.axes[-1]) for a in f.axes); plt.close(f)
    assert list(g["counts"]) == list(g["dbn"]) == list(FOUR) and [r["contract"] for r in g["rolls"]] == list(FOUR)
