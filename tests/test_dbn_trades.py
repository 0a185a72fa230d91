"""Bars from trades: the plain definition of a bar, whatever the schema, the chunk, and what else lies in the file."""
import tracemalloc
from dataclasses import replace

import databento_dbn as dbn
import numpy as np
import pandas as pd
import pytest
from hypothesis import Phase, given, settings, strategies as st

from _dbn import LAYOUT, MINUTE, START, T0, bars as bar_messages, definition, ns, tape, write
from _realdata import real
from foxhunt.core import UserError
from foxhunt.data.bars import PRICES, SECOND, load_bars, make_bars, read_bars, read_trade_bars, resample
from foxhunt.data.dbn import TRADED, bar_source, frame, read_ohlcv, records, trades
from foxhunt.data.rolls import source_roller
from foxhunt.data.sessions import session_dates
from foxhunt.data.store import epoch_ns
from foxhunt.market.contracts import contract

EUR = replace(contract("6E"), calendar="24x5"); FX = EUR.calendar       # a calendar that is quick to make; its pause is a moment
IDS = {"6EH4": 1001, "6EM4": 1002, "6EH4-6EM4": 2001}
LAW = dict(deadline=None, phases=(Phase.explicit, Phase.generate))      # a tape does not shrink in reasonable time


def market(schema: str, n: int, seed: int, step: int = 8 * SECOND) -> np.ndarray:
    "Two contracts and their spread across a night: trades, book changes with absurd prices, trades without a price or a size."
    rng = np.random.default_rng(seed); ts = T0 - 3 * 3600 * SECOND + np.cumsum(rng.integers(0, 2 * step, n))      # from 20:00 UTC, over the pause at 22:00
    id = rng.choice(list(IDS.values()), n); price = 1_100_000_000 + np.cumsum(rng.integers(-2, 3, n)) * 50_000
    action = rng.choice([b"T", b"T", b"A", b"C", b"M"], n) if schema.startswith("mbp") else np.full(n, b"T")
    price = np.where(action == b"T", np.where(id == 2001, -price // 200, price), 7); price[rng.random(n) < 0.03] = dbn.UNDEF_PRICE
    return tape(schema, ts, price, rng.integers(0, 9, n), id, action)


def reference(recs: np.ndarray, id: int, step: int) -> list[tuple]:
    "The definition, one record after the other."
    out: dict[int, list] = {}
    for r in recs:
        if r["instrument_id"] != id or r["action"] != b"T" or r["price"] == dbn.UNDEF_PRICE: continue
        t, p, v = int(r["ts_recv"]) // step * step, int(r["price"]) / 1e9, int(r["size"])
        b = out.setdefault(t, [p, p, p, p, 0]); b[1] = max(b[1], p); b[2] = min(b[2], p); b[3] = p; b[4] += v
    return [(t, *b) for t, b in sorted(out.items())]


def rows(f: pd.DataFrame) -> list[tuple]: return [(t, *v) for t, v in zip(epoch_ns(f.ts_event), f[[*PRICES, "volume"]].to_numpy(float).tolist())]


@settings(max_examples=15, **LAW)
@given(schema=st.sampled_from(TRADED), seed=st.integers(0, 2**31), step=st.sampled_from([1, 60, 300]), chunk=st.sampled_from([1 << 16, 97, 13]), packed=st.booleans())
def test_bars_are_what_the_trades_say(schema, seed, step, chunk, packed, tmp_path_factory):
    recs = market(schema, 400, seed); path = write(tmp_path_factory.mktemp("t") / f"t.dbn{'.zst' * packed}", recs.tobytes(), schema, IDS, stype_in="parent", names=["6E.FUT"])
    got, said = read_trade_bars(path, EUR, schema, step * SECOND, chunk)
    assert set(got.symbol) <= {"6EH4", "6EM4"} and (got.low > 1).all()                        # no spread, no price of the book
    for s in ("6EH4", "6EM4"): assert rows(got[got.symbol == s]) == reference(recs, IDS[s], step * SECOND)
    mine = recs[recs["instrument_id"] < 2000]; traded = mine["action"] == b"T"; priced = mine["price"] != dbn.UNDEF_PRICE
    assert [said[k] for k in ("trades", "not_trades", "undefined_prices", "zero_sizes")] == [(traded & priced).sum(), (~traded).sum(), (traded & ~priced).sum(), (traded & priced & (mine["size"] == 0)).sum()]
    assert sum(said["spreads"].values()) == len(recs) - len(mine) and said["rows"] == len(mine)


@settings(max_examples=3, **LAW)
@given(seed=st.integers(0, 2**31))
def test_longer_bars_are_the_same_from_trades_and_from_bars(seed, tmp_path_factory):
    d = tmp_path_factory.mktemp("t"); recs = market("trades", 900, seed, 60 * SECOND); recs["instrument_id"] = 1001; recs = recs[recs["price"] > 0]; write(d / "t.dbn", recs.tobytes(), "trades")
    sec = [dbn.OHLCVMsg(dbn.RType.OHLCV_1S, 1, 1001, t, *(round(p * 1e9) for p in p4), int(v)) for t, *p4, v in reference(recs, 1001, SECOND)]
    write(d / "s.dbn", sec, "ohlcv-1s")
    for s in (60, 420, 4 * 3600):                                                  # 7 minutes and 4 hours do not divide a session
        a, b = ({s: make_bars(d / f, d / f"{f}.{s}", contract=EUR, interval_ns=s * SECOND)}[s]["contracts"]["6E"] for f in ("t.dbn", "s.dbn"))
        x, y = (load_bars(d / f"{f}.{s}")["6E"] for f in ("t.dbn", "s.dbn"))
        n = min(len(x), len(y)); assert abs(len(x) - len(y)) <= 1 and a["interval_ns"] == b["interval_ns"] == s * SECOND     # the last one: only the trades' request says that it is over
        pd.testing.assert_frame_equal(x[:n], y[:n])
        day = session_dates(epoch_ns(x.ts_event), FX); assert (session_dates(epoch_ns(x.ts_event) + 1, FX) == day).all() and x.volume.sum() <= recs["size"].sum()


@settings(max_examples=25, **LAW)
@given(seed=st.integers(0, 2**31), share=st.floats(0.1, 0.95))
def test_what_is_known_does_not_change_when_more_trades_arrive(seed, share, tmp_path_factory):
    "A live recording knows no end: its last bar may grow and is left out."
    d = tmp_path_factory.mktemp("t"); recs = market("trades", 300, seed); cut = int(300 * share)
    part, whole = (read_trade_bars(write(d / f"{len(r)}.dbn", r.tobytes(), None, IDS), EUR, "trades", MINUTE)[0].set_index(["symbol", "ts_event"]) for r in (recs[:cut], recs))
    pd.testing.assert_frame_equal(part, whole[whole.index.isin(part.index)])
    late = whole[epoch_ns(whole.index.get_level_values(1)) + MINUTE <= int(recs["ts_recv"][:cut][recs["instrument_id"][:cut] < 2000][-1])]; assert set(late.index) <= set(part.index)      # and nothing that was over is missing


def test_a_request_that_goes_on_closes_the_last_bar_and_a_limit_does_not(tmp_path):
    recs = tape("trades", T0 + np.array([0, 5, 70]) * SECOND, np.full(3, 1_100_000_000), np.ones(3, int)); path = write(tmp_path / "t.dbn", recs.tobytes(), "trades")
    assert len(read_trade_bars(path, EUR, "trades", MINUTE)[0]) == 2
    body = path.read_bytes(); meta = dbn.Metadata("GLBX.MDP3", start=ns(START), end=T0 + 86400 * SECOND, stype_in=dbn.SType.RAW_SYMBOL, stype_out=dbn.SType.INSTRUMENT_ID, schema=dbn.Schema.TRADES, symbols=["6EH4"], limit=3)
    path.write_bytes(bytes(meta) + recs.tobytes()); got, said = read_trade_bars(path, EUR, "trades", MINUTE)
    assert len(got) == said["growing_bars"] == 1 and body[:3] == b"DBN"


def test_trades_need_an_interval_and_say_so_in_one_line(tmp_path):
    src = write(tmp_path / "t.dbn", market("tbbo", 200, 1).tobytes(), "tbbo", IDS)
    with pytest.raises(UserError, match=r"t.dbn: holds tbbo, no bars; say how long bars shall be by data.interval \(seconds, --interval\)"): make_bars(src, tmp_path / "out", contract=EUR)
    with pytest.raises(UserError, match="no trade of ES in it; left out"): make_bars(src, tmp_path / "out", contract=contract("ES"), interval_ns=MINUTE)
    twice = tmp_path / "twice"; twice.mkdir()
    for name in "ab": (twice / f"{name}.dbn").write_bytes(src.read_bytes())
    with pytest.raises(UserError, match="twice: trades of 6EH4: time goes back from .* is a file there twice"): make_bars(twice, tmp_path / "out", contract=EUR, interval_ns=MINUTE)
    off = write(tmp_path / "off.dbn", tape("trades", T0 + np.arange(9) * 20 * SECOND, np.full(9, 1_100_020_000), np.ones(9, int)).tobytes(), "trades")
    with pytest.raises(UserError, match="off.dbn: 60 s bars from trades: column open, row 1: 1.10002 is off the tick grid"): make_bars(off, tmp_path / "out", contract=EUR, interval_ns=MINUTE)
    assert not (tmp_path / "out").exists()


def test_the_best_source_in_a_folder_is_chosen(tmp_path):
    write(tmp_path / "t.dbn", market("trades", 50, 1).tobytes(), "trades", IDS); write(tmp_path / "m.dbn", bar_messages(5), "ohlcv-1m"); write(tmp_path / "d.dbn", [definition(1001, "6EH4")], "definition")
    assert [bar_source(tmp_path, n) for n in (None, MINUTE, 3600 * SECOND, SECOND)] == ["ohlcv-1m", "ohlcv-1m", "ohlcv-1m", "trades"]
    write(tmp_path / "s.dbn", bar_messages(5, step=SECOND, rtype=dbn.RType.OHLCV_1S), "ohlcv-1s"); assert bar_source(tmp_path, 90 * SECOND) == "ohlcv-1s"
    with pytest.raises(UserError, match="several lengths"): bar_source(tmp_path, None)
    live = write(tmp_path / "live.dbn", market("mbp-1", 60, 2).tobytes() + b"".join(map(bytes, bar_messages(3))), None, IDS); assert bar_source(live, SECOND) == "mbp-1" and bar_source(live, MINUTE) == "ohlcv-1m"


def test_trades_of_two_expiries_roll_into_one_series(tmp_path):
    parts = []
    for d in range(6):
        for k, id in enumerate((1001, 1002)):
            n = 300; ts = T0 + d * 86400 * SECOND + np.arange(n) * 10 * SECOND + k
            parts.append(tape("trades", ts, 1_100_000_000 + k * 4_500_000 + (np.arange(n) % 7) * 50_000, np.full(n, 5 if (d < 3) == (id == 1001) else 1), id))
    recs = np.concatenate(parts); recs = recs[np.argsort(recs["ts_recv"], kind="stable")]; src = tmp_path / "src"; src.mkdir()
    write(src / "t.dbn.zst", recs.tobytes(), "trades", IDS, stype_in="parent", names=["6E.FUT"])
    made = make_bars(src, tmp_path / "bars", contract=EUR, interval_ns=MINUTE, roll=source_roller(src, "volume")); f = load_bars(tmp_path / "bars")["6E"]
    at = np.flatnonzero(np.diff(f.instrument_id)); assert len(at) == 1 and len(f) == 300 and made["contracts"]["6E"]["quality"]["dbn"]["trades"] == len(recs)
    for id, s in ((1001, f[:at[0] + 1]), (1002, f[at[0] + 1:])):
        want = {r[0]: r for r in reference(recs, id, MINUTE)}; assert rows(s) == [want[t] for t in epoch_ns(s.ts_event)]


def test_memory_is_bounded_by_the_chunk(tmp_path):
    def peak(n):
        ts = T0 + np.arange(n) * 20_000_000; body = tape("trades", ts, 1_100_000_000 + np.arange(n) % 9 * 50_000, np.ones(n, int)).tobytes(); path = write(tmp_path / f"{n}.dbn", body, "trades"); del ts, body
        tracemalloc.start(); bars, said = read_trade_bars(path, EUR, "trades", MINUTE, 8192); top = tracemalloc.get_traced_memory()[1]; tracemalloc.stop()
        assert said["trades"] == bars.volume.sum() == n; return top
    small, large = peak(50_000), peak(300_000)                                                # 2.4 and 14 MB of records
    assert large < 7e6 and large < small + 1e6, (small, large)


@pytest.mark.parametrize("schema", ["trades", "tbbo"])
def test_real_trades_fit_the_real_bars(schema):
    "The files hold the day's first four trades and its first bars: what can be compared agrees."
    path = real(f"glbx/test_data.{schema}.dbn.zst"); es = contract("ES"); recs = next(records(path)); first = read_ohlcv(real("glbx/test_data.ohlcv-1s.dbn.zst"))[0].iloc[0]
    ts, price, size, ids, names = next(trades(path, schema)); assert set(names) == {"ESH1"} and price.tolist() == [3702.75, 3702.75, 3702.5, 3702.75] and size.sum() == 4
    got, said = read_trade_bars(path, es, schema, SECOND); assert said["growing_bars"] == 1 and not len(got)       # four trades by limit: the second is not over
    assert first.open == price[0] and first.low <= price.min() and first.high >= price.max() and first.volume >= size.sum() and epoch_ns(pd.Series([first.ts_event]))[0] == ts[0] // SECOND * SECOND
    assert (frame(recs, schema).action == "T").all()


def test_real_quotes_hold_no_trade_and_make_no_bar():
    with pytest.raises(UserError, match="no trade of ES in it; left out: {'not_trades': 4}"): read_trade_bars(real("glbx/test_data.mbp-1.dbn.zst"), contract("ES"), "mbp-1", SECOND)
