"""Bad input is refused in one line that says where, and leaves nothing behind; good input survives every way in and out."""
import gzip, warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import Phase, example, given, settings, strategies as st

from foxhunt.core import UserError, sha256
from foxhunt.data.bars import COLUMNS, PRICES, findings, infer_interval, load_bars, make_bars, read_bars, validate
from foxhunt.data.sessions import CALENDARS, bars_per_year, schedule, session_dates, session_marks
from foxhunt.data.store import epoch_ns, export_us, read_parquet, write_parquet
from foxhunt.market.contracts import contract

from _realdata import real

ROOT = Path(__file__).parents[1]
EUR, SPOT = contract("6E"), contract("EURUSD")
FAST = replace(EUR, calendar="24x5")       # a calendar that is quick to make, for the tests with many files
HEADER = "timestamp_utc,open,high,low,close,volume"
ROWS = [f"2024-01-02 10:{m:02d}:00,{1.1 + m * 5e-5:.5f},{1.1 + (m + 2) * 5e-5:.5f},{1.1 + (m - 1) * 5e-5:.5f},{1.1 + (m + 1) * 5e-5:.5f},{m + 1}" for m in range(30)]


def csv(rows=ROWS, header=HEADER): return "\n".join([header, *rows]) + "\n"


def cell(row: int, column: int, value: str) -> str:
    "The good file with one cell changed; rows count from 1."
    parts = ROWS[row - 1].split(","); parts[column] = value
    return csv(ROWS[:row - 1] + [",".join(parts)] + ROWS[row:])


