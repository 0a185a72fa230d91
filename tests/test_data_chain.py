"""Laws of the whole chain bars -> features -> table: only the past is seen, nothing crosses a roll, a split or a contract."""
from dataclasses import replace
from types import SimpleNamespace

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import Phase, given, settings, strategies as st

from foxhunt.core import UserError
from foxhunt.data.bars import fill_session, load_bars, make_bars, resample
from foxhunt.data.book import load_book, make_book, synthetic_levels
from foxhunt.data.features import FEATURES, NAMES, WINDOW, features, make_features, make_table, part_of
from foxhunt.data.sessions import session_dates, session_marks
from foxhunt.data.store import epoch_ns
from foxhunt.data.windows import TRAIN, UNUSED, assemble, load_table, run_borders, split_rows, synthetic_table, window_ends
from foxhunt.market.contracts import contract
from foxhunt.params import Features

MINUTE = 60 * 10**9
PRICES = ["open", "high", "low", "close"]
EUR = contract("6E")
FAST = replace(EUR, calendar="24x5")       # the same law on a calendar that is quick to make
LAW = dict(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))      # a whole market does not shrink in reasonable time


def market(seed: int, bars: int = 400, missing: float = 0.1, dull: float = 0.3, roll: int | None = None, start: str = "2024-01-11 20:30", calendar: str = "24x5") -> pd.DataFrame:
    "Minutes over a weekend and a holiday: gaps between sessions, missing bars, stretches without movement or volume, perhaps a roll."
    rng = np.random.default_rng(seed)
    t = pd.date_range(start, periods=12 * bars, freq="min", tz="UTC", unit="ns")
    session = (np.arange(len(t)) % 180) < 90                          # an hour and a half of trading, the same of nothing
    inside = session_marks(t.asi8, calendar, MINUTE).inside & session & (rng.random(len(t)) > missing)
    t = t[inside][:bars]; n = len(t)
    still = np.repeat(rng.random(n // 20 + 1) < dull, 20)[:n]
    day = session_dates(t.asi8, calendar).astype(int); jump = np.append(0, (np.diff(day) != 0) * rng.integers(-300, 300, n - 1))
    c = 22_000 + np.cumsum(np.where(still, 0, rng.integers(-6, 7, n)) + jump)
    o = np.where(np.append(True, np.diff(day) != 0), c, np.append(c[0], c[:-1]))
    up, down = (np.where(still, 0, rng.poisson(1, n)) for _ in range(2))
    who = np.ones(n, np.int64) if roll is None else np.where(np.arange(n) < roll, 1, 2)
    shift = (who - 1) * 150
    tick = EUR.tick
    return pd.DataFrame(dict(ts_event=t, open=(o + shift) * tick, high=(np.maximum(o, c) + up + shift) * tick, low=(np.minimum(o, c) - down + shift) * tick, close=(c + shift) * tick,
                             volume=np.where(still, 0, rng.integers(0, 400, n)), instrument_id=who, filled=False))


def disturbed(bars: pd.DataFrame, after: int, seed: int) -> pd.DataFrame:
    "Another future: every bar after row `after` has other prices and another volume."
    rng = np.random.default_rng(seed); out = bars.copy(); n = len(bars) - after - 1
    move = rng.integers(-40, 40, n) * EUR.tick
    for c in PRICES: out.loc[after + 1:, c] = out.loc[after + 1:, c].to_numpy() + move
    out.loc[after + 1:, "volume"] = rng.integers(0, 10_000, n)
    return out


def is_causal(compute, bars: pd.DataFrame, cuts) -> bool:
    "Prefix invariance and indifference to the future, bit for bit."
    whole = compute(bars)
    prefix = all(np.array_equal(compute(bars[:n]), whole[:n], equal_nan=True) for n in cuts)
    return prefix and all(np.array_equal(compute(disturbed(bars, n, n))[:n + 1], whole[:n + 1], equal_nan=True) for n in cuts if n < len(bars) - 1)


@settings(max_examples=12, **LAW)
@given(seed=st.integers(0, 2**31), missing=st.sampled_from([0.0, 0.1, 0.6]), dull=st.sampled_from([0.0, 0.3, 1.0]), roll=st.one_of(st.none(), st.integers(1, 399)),
       cuts=st.lists(st.integers(0, 400), min_size=2, max_size=3))
def test_features_see_only_the_past(seed, missing, dull, roll, cuts):
    bars = market(seed, 400, missing, dull, roll)
    assert is_causal(lambda b: features(b, FAST, MINUTE), bars, cuts)
    x = features(bars, FAST, MINUTE); warm = np.isnan(x).any(1)
    assert np.isfinite(x[~warm]).all() and np.isnan(x[warm]).all()


def leaky_centred(b): return b.close.rolling(9, center=True, min_periods=1).mean().to_numpy()
def leaky_scaled(b): return ((b.close - b.close.mean()) / b.close.std()).to_numpy()
def leaky_backfill(b): return b.close.where(b.volume > 50).bfill().to_numpy()


@pytest.mark.parametrize("leak", [leaky_centred, leaky_scaled, leaky_backfill])
def test_the_causality_law_has_teeth(leak):
    assert not is_causal(leak, market(1), (150, 200, 333))


@settings(max_examples=5, **LAW)
@given(seed=st.integers(0, 2**31))
def test_the_training_rows_of_the_table_do_not_know_what_comes_after_them(seed):
    cfg, bars = Features(train=0.5, val=0.25, embargo=5), {"A": market(seed, 700), "B": market(seed + 1, 600)}
    a = make_table(bars, cfg, {"A": FAST, "B": FAST}, MINUTE)
    last = [np.flatnonzero((a.split == TRAIN) & (a.contract == c))[-1] for c in (0, 1)]
    later = {"A": disturbed(bars["A"], last[0], seed), "B": disturbed(bars["B"], last[1] - 700, seed)}
    b = make_table(later, cfg, {"A": FAST, "B": FAST}, MINUTE)
    assert a.meta["scaler"]["A"]["centre"].tolist() == b.meta["scaler"]["A"]["centre"].tolist()
    train = a.split == TRAIN
    assert np.array_equal(a.features[train], b.features[train]) and np.array_equal(a.split, b.split)
    assert not np.array_equal(a.features[~train & (a.split >= 0)], b.features[~train & (a.split >= 0)])


@settings(max_examples=5, **LAW)
@given(seed=st.integers(0, 2**31), roll=st.integers(150, 450))
def test_nothing_crosses_contracts_or_a_roll(seed, roll):
    cfg, a, b = Features(embargo=5), market(seed, 600, roll=roll), market(seed + 1, 500)
    both = make_table({"A": a, "B": b}, cfg, {"A": FAST, "B": FAST}, MINUTE)
    for c, (name, bars) in enumerate((("A", a), ("B", b))):
        alone = make_table({name: bars}, cfg, {name: FAST}, MINUTE); mine = both.contract == c
        for k in ("features", "split", "ts", "close", "session", "session_frac", "last_in_session"): assert np.array_equal(getattr(alone, k), getattr(both, k)[mine]), k
    first = a[:roll].copy(); first[PRICES] = first[PRICES] + 50 * EUR.tick; first["volume"] = 7          # another past in the old contract
    x, y = features(a, FAST, MINUTE), features(pd.concat([first, a[roll:]]), FAST, MINUTE)
    assert np.array_equal(x[roll:], y[roll:], equal_nan=True)
    assert np.isnan(x[roll:roll + WINDOW - 1]).all() and (len(a) - roll < WINDOW or np.isfinite(x[roll + WINDOW - 1:]).all())
    for lookback, horizon in ((1, 0), (32, 5)):
        for e in window_ends(both, TRAIN, lookback, horizon):
            w = slice(e - lookback + 1, e + horizon + 1)
            assert len(set(both.segment[w])) == 1 == len(set(both.contract[w])) and set(both.split[w]) == {TRAIN}


@settings(max_examples=60, deadline=None)
@given(marks=st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 2)), min_size=1, max_size=60), lookback=st.integers(1, 6), horizon=st.integers(0, 4), split=st.integers(0, 2))
def test_window_ends_are_all_and_only_the_allowed_places(marks, lookback, horizon, split):
    t = synthetic_table(bars=len(marks)); new, kind = np.array(marks).T
    t = replace(t, segment=np.cumsum(new), split=kind.astype(np.int8))
    allowed = [e for e in range(len(marks)) if e - lookback + 1 >= 0 and e + horizon < len(marks)
               and len({(t.segment[i], t.split[i]) for i in range(e - lookback + 1, e + horizon + 1)}) == 1 and t.split[e] == split]
    assert window_ends(t, split, lookback, horizon).tolist() == allowed
    edges = run_borders(t.segment, t.split); assert edges[0] == 0 and edges[-1] == len(marks) and (np.diff(edges) > 0).all()


