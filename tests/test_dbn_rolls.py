"""Rolls from files to a series: nothing of the future, nothing across a splice, every price one that traded."""
import datetime as dt

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

import databento_dbn as dbn
from _dbn import DAY, MINUTE, bars as messages, definition, ns, write
from foxhunt.core import UserError
from foxhunt.data.bars import findings, load_bars, make_bars
from foxhunt.data.dbn import dbn_files, is_dbn
from foxhunt.data.features import NAMES, features, make_features
from foxhunt.data.rolls import ADJUST, changes, continuous, roll_cost, schedule, segments, source_roller
from foxhunt.data.sessions import session_dates
from foxhunt.market.contracts import contract
from foxhunt.params import Features

FX, SIX = "CMEGlobex_FX", contract("6E")
PRICES = ["open", "high", "low", "close"]


def market(seed: int, days: int = 14, per_day: int = 12, missing: float = 0.2) -> pd.DataFrame:
    "Three contracts with random volumes and holes; they overlap all the time, each at its own level."
    rng = np.random.default_rng(seed); start = ns(dt.date(2024, 1, 7)) + 23 * 3600 * 10**9; parts = []
    ts = np.concatenate([start + d * DAY + np.arange(per_day) * 5 * MINUTE for d in range(days)]); walk = np.cumsum(rng.integers(-3, 4, len(ts)))
    for k, symbol in enumerate(("6EH4", "6EM4", "6EU4")):
        there = rng.random(len(ts)) > missing; there[::per_day] = True                       # the first bar of a session always trades
        p = np.round(1.1 + (walk + 90 * k) * 5e-5, 9); lead = rng.integers(0, 3, days).repeat(per_day) == k
        parts.append(pd.DataFrame({"ts_event": pd.to_datetime(ts, utc=True).as_unit("ns"), "open": p, "high": p, "low": p, "close": p, "volume": rng.integers(1, 50, len(ts)) + 200 * lead, "instrument_id": 1001 + k, "symbol": symbol, "filled": False})[there])
    return pd.concat(parts).sort_values(["ts_event", "instrument_id"], ignore_index=True)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), adjust=st.sampled_from(ADJUST))
def test_laws_of_a_continuous_series(seed, adjust):
    bars = market(seed); series, rolls = continuous(bars, "volume", adjust, calendar=FX)
    ts = series.ts_event.astype("int64").to_numpy(); ids = series.instrument_id.to_numpy()
    assert (np.diff(ts) > 0).all() and series.splice.sum() == len(rolls) and (np.diff(ids) >= 0).all()                 # each time once, never back to an older contract
    traded = bars.set_index(["instrument_id", "ts_event"]).close.loc[list(zip(ids, series.ts_event))].to_numpy()
    back = series.close - series.adjustment if adjust == "difference" else series.close / series.adjustment if adjust == "ratio" else series.close
    np.testing.assert_allclose(back, traded, atol=1e-9); last = ids == ids[-1]; assert (series.close[last] == traded[last]).all()
    seg = segments(ids, series.splice.to_numpy()); move = changes(series.close.to_numpy(), seg)
    if adjust != "ratio": np.testing.assert_allclose(move[~np.isnan(move)], changes(traded, seg)[~np.isnan(move)], atol=1e-9)
    assert np.isnan(move).sum() == len(rolls) + 1
    for r in rolls:                                                                             # the closes of one bar at which both traded
        row = bars[bars.ts_event.astype("int64") == r.ts].set_index("instrument_id").close; assert (row[r.old], row[r.new]) == (r.old_close, r.new_close)
    if adjust == "difference":
        held = 0.0; entry = traded[0]
        for r in rolls: held += r.old_close - entry; entry = r.new_close
        np.testing.assert_allclose(series.close.iloc[-1] - series.close.iloc[0], held + traded[-1] - entry, atol=1e-9)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), share=st.floats(0.1, 0.95))
