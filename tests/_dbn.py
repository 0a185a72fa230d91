"""DBN files for tests, written with Databento's own encoder."""
import datetime as dt
from pathlib import Path
from types import SimpleNamespace

import databento_dbn as dbn
import numpy as np
import zstandard

MINUTE, DAY = 60 * 10**9, 86400 * 10**9
START, END = dt.date(2024, 1, 1), dt.date(2024, 2, 1)


def ns(d: dt.date) -> int: return (d - dt.date(1970, 1, 1)).days * DAY


T0 = ns(dt.date(2024, 1, 2)) + 23 * 3600 * 10**9


def mapping(symbols: dict[str, int], start: dt.date = START, end: dt.date = END) -> list:
    return [SimpleNamespace(raw_symbol=s, intervals=[SimpleNamespace(start_date=start, end_date=end, symbol=str(i))]) for s, i in symbols.items()]


def header(schema: str | None, symbols: dict[str, int] | None = None, *, stype_in: str = "raw_symbol", version: int = 3, names: list[str] | None = None, mappings: list | None = None, ts_out: bool = False) -> bytes:
    symbols = {"6EH4": 1001} if symbols is None else symbols
    return bytes(dbn.Metadata("GLBX.MDP3", start=ns(START), end=ns(END), stype_in=dbn.SType(stype_in), stype_out=dbn.SType.INSTRUMENT_ID, schema=dbn.Schema(schema) if schema else None,
                              symbols=names or list(symbols), mappings=mapping(symbols) if mappings is None else mappings, version=version, ts_out=ts_out))


def write(path: Path, body: bytes | list, *args, **kwargs) -> Path:
    "A file of records (bytes or messages) under a header; `.zst` in the name compresses."
    raw = header(*args, **kwargs) + (body if isinstance(body, bytes) else b"".join(map(bytes, body)))
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(raw) if path.name.endswith(".zst") else raw)
    return path


def bars(n: int = 40, id: int = 1001, price: int = 1_100_000_000, step: int = MINUTE, rtype=dbn.RType.OHLCV_1M, seed: int = 0, start: int = T0) -> list:
    rng = np.random.default_rng(seed); p = price + np.cumsum(rng.integers(-3, 4, n)) * 50_000
    return [dbn.OHLCVMsg(rtype, 1, id, start + i * step, int(x), int(x) + 100_000, int(x) - 50_000, int(x) + 50_000, int(v)) for i, (x, v) in enumerate(zip(p, rng.integers(1, 300, n)))]


def trades(n: int = 40, id: int = 1001, seed: int = 0) -> list:
    rng = np.random.default_rng(seed); t = T0 + np.cumsum(rng.integers(1, 10**9, n))
    return [dbn.TradeMsg(1, id, int(x) - 987, 1_100_000_000 + int(k) * 50_000, int(k) + 5, dbn.Action.TRADE, dbn.Side.BID, 0, int(x)) for x, k in zip(t, rng.integers(-4, 5, n))]


def mbp10(n: int = 40, id: int = 1001, seed: int = 0) -> bytes:
    "MBP-10 records of the synthetic market, as one array."
    from foxhunt.data.book import COLUMNS, synthetic_levels
    x = synthetic_levels(n, seed); recs = np.zeros(n, np.dtype(dbn.MBP10Msg._dtypes))
    for k, v in dict(length=92, rtype=10, publisher_id=1, instrument_id=id, action=b"A", side=b"B", flags=128).items(): recs[k] = v
    recs["ts_recv"] = recs["ts_event"] = x["ts_event"]
    for c in COLUMNS: recs[c] = np.round(x[c] * 1e9) if "_px_" in c else x[c]
    return recs.tobytes()


def definition(id: int, symbol: str, kind: str = "F", expiry: dt.date | None = dt.date(2024, 3, 18), tick: int = 50_000, **more) -> dbn.InstrumentDefMsg:
    facts = dict(unit_of_measure_qty=125_000 * 10**9, currency="USD", expiration=dbn.UNDEF_TIMESTAMP if expiry is None else ns(expiry)) | more
    return dbn.InstrumentDefMsg(1, id, ns(START), ns(START), tick, 10**9, symbol, "6E", "FUT", dbn.InstrumentClass(kind), dbn.SecurityUpdateAction.ADD, **facts)


def manifest(folder: Path) -> None:
    from foxhunt.core import sha256, write_json
    write_json(folder / "manifest.json", {"job_id": "test", "files": [{"filename": p.name, "size": p.stat().st_size, "hash": f"sha256:{sha256(p)}"} for p in sorted(folder.glob("*.dbn*"))]})


LAYOUT = {"trades": dbn.TradeMsg, "tbbo": dbn.MBP1Msg, "mbp-1": dbn.MBP1Msg, "mbp-10": dbn.MBP10Msg}


def tape(schema: str, ts: np.ndarray, price: np.ndarray, size: np.ndarray, id: np.ndarray | int = 1001, action: np.ndarray | bytes = b"T") -> np.ndarray:
    "Records of a schema that holds trades: (n,) times of receipt in ns, prices in 1e-9, sizes, instrument ids, actions."
    cls = LAYOUT[schema]; recs = np.zeros(len(ts), np.dtype(cls._dtypes))
    for k, v in dict(length=recs.itemsize // 4, rtype=int(dbn.RType.from_schema(dbn.Schema(schema))), publisher_id=1, instrument_id=id, ts_event=ts - 987, ts_recv=ts, price=price, size=size, action=action, side=b"B").items(): recs[k] = v
    return recs