@given(bars=st.integers(10, 5000), train=st.floats(0.1, 0.8), val=st.floats(0, 0.15), purge=st.integers(0, 200), embargo=st.integers(0, 50))
def test_splits_run_forward_with_a_gap(bars, train, val, purge, embargo):
    s = split_rows(bars, train, val, purge, embargo); used = np.flatnonzero(s >= 0)
    assert (np.diff(s[used]) >= 0).all()
    edge = np.flatnonzero(np.diff(s[used]) > 0)
    assert all(used[i + 1] - used[i] - 1 >= purge + embargo for i in edge)


def test_the_scaler_is_fitted_on_the_training_rows_alone():
    p = part_of(market(3, 900), FAST, MINUTE)
    sizes = dict(train=0.7, val=0.15, purge=50, embargo=5)
    t = assemble({"A": p}, NAMES, MINUTE, **sizes); s = t.meta["scaler"]["A"]
    x = p.raw[t.split == TRAIN]
    assert np.allclose(s["centre"], x.mean(0)) and np.allclose(s["scale"], np.maximum(x.std(0), 0.01))
    wild = replace(p, raw=np.where((t.split == TRAIN)[:, None], p.raw, p.raw * 1e6))
    u = assemble({"A": wild}, NAMES, MINUTE, **sizes)
    assert np.array_equal(u.features[t.split == TRAIN], t.features[t.split == TRAIN]) and np.abs(u.features).max() <= 10
    assert (t.features[np.isnan(p.raw).any(1)] == 0).all() and (t.split[np.isnan(p.raw).any(1)] == UNUSED).all()