BAD = {
    "empty": ("", "the file is empty"),
    "header only": (HEADER + "\n", "no rows"),
    "wrong column": (csv(header=HEADER.replace("high", "hi")), "no column for high; the first line names timestamp_utc, open, hi, low"),
    "no header": (csv(header=ROWS[0]), "no column for ts_event, open, high, low, close, volume"),
    "one field more": (csv(ROWS[:4] + [ROWS[4] + ",1"] + ROWS[5:]), "line 6, saw 7"),
    "all one field more": (csv([r + ",1" for r in ROWS]), "every line needs the header's number of fields"),
    "one field less": (csv(ROWS[:4] + [ROWS[4].rsplit(",", 1)[0]] + ROWS[5:]), "column volume, row 5 (line 6): nan is missing or not finite"),
    "text": (cell(7, 2, "n/a!"), "column high, row 7 (line 8): 'n/a!' is not a number"),
    **{f"NaN in {c}": (cell(9, i, ""), f"column {c}, row 9 (line 10): nan is missing or not finite") for i, c in enumerate((*PRICES, "volume"), 1)},
    "infinite": (cell(9, 4, "inf"), "column close, row 9 (line 10): inf is missing or not finite"),
    "no time": (cell(9, 0, ""), "column timestamp_utc, row 9 (line 10): no time"),
    "another format": (cell(9, 0, "02.01.2024 10:08:00"), "column timestamp_utc, row 9 (line 10): '02.01.2024 10:08:00' is not ISO in UTC"),
    "no such day": (cell(9, 0, "2024-02-30 10:08:00"), "row 9 (line 10): '2024-02-30 10:08:00' is not a date"),
    "slashes": (csv([r.replace("2024-01-02", "01/02/2024") for r in ROWS]), "row 1 (line 2): '01/02/2024 10:00:00' is in no known time format"),
    "off the grid": (cell(9, 4, "1.10042"), "column close, row 9 (line 10): 1.10042 is off the tick grid of 5e-05"),
    "high below low": (cell(9, 2, "1.1"), "row 9 (line 10): open 1.1004, high 1.1, low 1.10035, close 1.10045: high is below low"),
    "high below close": (cell(9, 2, "1.1004"), "high is below open or close"),
    "low above open": (cell(9, 3, "1.10045"), "low is above open or close"),
    "zero": (cell(9, 3, "0"), "column low, row 9 (line 10): 0 is zero or negative"),
    "negative": (cell(9, 3, "-1.1"), "column low, row 9 (line 10): -1.1 is zero or negative"),
    "negative volume": (cell(9, 5, "-4"), "column volume, row 9 (line 10): -4 is negative"),
    "half a contract": (cell(9, 5, "4.5"), "column volume, row 9 (line 10): 4.5 is not whole"),
    "conflicting duplicate": (csv(ROWS + [ROWS[4].replace(",5", ",6")[: len(ROWS[4])].rsplit(",", 1)[0] + ",99"]), "row 5 (line 6) and"),
    "mixed intervals": (csv(ROWS + [ROWS[-1].replace("10:29:00", "10:29:30")]), "row 31 (line 32): comes 30 s after the bar before it, most bars 60 s"),
    "two intervals in turn": (csv(ROWS + [ROWS[-1].replace("2024-01-02 10:29", f"2024-01-03 {h:02d}:00") for h in range(12)]), "bars in a row come 3600 s apart"),
    "a price in another unit": (cell(9, 4, "110.045").replace("1.10050,1.10035,110.045", "110.05,1.10035,110.045"), "row 9 (line 10): 110.045 is more than 5 times off"),
    "all in another unit": (csv([f"2024-01-02 10:{m:02d}:00,{110 + m * .005:.3f},{110 + m * .005:.3f},{110 + m * .005:.3f},{110 + m * .005:.3f},1" for m in range(30)]), "all prices are multiples of 100 ticks"),
    "two symbols": (csv([r + (",6EH4" if i < 20 else ",6EM4") for i, r in enumerate(ROWS)], HEADER + ",symbol"), "column symbol, row 21 (line 22): 6EM4 after 6EH4"),
    "two record types": (csv([r + (",33" if i < 20 else ",32") for i, r in enumerate(ROWS)], HEADER + ",rtype"), "column rtype, row 21 (line 22): 32 after 33"),
    "one bar": (csv(ROWS[:1]), "one bar does not tell its interval"),
    **{f"a doubled column, {name}": (csv([r + ",1.1" for r in ROWS], f"{HEADER},{name}"), f"columns close and {name} could both be close; keep one") for name in ("close", "Close", "CLOSE")},
    "a price of 1e300": (cell(9, 2, "1e300"), "column high, row 9 (line 10): 1e+300 is no price, but far too large"),
    "prices of 1e308": (csv([",".join([r.split(",")[0], *["1e308"] * 4, "1"]) for r in ROWS]), "column open, row 1 (line 2): 1e+308 is no price"),
    "a volume of 2^63": (cell(9, 5, str(2**63)), "column volume, row 9 (line 10): 9.223372037e+18 is no volume"),
    "volumes of 1e308": (csv([r.rsplit(",", 1)[0] + ",1e308" for r in ROWS]), "column volume, row 1 (line 2): 1e+308 is no volume"),
    **{f"instrument {v or 'empty'}": (csv([r + ("," + v if i == 8 else ",7") for i, r in enumerate(ROWS)], HEADER + ",instrument_id"), f"column instrument_id, row 9 (line 10): {v!r} is not a whole number" if v else "column instrument_id, row 9 (line 10): 'nan' is not")
       for v in ("", "1.7", "six", "18446744073709551616")},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_that_names_the_place_and_nothing_is_written(name, tmp_path):
    text, message = BAD[name]; file = tmp_path / "bars.csv"; file.write_text(text)
    with warnings.catch_warnings(), pytest.raises(UserError) as e:
        warnings.simplefilter("error", RuntimeWarning); make_bars(file, tmp_path / "out", contract=FAST)        # numpy has nothing to say beside the one line
    assert str(e.value).startswith(str(file)) and message in str(e.value) and "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["bars.csv"]


@pytest.mark.parametrize("src, message", [("none.csv", "no such file or folder"), ("", "no bar files in this folder"), ("x.xlsx", "unknown kind of file"), ("cut.csv.gz", "cut off"), ("bad.parquet", "not a Parquet file"), ("e.parquet", "is empty")])
def test_bad_files(src, message, tmp_path):
    d = tmp_path / "in"; d.mkdir()
    if src == "x.xlsx": (d / src).write_text("x")
    if src == "cut.csv.gz": (d / src).write_bytes(gzip.compress(csv().encode())[:-20])
    if src == "bad.parquet": (d / src).write_bytes(b"PAR1" * 9)
    if src == "e.parquet": (d / src).write_bytes(b"")
    with pytest.raises(UserError, match=message): make_bars(d / src if src else d, tmp_path / "out", contract=EUR)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_good_file_comes_through_every_door_alike(tmp_path):
    (tmp_path / "a.csv").write_text(csv()); want, seen = read_bars(tmp_path / "a.csv", FAST)
    assert list(want.columns) == list(COLUMNS) and len(want) == 30 and seen["interval_ns"] == 60 * 10**9 and want.close[0] == 1.10005
    variants = {"semicolons.csv": csv().replace(",", ";"), "tabs.txt": csv().replace(",", "\t"), "bom.csv": "\ufeff" + csv(), "zone.csv": csv([r.replace(":00,", ":00Z,", 1) for r in ROWS]),
                "berlin.csv": csv([r.replace(" 10:", " 11:").replace(":00,", ":00+01:00,", 1) for r in ROWS]), "dots.csv": csv([r.replace("2024-01-02", "02.01.2024") for r in ROWS]),
                "epoch.csv": csv([f"{int(t)}," + r.split(",", 1)[1] for t, r in zip(epoch_ns(want.ts_event) // 10**6, ROWS)]), "crlf.csv": csv().replace("\n", "\r\n"),
                "names.csv": csv(header="Gmt time,O,H,L,C,Vol"), "more.csv": csv([r + ",7" for r in ROWS], HEADER + ",trades")}
    for name, text in variants.items():
        (tmp_path / name).write_bytes(text.encode()); pd.testing.assert_frame_equal(read_bars(tmp_path / name, FAST)[0], want)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(csv().encode())); pd.testing.assert_frame_equal(read_bars(tmp_path / "a.csv.gz", FAST)[0], want)
    for dtype in ("uint64", "int32", "float64"):
        want[["ts_event", *PRICES, "volume"]].astype({"volume": dtype}).to_parquet(tmp_path / "a.parquet"); pd.testing.assert_frame_equal(read_bars(tmp_path / "a.parquet", FAST)[0], want)
    want.set_index("ts_event")[[*PRICES, "volume"]].to_parquet(tmp_path / "index.parquet"); pd.testing.assert_frame_equal(read_bars(tmp_path / "index.parquet", FAST)[0], want)
    (tmp_path / "close.csv").write_text(csv([r.replace(f"10:{m:02d}", f"10:{m + 1:02d}", 1) for m, r in enumerate(ROWS)]))
    pd.testing.assert_frame_equal(read_bars(tmp_path / "close.csv", FAST, "close")[0], want)


@pytest.mark.parametrize("column, dtype, value, said", [
    ("volume", "uint64", 2**63, "9.223372037e+18 is no volume"), ("volume", "uint64", 2**64 - 1, "1.844674407e+19 is no volume"), ("volume", "int64", 2**63 - 1, "9.223372037e+18 is no volume"),
    ("instrument_id", "uint64", 2**63, f"'{2**63}' is not a whole number"), ("instrument_id", "float64", 1.7, "'1.7' is not a whole number"),
    ("instrument_id", "float64", np.nan, "'nan' is not a whole number"), ("instrument_id", "str", "6EH4", "'6EH4' is not a whole number")])
def test_integers_of_a_parquet_file_never_wrap_or_break_off(column, dtype, value, said, tmp_path):
    (tmp_path / "a.csv").write_text(csv()); frame = read_bars(tmp_path / "a.csv", FAST)[0].drop(columns="filled")
    cells = frame[column].astype(dtype); cells[4] = value; frame.assign(**{column: cells}).to_parquet(tmp_path / "a.parquet")
    with warnings.catch_warnings(), pytest.raises(UserError) as e:
        warnings.simplefilter("error", RuntimeWarning); read_bars(tmp_path / "a.parquet", FAST)
    assert f"a.parquet: column {column}, row 5: {said}" in str(e.value)


@pytest.mark.parametrize("symbol, first", [("6E", 1.1), ("6E", 0.85), ("ES", 5000.25), ("NQ", 17000.5), ("ZN", 110.515625), ("EURUSD", 1.17)])
def test_float32_prices_mean_the_ticks_that_they_cannot_write(symbol, first, tmp_path):
    "Near 1.1 float32 has steps of 1.2e-7: 1.10775 comes as 1.10775005. Between two ticks it is refused like any other."
    spec = replace(contract(symbol), calendar="24x5"); c = (np.rint(first / spec.tick) + np.arange(500)) * spec.tick
    frame = pd.DataFrame(dict(ts_event=pd.date_range("2024-01-02 10:00", periods=500, freq="min", tz="UTC"), open=c, high=c, low=c, close=c, volume=1)).round({k: 9 for k in PRICES})
    frame.to_parquet(tmp_path / "64.parquet"); narrow = frame.astype({k: "float32" for k in PRICES}); narrow.to_parquet(tmp_path / "32.parquet")
    pd.testing.assert_frame_equal(*(read_bars(tmp_path / f"{n}.parquet", spec)[0] for n in (64, 32)), check_exact=True)
    narrow.loc[[7], list(PRICES)] += np.float32(0.4 * spec.tick); narrow.to_parquet(tmp_path / "off.parquet")
    with pytest.raises(UserError, match="off.parquet: column open, row 8: .* is off the tick grid"): read_bars(tmp_path / "off.parquet", spec)


def test_what_was_left_out_is_said_in_one_line(tmp_path):
    def said(text): (tmp_path / "a.csv").write_text(text); return findings(make_bars(tmp_path / "a.csv", tmp_path / "out", contract=EUR)["contracts"]["6E"]["quality"])
    assert said(csv()) == ""
    assert said(csv([*ROWS, ROWS[3], ROWS[4]])) == "doubled rows dropped: 2, rows that were out of order: 2"
    assert said(csv()[:-2]) == "files that end within a line (cut off?): 1"                      # the volume 30 became 3
    assert said(csv([r.replace("2024-01-02", "2024-01-06") for r in ROWS])) == "bars outside the calendar's sessions: 30"


@settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(30)), double=st.lists(st.integers(0, 29), max_size=5))
def test_order_and_identical_doubles_do_not_matter_but_are_counted(order, double, tmp_path_factory):
    d = tmp_path_factory.mktemp("bars"); (d / "a.csv").write_text(csv()); (d / "b.csv").write_text(csv([ROWS[i] for i in [*order, *double]]))
    want, got = read_bars(d / "a.csv", FAST)[0], read_bars(d / "b.csv", FAST)
    pd.testing.assert_frame_equal(got[0], want)
    late = sum(i < max(([*order, *double])[:k], default=-1) for k, i in enumerate([*order, *double]))
    assert got[1]["duplicates_dropped"]["count"] == len(double) and got[1]["out_of_order"]["count"] == late and got[1]["rows_read"] == 30 + len(double)


@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.generate))
@example(at=365, byte=ord("0"), cut=False).via("the year 0024, found by chance")
@given(at=st.integers(0, len(csv()) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_read_or_refused_never_a_crash(at, byte, cut, tmp_path_factory):
    raw = bytearray(csv().encode()); raw[at] = byte
    file = tmp_path_factory.mktemp("bars") / "a.csv"; file.write_bytes(raw[:at] if cut else raw)
    try: bars, _ = read_bars(file, FAST)
    except UserError as e: assert "\n" not in str(e) and str(file) in str(e)
    else: assert len(bars) <= 30 and np.isfinite(bars[list(PRICES)]).all(axis=None) and bars.ts_event.is_monotonic_increasing


def test_the_folder_is_replaced_whole_keeps_other_contracts_and_never_hits_foreign_files(tmp_path):
    (tmp_path / "a.csv").write_text(csv()); out = tmp_path / "bars"
    made = make_bars(tmp_path / "a.csv", out, contract=EUR, fill="session")
    assert made["contracts"]["6E"]["sources"] == [{"path": str(tmp_path / "a.csv"), "sha256": sha256(tmp_path / "a.csv")}]
    make_bars(tmp_path / "a.csv", out, contract=replace(EUR, symbol="M6E")); assert list(load_bars(out)) == ["6E", "M6E"]
    make_bars(tmp_path / "a.csv", out, contract=EUR, interval_ns=300 * 10**9)
    assert {s: len(f) for s, f in load_bars(out).items()} == {"6E": 6, "M6E": 30}
    (tmp_path / "home").mkdir(); (tmp_path / "home/letter.txt").write_text("dear")
    with pytest.raises(UserError, match="holds other files"): make_bars(tmp_path / "a.csv", tmp_path / "home", contract=EUR)
    assert (tmp_path / "home/letter.txt").read_text() == "dear"
    with pytest.raises(UserError, match="one file for 2 contracts"): make_bars(tmp_path / "a.csv", out, contract=[EUR, SPOT])
    (out / "6E.parquet").unlink()
    with pytest.raises(UserError, match="6E.parquet: no such file"): load_bars(out)


def test_several_contracts_by_name_by_folder_or_by_template(tmp_path):
    src = tmp_path / "src"; (src / "6E").mkdir(parents=True); (src / "6E" / "2024.csv").write_text(csv()); (src / "M6E_1min.csv").write_text(csv(ROWS[:20]))
    two = [EUR, replace(EUR, symbol="M6E")]
    assert {s: c["rows"] for s, c in make_bars(src, tmp_path / "a", contract=two)["contracts"].items()} == {"6E": 30, "M6E": 20}
    for s in ("6E", "M6E"): (tmp_path / f"{s}.csv").write_text(csv())
    assert list(make_bars(str(tmp_path / "{contract}.csv"), tmp_path / "b", contract=two)["contracts"]) == ["6E", "M6E"]
    with pytest.raises(UserError, match="no bar files named after ES"): make_bars(src, tmp_path / "c", contract=[EUR, contract("ES")])


def test_negative_prices_only_where_the_contract_allows_them():
    oil = replace(EUR, symbol="CL", tick=0.01, allow_negative=True)
    t = pd.date_range("2020-04-20 18:00", periods=20, freq="min", tz="UTC")
    close = np.linspace(10, -37.5, 20).round(2); frame = pd.DataFrame(dict(ts_event=t, open=close, high=close + .5, low=close - .5, close=close, volume=5)).round({c: 2 for c in PRICES})
    assert validate(frame, oil)[0].low.min() == -38.0
    with pytest.raises(UserError, match="is zero or negative"): validate(frame, replace(oil, allow_negative=False))


# timestamps -----------------------------------------------------------------

@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=50))
@settings(max_examples=12, deadline=None)
def test_nanoseconds_survive_parquet_and_other_readers(tmp_path_factory, ns):
    import duckdb, polars as pl
    path = tmp_path_factory.mktemp("p") / "t.parquet"
    frame = pd.DataFrame({"ts_event": pd.to_datetime(np.array(ns), unit="ns", utc=True), "x": np.arange(len(ns))}); write_parquet(frame, path)
    assert epoch_ns(read_parquet(path).ts_event).tolist() == ns
    assert pl.read_parquet(path)["ts_event"].dt.timestamp("ns").to_list() == ns
    assert [r[0] // 1000 for r in duckdb.sql(f"select epoch_ns(ts_event) from '{path}'").fetchall()] == [n // 1000 for n in ns]   # its times with a zone are microseconds
    if all(n % 1000 == 0 for n in ns): export_us(frame, path)
    else:
        with pytest.raises(UserError, match="below a microsecond"): export_us(frame, path)


def test_bars_of_the_embedded_sample():
    file = ROOT / "data" / "eurusd_1h_2017.csv"
    if not file.exists(): pytest.skip("data/ is not there; run dvc pull data.dvc")
    bars, seen = read_bars(file, SPOT)
    assert len(bars) == 6225 and bars.volume.dtype == "float64" and bars.ts_event[0] == pd.Timestamp("2017-01-01 22:00", tz="UTC")
    with pytest.raises(UserError, match="is off the tick grid"): read_bars(file, EUR)
    with pytest.raises(UserError, match="is not whole"): read_bars(file, replace(SPOT, spot=False))


# sessions -------------------------------------------------------------------

@pytest.mark.parametrize("calendar", CALENDARS)
def test_session_marks_agree_with_the_calendar_bar_by_bar(calendar):
    plan = schedule(calendar, np.datetime64("2024-03-01"), np.datetime64("2024-04-05"))       # a change of the clock, Good Friday
    ts = np.concatenate([np.arange(a, b, 1800 * 10**9) for a, b in zip(plan.open, plan.close)])
    m = session_marks(ts, calendar, 1800 * 10**9)
    assert m.inside.all() and np.array_equal(np.unique(m.date), plan.date) and m.last.sum() == len(plan.date) and (m.fraction[m.last] == 1).all()
    assert (plan.close[1:] > plan.open[:-1]).all() and bars_per_year(calendar, 60 * 10**9) < 525_600 * 0.75
    assert np.array_equal(session_dates(ts, calendar), np.repeat(plan.date, np.ceil((plan.close - plan.open) / (1800 * 10**9)).astype(int)))


@given(st.lists(st.integers(1, 6), min_size=30, max_size=80))
def test_gaps_are_no_other_interval(steps):
    ts = np.cumsum([0, 1, 1, 1, *[s if s > 3 else 1 for s in steps]]) * 60 * 10**9
    if np.bincount(np.diff(ts) // (60 * 10**9)).argmax() == 1: assert infer_interval(ts) == 60 * 10**9


# the exchange's own month, where somebody has it ------------------------------

def test_a_real_month_of_the_euro_future_as_csv_and_as_dbn():
    bars, seen = read_bars(real("6EH4.1min.close-stamped.2024-01.csv.gz"), EUR, "close")
    assert len(bars) == 29_996 and bars.iloc[0][["open", "high", "low", "close", "volume"]].tolist() == [1.1076, 1.10785, 1.1076, 1.1078, 205]
    assert bars.ts_event.iloc[0] == pd.Timestamp("2024-01-01 23:00", tz="UTC") and bars.ts_event.iloc[-1] == pd.Timestamp("2024-01-31 23:58", tz="UTC")
    assert seen["gaps_in_session"]["count"] == 302 + 51 and seen["outside_session"]["count"] == 0
    dbn, _ = read_bars(real("6EH4.ohlcv-1m.2024-01.dbn.zst"), EUR)
    pd.testing.assert_frame_equal(dbn.drop(columns="instrument_id"), bars.drop(columns="instrument_id"))
    with pytest.raises(UserError, match="use stamp open"): read_bars(real("6EH4.ohlcv-1m.2024-01.dbn.zst"), EUR, "close")
