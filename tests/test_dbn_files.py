"""DBN files in every form: exact values, all versions, symbology, definitions, and times that keep their last nanosecond."""
import dataclasses
import datetime as dt

import databento_dbn as dbn
import numpy as np
import pandas as pd
import pytest

from _dbn import MINUTE, START, T0, bars, definition, manifest, mapping, mbp10, ns, trades, write
from _realdata import real
from foxhunt.core import UserError, write_json
from foxhunt.data.bars import read_bars
from foxhunt.data.dbn import RECORDS, check_contract, frame, read_definitions, read_frame, read_header, read_ohlcv, read_open_interest, records, trades as dbn_trades
from foxhunt.data.store import read_parquet, write_parquet
from foxhunt.market.contracts import contract

KINDS = ["bbo-1m", "bbo-1s", "definition", "mbo", "mbp-1", "mbp-10", "ohlcv-1d", "ohlcv-1h", "ohlcv-1m", "ohlcv-1s", "statistics", "status", "tbbo", "trades"]


# --- real files ---

@pytest.mark.parametrize("kind", KINDS)
def test_every_value_of_a_real_file_is_the_one_that_databento_decodes(kind):
    "An independent decoder (the Databento client, with its own float and time conversion) sees the same in each field of each record."
    import databento, warnings
    path = real(f"glbx/test_data.{kind}.dbn.zst"); ours, report = read_frame(path, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore"); theirs = databento.DBNStore.from_file(path).to_df().reset_index()
    assert len(ours) == len(theirs) == report["rows"] and set(theirs) <= set(ours)
    for c in theirs:
        a, b = ours[c], theirs[c]
        if isinstance(b.dtype, pd.DatetimeTZDtype): assert str(a.dtype) == "datetime64[ns, UTC]"; pd.testing.assert_series_equal(a, b.dt.as_unit("ns"), check_names=False)
        elif b.dtype.kind in "iuf" and a.dtype.kind in "iuf": np.testing.assert_array_equal(np.nan_to_num(a.to_numpy(float)), np.nan_to_num(b.to_numpy(float)), err_msg=c)
        else: assert [str(x) for x in a] == [str(x) for x in b], c
    assert all(ours[c].dtype != np.uint64 for c in ours)


def test_known_values_of_the_real_files():
    m = read_ohlcv(real("glbx/test_data.ohlcv-1m.dbn.zst"))[0]
    assert [f"{t:%H:%M}" for t in m.ts_event] == ["00:00", "00:01", "00:02", "00:03"] and set(m.symbol) == {"ESH1"} and set(m.instrument_id) == {5482}
    assert m.loc[0, ["open", "high", "low", "close", "volume"]].tolist() == [3702.75, 3704.75, 3702.5, 3704.75, 306]
    b = read_frame(real("glbx/test_data.mbp-10.dbn.zst"), "mbp-10")[0]
    assert b.loc[0, ["bid_px_00", "bid_sz_00", "ask_px_00", "ask_sz_00"]].tolist() == [3702.25, 19, 3702.75, 13]
    (es,), = read_definitions(real("glbx/test_data.definition.dbn.zst")).values()
    assert (es.symbol, es.asset, es.kind, es.tick, es.multiplier, es.currency) == ("ESH1", "ES", "F", 0.25, 50.0, "USD")
    assert pd.Timestamp(es.expiry, tz="UTC") == pd.Timestamp("2021-03-19 13:30", tz="UTC")
    assert (es.tick, es.multiplier) == (contract("ES").tick, contract("ES").multiplier)


def test_a_folder_of_every_schema_gives_each_its_own():
    folder = real("glbx")
    for kind in KINDS: assert len(read_frame(folder, kind)[0]) == len(read_frame(folder / f"test_data.{kind}.dbn.zst", kind)[0])
    with pytest.raises(UserError, match="bars of several lengths"): read_ohlcv(folder)


def test_six_e_is_exact_and_equals_the_close_stamped_csv():
    bars_, report = read_ohlcv(real("6EH4.ohlcv-1m.2024-01.dbn.zst"), "6E")
    assert (len(bars_), str(bars_.ts_event.iloc[0]), str(bars_.ts_event.iloc[-1])) == (29_996, "2024-01-01 23:00:00+00:00", "2024-01-31 23:58:00+00:00")
    assert bars_.loc[0, ["open", "high", "low", "close", "volume", "instrument_id", "symbol"]].tolist() == [1.1076, 1.10785, 1.1076, 1.1078, 205, 1001, "6EH4"]
    assert (np.diff(bars_.ts_event.astype("int64")) > 0).all() and report["rows"] == 29_996 and not report["spreads"]
    six = contract("6E")
    ours, _ = read_bars(real("6EH4.ohlcv-1m.2024-01.dbn.zst"), six, "open")
    csv, _ = read_bars(real("6EH4.1min.close-stamped.2024-01.csv.gz"), six, "close")
    shared = [c for c in ours if c != "instrument_id"]               # the CSV knows no id
    pd.testing.assert_frame_equal(ours[shared], csv[shared], check_exact=True)


# --- versions ---

@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("statistics", "definition")])
def test_versions_1_2_3_of_a_real_file_are_equal(kind, tmp_path):
    path = real(f"glbx/test_data.{kind}.dbn.zst"); body = b"".join(r.tobytes() for r in records(path, kind)); want = read_frame(path, kind)[0]
    start = dt.date(2020, 12, 28)
    for v in (1, 2, 3):
        meta = dbn.Metadata("GLBX.MDP3", start=ns(start), end=ns(start) + 86400 * 10**9, stype_in=dbn.SType.RAW_SYMBOL, stype_out=dbn.SType.INSTRUMENT_ID, schema=dbn.Schema(kind), symbols=["ESH1"],
                            mappings=mapping({"ESH1": 5482}, start, start + dt.timedelta(1)), version=v)
        (tmp_path / "f.dbn").write_bytes(bytes(meta) + body)
        assert read_header(tmp_path / "f.dbn").version == v
        pd.testing.assert_frame_equal(read_frame(tmp_path / "f.dbn", kind)[0], want)