@settings(max_examples=10, **LAW)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 399), minutes=st.sampled_from([5, 30, 240]))
def test_longer_bars_and_filled_bars_do_not_change_when_more_data_arrive(seed, n, minutes):
    bars = market(seed, 400, missing=0.4)
    whole, part = (resample(b, minutes * MINUTE, FAST.calendar, MINUTE) for b in (bars, bars[:n]))
    pd.testing.assert_frame_equal(part, whole[:len(part)])
    assert whole.volume.sum() <= bars.volume.sum() and len(set(whole.ts_event)) == len(whole)
    full, head = (fill_session(b.reset_index(drop=True), MINUTE, FAST.calendar) for b in (bars, bars[:n]))
    pd.testing.assert_frame_equal(head, full[:len(head)])
    pd.testing.assert_frame_equal(full[~full.filled].reset_index(drop=True), bars.reset_index(drop=True))     # what was there is untouched
    same = np.diff(session_dates(epoch_ns(full.ts_event), FAST.calendar).astype(int)) == 0
    assert (np.diff(epoch_ns(full.ts_event))[same] == MINUTE).all() and (full.volume[full.filled] == 0).all()


def test_files_to_table_by_the_stages(tmp_path):
    for s, seed in (("6E", 1), ("ES", 2)):
        market(seed, 1500, calendar=EUR.calendar).drop(columns=["instrument_id", "filled"]).to_csv(tmp_path / f"{s}.csv", index=False)
    specs = {"6E": EUR, "ES": replace(EUR, symbol="ES")}
    made = make_bars(tmp_path, tmp_path / "out/bars", contract=list(specs.values()))
    assert made["contracts"]["6E"]["interval_ns"] == MINUTE and list(load_bars(tmp_path / "out/bars")) == ["6E", "ES"]
    table = make_features(tmp_path / "out/bars", tmp_path / "out/features", Features(), specs)
    back = load_table(tmp_path / "out/features")
    for k in ("features", "ts", "close", "segment", "session", "split"): assert np.array_equal(getattr(table, k), getattr(back, k)), k
    assert back.meta["purge"] >= max(f.window for f in FEATURES) - 1 + Features().horizon and back.interval_ns == MINUTE
    assert np.isfinite(back.features).all() and all((back.split == k).sum() > 100 for k in (0, 1, 2))
    short = market(1, 100, calendar=EUR.calendar).drop(columns=["instrument_id", "filled"]); short.to_csv(tmp_path / "short.csv", index=False)
    make_bars(tmp_path / "short.csv", tmp_path / "short", contract=EUR)
    with pytest.raises(UserError, match="contract 6E, 100 bars: .* left for training"): make_features(tmp_path / "short", tmp_path / "f", Features(), specs)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("make", [lambda b: b.assign(volume=0), lambda b: b.assign(**{c: 1.1 for c in PRICES}), lambda b: b.assign(**{c: 1.1 for c in PRICES}, volume=0), lambda b: b.assign(**{c: b[c] - 1.1 for c in PRICES})],
                         ids=["no volume", "one price", "nothing", "around zero"])
def test_odd_markets_stay_finite(make):
    bars = make(market(5, 600)); table = make_table({"6E": bars}, Features(embargo=5), {"6E": FAST}, MINUTE)
    assert np.isfinite(table.features).all() and np.abs(table.features).max() <= 10
    x = features(bars, FAST, MINUTE)[WINDOW - 1:]; assert np.isfinite(x).all()


