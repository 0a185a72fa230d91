"Backtests: net is gross less costs in every row of every report, and baselines are paid by the same ledger."
import dataclasses, json, math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from foxhunt.core import UserError
from foxhunt.data.windows import TEST, TRAIN, VAL, synthetic_table
from foxhunt.evaluate.backtest import backtest, baselines, cost_grid, delays, filled, report, rollout, round_trips, runs, save_result, settle
from foxhunt.market.env import make_market, reset, step
from foxhunt.params import Env

TABLE = synthetic_table(bars=1200, contracts=2, seed=4)
rng = np.random.default_rng(9)
JUMPY = dataclasses.replace(TABLE, open=TABLE.open + rng.integers(-4, 5, len(TABLE)) * 5e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.sampled_from(["next_open", "close"]), st.floats(0, 3), st.floats(0, 2), st.booleans(), st.integers(0, 2))
def test_net_is_gross_less_traded_times_cost(seed, fill, slippage, scale, flat, delay):
    env = Env(fill=fill, slippage_ticks=slippage, cost_scale=scale, flat_at_close=flat)
    targets = np.random.default_rng(seed).integers(-5, 6, len(JUMPY))
    r = backtest(JUMPY, TEST, env, targets, delay=delay)
    per_side = scale * 2.0 + slippage * 5e-5 * 125_000
    steps = sum(np.abs(np.diff(np.r_[0, r.position[a:b], 0])).sum() for a, b in zip(*runs(r.market)))
    assert r.ledger.traded.sum() == steps                                            # every change, and out at the end of each run
    assert r.profit == pytest.approx(r.ledger.gross.sum() - steps * per_side, abs=1e-6)
    assert round_trips(r)["profit"].sum() == pytest.approx(r.profit, abs=1e-6)
    assert cost_grid(r, (slippage,), (scale,))[0, 0] == pytest.approx(r.profit, abs=1e-6)
    assert r.equity()[1][-1] == pytest.approx(r.profit, abs=1e-6)


def test_gross_is_the_price_path():
    "Independent of the record: sum over bars of position times price change times multiplier."
    env = Env()
    r = backtest(JUMPY, VAL, env, rng.integers(-5, 6, len(JUMPY)))
    rows, total = r.market.rows, 0.0
    for a, b in zip(*runs(r.market)):
        for k in range(a + 1, b):
            o, c, before = JUMPY.open[rows[k]], JUMPY.close[rows[k]], JUMPY.close[rows[k - 1]]
            total += (r.position[k - 1] * (o - before) + r.position[k] * (c - o)) * 125_000
    assert r.ledger.gross.sum() == pytest.approx(total, abs=1e-6)


def test_rollout_is_the_environment_itself():
    "A policy that looks at its position and unrealised profit sees the same in rollout and in step."
    env = Env(episode_bars=10_000)
    market = make_market(JUMPY, TEST, env)
    policy = lambda obs: ((obs[:, -3] * 5 + 3 * torch.sign(obs[:, -2]) + 2 * torch.sign(obs[:, 230])).round().clamp(-5, 5) + 5).long()
    targets = rollout(market, env, policy)
    from foxhunt.market.env import observe, state_at, unrealised_profit
    for a, b in zip(*runs(market)):
        s = state_at(market, torch.tensor([a + 10]))
        for t in range(a + 10, b - 1):
            action = policy(observe(market, s.bar, s.position, unrealised_profit(market, s)))
            assert targets[t] == action.item() - 5
            s, o = step(market, env, s, action)
    position = filled(market, targets)
    assert len(set(position.tolist())) > 4 and (targets[runs(market)[1] - 1] == 0).all()


def test_long_and_short_are_exact_negatives_before_costs():
    targets = rng.integers(-5, 6, len(JUMPY))
    a, b = (backtest(JUMPY, TEST, Env(), s * targets) for s in (1, -1))
    assert np.array_equal(a.ledger.gross, -b.ledger.gross) and np.array_equal(a.ledger.cost, b.ledger.cost)


def test_later_fills_are_the_same_path_later():
    r = backtest(TABLE, TEST, Env(), rng.integers(-5, 6, len(TABLE)))
    late = delays(TABLE, TEST, r)
    for a, b in zip(*runs(r.market)):
        for d in (1, 2): assert np.array_equal(late[d].position[a + d : b], late[0].position[a : b - d]) and (late[d].position[a : a + d + 1] == 0).all()


def test_oracle_is_the_ceiling_of_everything():
    env = Env()
    r = backtest(TABLE, TEST, env, rng.integers(-1, 2, len(TABLE)))
    found, random = baselines(TABLE, TEST, env, r, draws=50)
    ceiling = found["oracle"].profit
    assert all(ceiling >= x.profit for x in (r, *found.values())) and (random <= ceiling).all() and found["flat"].profit == 0
    assert all((x.position[a : a + 11] == 0).all() for x in found.values() for a, _ in zip(*runs(x.market)))   # nobody trades before the first state
    again = baselines(TABLE, TEST, env, r, draws=50)[1]
    assert np.array_equal(random, again)


def test_report_is_plain_small_and_honest(tmp_path):
    env = Env()
    nothing = report(TABLE, TEST, backtest(TABLE, TEST, env, np.zeros(len(TABLE)), name="flat"), draws=5)
    text = json.dumps(nothing, allow_nan=False)
    assert len(text) < 20_000 and nothing["policy"]["net"] == 0 and nothing["policy"]["sharpe"]["value"] is None and nothing["break_even"]["ticks"] is None
    busy = report(TABLE, TEST, r := backtest(TABLE, TEST, env, rng.integers(-5, 6, len(TABLE))), draws=5)
    for part in (busy["policy"], *busy["baselines"].values()):
        assert part["net"] == pytest.approx(part["gross"] - part["cost"], abs=1e-9) and part["cost"] == pytest.approx(part["traded"] * 5.125, abs=1e-6)
    save_result(r, tmp_path / "out", busy); save_result(r, tmp_path / "out", busy)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["equity.parquet", "metrics.json"] and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_short_split_says_no_interval():
    short = report(t := synthetic_table(bars=30_000, kind="drift"), TEST, backtest(t, TEST, Env(), np.full(len(t), 5)), draws=5)["policy"]
    assert short["sessions"] < 30 and short["sharpe"]["value"] is not None and short["sharpe"]["low"] is None and short["sharpe"]["n"] == short["sessions"]


def test_a_result_does_not_replace_something_else(tmp_path):
    r = backtest(TABLE, TEST, Env(), np.zeros(len(TABLE)))
    for name, other in (("thesis", "thesis.txt"), ("forecast", "metrics.json"), ("mixed", "equity.parquet")):
        (tmp_path / name).mkdir(); (tmp_path / name / other).write_text("years of work"); (tmp_path / name / "notes.txt").write_text("x")
        with pytest.raises(UserError, match=name): save_result(r, tmp_path / name)
        assert (tmp_path / name / other).read_text() == "years of work"


def test_bad_input_is_named():
    with pytest.raises(UserError, match="one per row is needed"): backtest(TABLE, TEST, Env(), np.zeros(3))
    bad = np.zeros(len(TABLE)); bad[np.flatnonzero(TABLE.split == TEST)[4]] = math.nan
    with pytest.raises(UserError, match="is not a number"): backtest(TABLE, TEST, Env(), bad)
    with pytest.raises(ValueError, match="one action index each"): backtest(TABLE, TEST, Env(), lambda obs: obs)