def test_definitions_of_all_versions_state_the_same_facts(tmp_path):
    new = definition(1001, "6EH4", min_price_increment_amount=6_250_000_000, activation=T0); old = {}
    fill = dict(trading_reference_price=0, trading_reference_date=0, md_security_trading_status=0, settl_price_type=0, price_ratio=dbn.UNDEF_PRICE, strike_price=dbn.UNDEF_PRICE)
    fields = lambda cls: [a.split("=")[0].strip() for a in cls.__text_signature__.strip("()").split(",") if "ts_out" not in a]
    for v, cls in ((1, dbn.v1.InstrumentDefMsg), (2, dbn.v2.InstrumentDefMsg)):
        old[v] = cls(**{k: fill[k] if k in fill else getattr(new, k) for k in fields(cls)})
    facts = {v: read_definitions(write(tmp_path / f"{v}.dbn", [m], "definition", version=v)) for v, m in (old | {3: new}).items()}
    assert facts[1] == facts[2] == facts[3] and facts[3][1001][0].multiplier == 125_000
    shared = [frame(next(records(tmp_path / f"{v}.dbn")), "definition", v) for v in (1, 2, 3)]
    for c in set(shared[0]) & set(shared[1]) & set(shared[2]) - set(fill): assert len({str(f[c][0]) for f in shared}) == 1, c


def test_statistics_of_old_versions_are_read(tmp_path):
    v1 = dbn.v1.StatMsg(1, 1001, T0, T0, T0, dbn.UNDEF_PRICE, 77, dbn.StatType.OPEN_INTEREST); v3 = dbn.StatMsg(1, 1001, T0, T0, T0, dbn.UNDEF_PRICE, 77, dbn.StatType.OPEN_INTEREST)
    for v, m in ((1, v1), (2, v1), (3, v3)): assert read_open_interest(write(tmp_path / f"{v}.dbn", [m], "statistics", version=v)).open_interest.tolist() == [77]