def test_a_roll_sees_earlier_sessions_only(seed, share):
    bars = market(seed); cut = bars.ts_event.iloc[int(len(bars) * share)]; whole = continuous(bars, "volume", calendar=FX)[0]
    part = continuous(bars[bars.ts_event <= cut], "volume", calendar=FX)[0]
    pd.testing.assert_frame_equal(part, whole[whole.ts_event <= cut])                           # prefix
    date = session_dates(bars.ts_event.astype("int64").to_numpy(), FX); later = date >= session_dates(np.array([cut.value]), FX)[0]
    other = bars.copy(); other.loc[later, "volume"] = np.random.default_rng(seed).integers(1, 900, later.sum())
    same = continuous(other, "volume", calendar=FX)[0]; keep = whole.ts_event <= cut
    assert (same.instrument_id[keep[keep].index] == whole.instrument_id[keep]).all()            # this session's volumes decide nothing before its end


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_volume_rule_by_hand(seed):
    "Session by session from sets and sums; the order of the rows says nothing."
    bars = market(seed, missing=0.6); rolls, first = schedule(bars.sample(frac=1, random_state=seed % 2**16), "volume", calendar=FX)
    ts = bars.ts_event.astype("int64"); date = session_dates(ts.to_numpy(), FX); volume = bars.groupby([date, "instrument_id"]).volume.sum().unstack(fill_value=0)
    held = want = first; expected = []
    for before, now in zip(volume.index[:-1], volume.index[1:]):
        known = volume.loc[before][lambda v: v.index >= held]; want = max(want, known.idxmax()) if known.max() > known[held] else want
        both = set.intersection(*({*ts[(date == now.to_datetime64()) & (bars.instrument_id == i)]} for i in (held, want))) if want > held else ()
        if both: expected.append((min(both), held, want)); held = want
    assert [(r.ts, r.old, r.new) for r in rolls] == expected


def test_no_overlapping_bar_is_an_error_that_names_both():
    bars = market(1); gone = bars[~((bars.symbol == "6EH4") & (bars.ts_event >= bars.ts_event.min() + pd.Timedelta("3D")))]
    late = gone[(gone.symbol == "6EH4") | (gone.ts_event >= gone.ts_event.min() + pd.Timedelta("3D"))]
    with pytest.raises(UserError, match="6EH4 ends at"): continuous(late, "volume", calendar=FX)
    odd = bars.assign(n=bars.groupby("symbol").cumcount()); odd.loc[odd.symbol == "6EM4", "ts_event"] += pd.Timedelta("1min")      # never at the same minute
    two = odd[odd.symbol.isin(["6EH4", "6EM4"])]; two = two[(two.symbol == "6EM4") | (two.ts_event < two.ts_event.min() + pd.Timedelta("9D"))]
    two.loc[two.symbol == "6EM4", "volume"] = 10**6
    with pytest.raises(UserError, match="share no bar|ends at"): continuous(two, "volume", calendar=FX)


def parent(folder):
    "Ten days of 6E as a parent download: two contracts and their spread, definitions, open interest; and ES beside it."
    folder.mkdir(); ids = {"6EH4": 1001, "6EM4": 1002, "6EH4-6EM4": 2001}; es = {"ESH4": 3001}; start = ns(dt.date(2024, 1, 7)) + 23 * 3600 * 10**9; body = []
    for d in range(10):
        for s, i in ids.items():
            heavy = (s == "6EH4") == (d < 5); body += [type(m)(m.rtype, 1, i, m.ts_event, m.open, m.high, m.low, m.close, m.volume + 5000 * heavy) for m in messages(60, i, {"6EH4": 1_100_000_000, "6EM4": 1_104_500_000}.get(s, 4_500_000), seed=d, start=start + d * DAY)]
    body += [dbn.OHLCVMsg(dbn.RType.OHLCV_1M, 1, 3001, start + d * DAY + i * MINUTE, p := 4_700_000_000_000 + (i % 5) * 250_000_000, p, p, p, 10) for d in range(10) for i in range(60)]
    body.sort(key=lambda m: m.ts_event); names = ["6E.FUT", "ES.FUT"]
    write(folder / "a.ohlcv-1m.dbn.zst", body, "ohlcv-1m", ids | es, stype_in="parent", names=names)
    write(folder / "b.definition.dbn.zst", [definition(1001, "6EH4", expiry=dt.date(2024, 1, 15)), definition(1002, "6EM4", expiry=dt.date(2024, 6, 17)), definition(2001, "6EH4-6EM4", "S", None), definition(3001, "ESH4", tick=250_000_000, unit_of_measure_qty=50 * 10**9)], "definition", ids | es, stype_in="parent", names=names)
    oi = [dbn.StatMsg(1, i, t := ns(dt.date(2024, 1, 8) + dt.timedelta(d)) + 3600 * 10**9, t, t, dbn.UNDEF_PRICE, 900 if (i == 1001) == (d < 3) else 100, dbn.StatType.OPEN_INTEREST) for d in range(9) for i in (1001, 1002)]
    write(folder / "c.statistics.dbn.zst", oi, "statistics", ids | es, stype_in="parent", names=names)
    return folder