@pytest.mark.parametrize("start, first", [("2024-03-07 15:00", ["23:00", "22:00", "22:00"]), ("2024-10-31 15:00", ["22:00", "23:00", "23:00"])], ids=["spring", "autumn"])
def test_long_bars_follow_the_clock_change(start, first):
    "Bins are counted from the session's start, which moves by an hour of UTC; none reaches over a session's end, nothing is lost."
    t = pd.date_range(start, periods=6 * 1440, freq="min", tz="UTC", unit="ns"); t = t[session_marks(t.asi8, EUR.calendar, MINUTE).inside]; n = len(t); c = 22_000 + np.arange(n) % 50
    bars = pd.DataFrame(dict(ts_event=t, **{k: c * EUR.tick for k in PRICES}, volume=1, instrument_id=1, filled=False))
    long = resample(bars, 240 * MINUTE, EUR.calendar, MINUTE); day, whole = (session_dates(epoch_ns(f.ts_event), EUR.calendar) for f in (long, bars))
    assert [f"{long.ts_event[np.flatnonzero(day == d)[0]]:%H:%M}" for d in np.unique(day)[1:4]] == first
    assert all(long.volume[day == d].sum() == (whole == d).sum() for d in np.unique(day)[:-1]) and (long.volume <= 240).all()


# what lies on the disk --------------------------------------------------------

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "A bars, a features and a book folder, as the verbs leave them."
    d = tmp_path_factory.mktemp("folders"); thin = market(4, 900, missing=0.4, calendar=EUR.calendar)
    thin.drop(columns=["instrument_id", "filled"]).to_csv(d / "6E.csv", index=False)
    make_bars(d / "6E.csv", d / "bars", contract=EUR, fill="session"); make_features(d / "bars", d / "features", Features(embargo=5), {"6E": EUR})
    x = synthetic_levels(400); x.pop("pressure"); pd.DataFrame(x | {"ts_event": pd.to_datetime(x["ts_event"], utc=True)}).to_parquet(d / "book.parquet"); make_book(d / "book.parquet", d / "book")
    return d


def test_bars_that_were_put_in_stay_known_to_the_end(folders):
    bars, table = load_bars(folders / "bars")["6E"], load_table(folders / "features")
    assert np.array_equal(table.filled, bars.filled.to_numpy()) and 0.1 < table.filled.mean() < 0.9


READERS = {"bars": lambda d: make_features(d, d.parent / "made", Features(embargo=5), {"6E": EUR}), "features": load_table, "book": load_book}
FACTS = {"bars": ("contracts", "contracts.6E", *(f"contracts.6E.{k}" for k in ("rows", "tick", "interval_ns", "calendar"))),
         "features": ("rows", "contracts", "tick", "cost", "feature_names", "interval_ns", "meta"), "book": ("events", "sha256", "scaler", "scaler.size_std")}
WRONG = (None, "x", [], ["x"], [None])                    # None: not there
SOUND = {("contracts", "['x']"), ("feature_names", "[]")}   # another name; no feature: nothing is damaged


@pytest.mark.parametrize("kind, key", [(k, key) for k, keys in FACTS.items() for key in ("", *keys)])
def test_a_damaged_json_is_one_line_that_says_how_to_make_it_again(kind, key, folders, tmp_path):
    import shutil
    d = tmp_path / kind; shutil.copytree(folders / kind, d); file = d / f"{kind}.json"; good = file.read_text(); *way, last = key.split(".")
    texts = ["{}", "null", "[]", "5", good[:len(good) // 2], ""] if not key else []
    for wrong in WRONG if key else ():
        facts = place = json.loads(good)
        for k in way: place = place[k]
        if wrong is None: del place[last]
        elif isinstance(place[last], str) and wrong == "x" or isinstance(place[last], list) and (last, str(wrong)) in SOUND: continue
        else: place[last] = wrong
        texts.append(json.dumps(facts))
    for text in texts:
        file.write_text(text)
        with pytest.raises(UserError) as e: READERS[kind](d)
        said = str(e.value); assert str(d) in said and "\n" not in said and ("again" in said), said


@pytest.mark.parametrize("change, message", [(lambda f: f.assign(contract=5), "column contract, row 1: 5 is not in 0 ... 0"), (lambda f: f.assign(split=np.int8(7)), "column split, row 1: 7 is not in -1 ... 2"),
                                             (lambda f: f.assign(split="train"), "column split is"), (lambda f: f.assign(contract=f.contract.where(f.index > 3)), "column contract is float64"),
                                             (lambda f: f.assign(rsi="x"), "column rsi is"), (lambda f: f.drop(columns="filled"), "no column filled")])
def test_a_damaged_table_is_one_line(change, message, folders, tmp_path):
    import shutil
    d = tmp_path / "features"; shutil.copytree(folders / "features", d); change(pd.read_parquet(d / "features.parquet")).to_parquet(d / "features.parquet")
    with pytest.raises(UserError) as e: load_table(d)
    assert message in str(e.value) and "make it again with `foxhunt features BARSDIR" in str(e.value) and "\n" not in str(e.value)