def test_records_with_a_sending_time(tmp_path):
    body = b"".join(bytes(dbn.OHLCVMsg(dbn.RType.OHLCV_1M, 1, 1001, T0 + i * MINUTE, 1, 2, 1, 2, 3, ts_out=T0 + i)) for i in range(5))
    path = write(tmp_path / "t.dbn", body, "ohlcv-1m", ts_out=True)
    assert read_frame(path, "ohlcv-1m")[0].ts_out.astype("int64").tolist() == [T0 + i for i in range(5)]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="cut off inside record 4"): read_ohlcv(path)


# --- symbology ---

IDS = {"6EH4": 1001, "6EM4": 1002, "6EH4-6EM4": 2001, "6E:BF H4-M4-U4": 2002}


def parent(folder, with_definitions=True, body=None):
    folder.mkdir(exist_ok=True)
    rows = sorted((m for s, i in IDS.items() for m in bars(30, i, 1_100_000_000 if i < 2000 else -5_000_000, seed=i)), key=lambda m: m.ts_event) if body is None else body
    write(folder / "bars.dbn.zst", rows, "ohlcv-1m", IDS, stype_in="parent", names=["6E.FUT"])
    if with_definitions: write(folder / "def.dbn.zst", [definition(i, s, "F" if i < 2000 else "S", None if i >= 2000 else dt.date(2024, 3, 18)) for s, i in IDS.items()], "definition", IDS, stype_in="parent", names=["6E.FUT"])
    return folder


@pytest.mark.parametrize("with_definitions", [True, False])
def test_parent_files_lose_their_spreads_and_say_so(with_definitions, tmp_path):
    got, report = read_ohlcv(parent(tmp_path / "p", with_definitions), contract("6E"))
    assert set(got.symbol) == {"6EH4", "6EM4"} and (got.low > 1).all() and report["spreads"] == {"6EH4-6EM4": 30, "6E:BF H4-M4-U4": 30} and report["rows"] == len(got) == 60
    assert read_definitions(tmp_path / "p")[2001][0].expiry is None if with_definitions else True


def test_a_definition_overrules_the_look_of_a_symbol(tmp_path):
    "A spread whose raw symbol looks like an outright is still a spread."
    write(tmp_path / "bars.dbn", bars(5, 9), "ohlcv-1m", {"6EZ9": 9}, stype_in="parent", names=["6E.FUT"]); write(tmp_path / "def.dbn", [definition(9, "6EZ9", "S")], "definition", {"6EZ9": 9})
    with pytest.raises(UserError, match="no ohlcv-1m record"): read_ohlcv(tmp_path)


# --- definitions and the table of contracts ---

def test_a_definition_that_contradicts_the_contract_stops_the_reading(tmp_path):
    "Both figures are named; spreads, other roots and fields that are not stated contradict nothing."
    six_e, wrong = contract("6E"), {"tick of 0.0001, contract 6E has 5e-05": dict(tick=100_000), "multiplier of 12500, contract 6E has 125000": dict(unit_of_measure_qty=12_500 * 10**9)}
    for k, (says, facts) in enumerate(wrong.items()):
        folder = parent(tmp_path / f"{k}", with_definitions=False)
        write(folder / "def.dbn.zst", [definition(1001, "6EH4"), definition(1002, "6EM4", **facts)], "definition", IDS)
        with pytest.raises(UserError, match=f"6EM4: its definition states a {says}; put it right"): read_ohlcv(folder, six_e)
        with pytest.raises(UserError, match=f"states a {says}"): read_bars(folder, six_e, several=True)
        with pytest.raises(UserError, match=f"states a {says}"): next(dbn_trades(folder, "ohlcv-1m", root=six_e))
        check_contract(read_definitions(folder), contract("ES")); read_ohlcv(folder, "6E")            # a root alone states nothing to compare
        (folder / "def.dbn.zst").unlink(); assert len(read_ohlcv(folder, six_e)[0])                    # the way out that the message names
    silent = [definition(2001, "6EH4-6EM4", "S", None, tick=10_000), definition(1001, "6EH4", unit_of_measure_qty=dbn.UNDEF_PRICE)]
    check_contract(read_definitions(write(tmp_path / "d.dbn", silent, "definition", IDS)), six_e)