@pytest.mark.parametrize("how, session", [
    ("volume", "2024-01-14"),             # 6EM4 leads in the session of the 13th
    ("calendar", "2024-01-12"),           # three days before the 15th
    ("open_interest", "2024-01-12")])     # published during the session of the 11th
def test_a_parent_download_becomes_one_series(how, session, tmp_path):
    src = parent(tmp_path / "src"); roll = source_roller(src, how, calendar=FX, days=3)
    made = make_bars(src, tmp_path / "bars", contract=[SIX, contract("ES")], roll=roll); bars = load_bars(tmp_path / "bars")
    six = bars["6E"]; at = np.flatnonzero(np.diff(six.instrument_id)); assert len(at) == 1 and six.instrument_id.tolist()[0] == 1001 and len(six) == 600
    assert str(session_dates(six.ts_event.astype("int64").to_numpy()[at], FX)[0]) == session
    assert len(bars["ES"]) == 600 and set(bars["ES"].instrument_id) == {3001}
    assert made["contracts"]["6E"]["quality"]["dbn"]["spreads"] == {"6EH4-6EM4": 600}
    values = np.asarray(features(six, SIX, MINUTE)); jump = abs(six.close.to_numpy()[at + 1] - six.close.to_numpy()[at])[0]
    assert values.shape == (600, len(NAMES)) and jump > 0.003                                # the splice is there; the features of 17 keep it out (their own laws)


def test_ratio_adjusted_bars_are_said_and_refused(tmp_path):
    "Their old prices never traded: ticks and profits before a roll would be rescaled."
    src = parent(tmp_path / "src"); make = lambda adjust: make_bars(src, tmp_path / adjust, contract=SIX, roll=source_roller(src, "volume", adjust, calendar=FX))["contracts"]["6E"]["quality"]
    assert "rescaled by ratio" in findings(make("ratio")) and "ratio" not in findings(make("difference"))
    with pytest.raises(UserError, match="6E is adjusted by ratio.*make the bars again with adjust none or difference"): make_features(tmp_path / "ratio", tmp_path / "out", Features(), {"6E": SIX})
    assert len(make_features(tmp_path / "difference", tmp_path / "out", Features(), {"6E": SIX})) == 600


@pytest.mark.parametrize("name, yes", [("6E.dbn", True), ("6E.DBN.ZST", True), ("6E.dbn.zst.part", False), ("6E.csv", False)])
def test_a_databento_name_in_any_case(name, yes, tmp_path):
    (tmp_path / name).write_bytes(b""); (tmp_path / "other.dbn").write_bytes(b"")
    assert is_dbn(tmp_path / name) == is_dbn(name) == yes and (tmp_path / name in dbn_files(tmp_path)) == yes


def test_what_a_roll_costs():
    assert roll_cost(5, SIX) == roll_cost(-5, SIX) == pytest.approx(10 * (SIX.commission + SIX.exchange_fee + 0.5 * 6.25)) and roll_cost(0, SIX) == 0


def test_adjusting_by_difference_changes_no_feature():
    "Features count from the first price of each segment, so the future that an adjustment brings into old prices does not reach them."
    bars = market(4, days=30); raw, diff = (continuous(bars, "volume", how, calendar=FX)[0].assign(volume=5) for how in ("none", "difference"))
    assert (raw.instrument_id == diff.instrument_id).all() and (raw.close != diff.close).any()
    np.testing.assert_array_equal(features(raw, SIX, 5 * MINUTE), features(diff, SIX, 5 * MINUTE))