def test_real_definitions_agree_with_the_table():
    facts = read_definitions(real("glbx/test_data.definition.dbn.zst")); check_contract(facts, contract("ES"))
    with pytest.raises(UserError, match="ESH1: its definition states a tick of 0.25, contract ES has 0.5"): check_contract(facts, dataclasses.replace(contract("ES"), tick=0.5))


def test_continuous_symbols_keep_the_instrument_id(tmp_path):
    half = dt.date(2024, 1, 3); spans = mapping({"6E.c.0": 1001}, START, half)[0]; spans.intervals += mapping({"6E.c.0": 1002}, half, dt.date(2024, 2, 1))[0].intervals
    rows = bars(60, 1001) + bars(60, 1002, start=T0 + 60 * MINUTE)                          # 23:00 to 01:00: the change falls on 00:00 UTC, inside a session
    got, report = read_ohlcv(write(tmp_path / "c.dbn", rows, "ohlcv-1m", stype_in="continuous", names=["6E.c.0"], mappings=[spans]), "6E")
    assert set(got.symbol) == {"6E.c.0"} and got.instrument_id.tolist() == [1001] * 60 + [1002] * 60 and not report["unmapped"]


def test_symbols_come_from_mappings_symbology_json_or_definitions(tmp_path):
    bare = dict(mappings=[], names=["ALL_SYMBOLS"])
    write(tmp_path / "bars.dbn", bars(5, 7) + bars(5, 8, start=T0 + MINUTE * 9), "ohlcv-1m", **bare)
    got, report = read_ohlcv(tmp_path); assert set(got.symbol) == {""} and report["unmapped"] == {"7": 5, "8": 5} and set(got.instrument_id) == {7, 8}
    write_json(tmp_path / "symbology.json", {"result": {"6EH4": [{"d0": "2024-01-01", "d1": "2024-02-01", "s": "7"}]}, "stype_in": "raw_symbol"})
    assert read_ohlcv(tmp_path)[0].symbol.tolist() == ["6EH4"] * 5 + [""] * 5
    write(tmp_path / "def.dbn", [definition(8, "6EM4")], "definition", **bare)
    assert read_ohlcv(tmp_path)[0].symbol.tolist() == ["6EH4"] * 5 + ["6EM4"] * 5
    (tmp_path / "by_id").mkdir(); turned = mapping({"7": 0}); turned[0].intervals[0].symbol = "6EU4"       # ids in, symbols out
    assert set(read_ohlcv(write(tmp_path / "by_id" / "id.dbn", bars(5, 7), "ohlcv-1m", stype_in="instrument_id", names=["7"], mappings=turned))[0].symbol) == {"6EU4"}


def test_a_mixed_file_gives_one_interval_at_a_time(tmp_path):
    second = bars(120, step=10**9, rtype=dbn.RType.OHLCV_1S); minute = bars(2)
    for schema in (None, "ohlcv-1m"):                                                       # a recording, and a header that names only one of both
        path = write(tmp_path / "m.dbn.zst", second + minute, schema)
        got, report = read_ohlcv(path, schema="ohlcv-1m"); assert len(got) == 2 and report["other"] == {"ohlcv-1s": 120}


def test_messages_about_a_source(tmp_path):
    write(tmp_path / "t.dbn", trades(), "trades")
    for call, says in ((lambda: read_ohlcv(tmp_path), "holds no bars, but trades"), (lambda: read_ohlcv(tmp_path / "none.dbn"), "no such file"), (lambda: read_ohlcv(tmp_path, schema="ohlcv-1m"), "holds no ohlcv-1m, but trades"),
                       (lambda: read_frame(tmp_path, "cmbp-1"), "holds no cmbp-1"), (lambda: list(records(tmp_path / "t.dbn", "mbp")), "schema 'mbp' is not read")):
        with pytest.raises(UserError, match=says): call()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no .dbn or .dbn.zst file in it"): read_ohlcv(tmp_path / "empty")


# --- time ---

def test_nanoseconds_survive_parquet_and_other_readers(tmp_path):
    import duckdb, polars
    f = read_frame(write(tmp_path / "t.dbn.zst", trades(500), "trades"), "trades")[0]; want = f.ts_event.astype("int64").to_numpy(); recv = f.ts_recv.astype("int64").to_numpy()
    assert (want % 1000 != 0).mean() > 0.99 and (recv - want == 987).all()
    path = tmp_path / "t.parquet"; write_parquet(f, path)
    for back in (read_parquet(path), pd.read_parquet(path)):
        assert str(back.ts_event.dtype) == "datetime64[ns, UTC]" and (back.ts_event.astype("int64") == want).all() and (back.ts_recv.astype("int64") == recv).all()
    p = polars.read_parquet(path); assert p.schema["ts_event"] == polars.Datetime("ns", "UTC") and (p["ts_event"].to_physical().to_numpy() == want).all()
    assert [r[0] for r in duckdb.sql(f"select epoch_ns(ts_event) from '{path}'").fetchall()] == want.tolist()


def test_times_of_real_trades_survive(tmp_path):
    f = read_frame(real("glbx/test_data.trades.dbn.zst"), "trades")[0]; write_parquet(f, tmp_path / "t.parquet")
    assert f.ts_event.astype("int64")[0] == 1609113600246507011 == pd.read_parquet(tmp_path / "t.parquet").ts_event.astype("int64")[0]


def test_unsigned_never_wraps(tmp_path):
    f = read_ohlcv(write(tmp_path / "b.dbn", bars(50), "ohlcv-1m"))[0]
    assert f.volume.diff().min() < 0 and f.volume.diff().abs().max() < 300 and f.volume.dtype == f.instrument_id.dtype == np.int64


@pytest.mark.parametrize("chunk", [1, 7, 39, 40, 41, 10**6])
def test_the_chunk_size_cannot_be_seen(chunk, tmp_path):
    for schema, body in (("ohlcv-1m", bars()), ("trades", trades()), ("mbp-10", mbp10()), (None, bars() + trades())):
        path = write(tmp_path / "f.dbn.zst", body, schema); kind = schema or "trades"
        assert np.concatenate(list(records(path, kind, chunk=chunk))).tobytes() == np.concatenate(list(records(path, kind))).tobytes()


def test_a_batch_is_read_day_by_day_in_order(tmp_path):
    for day in (3, 1, 2): write(tmp_path / f"x-{day}.dbn.zst", bars(10, start=ns(dt.date(2024, 1, day))), "ohlcv-1m")
    manifest(tmp_path); got, report = read_ohlcv(tmp_path)
    assert got.ts_event.is_monotonic_increasing and len(got) == 30 and [s["path"][-9:] for s in report["sources"]] == ["1.dbn.zst", "2.dbn.zst", "3.dbn.zst"]
    assert set(RECORDS) >= set(KINDS)


def test_folders_in_a_folder_keep_their_own_manifests(tmp_path):
    for k, root in enumerate(("6E", "ES")): (tmp_path / root).mkdir(); write(tmp_path / root / "bars.dbn.zst", bars(10, 1001 + k), "ohlcv-1m", {f"{root}H4": 1001 + k}); manifest(tmp_path / root)
    got, report = read_ohlcv(tmp_path); assert set(got.symbol) == {"6EH4", "ESH4"} and len(report["sources"]) == 2
    good = (tmp_path / "ES/bars.dbn.zst").read_bytes(); (tmp_path / "ES/bars.dbn.zst").write_bytes(good[:-1])
    with pytest.raises(UserError, match="ES/bars.dbn.zst: .* bytes, manifest.json says"): read_ohlcv(tmp_path)
    (tmp_path / "ES/bars.dbn.zst").unlink()
    with pytest.raises(UserError, match="listed in manifest.json but not there"): read_ohlcv(tmp_path)
