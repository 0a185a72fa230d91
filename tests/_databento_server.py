"""A local server that speaks the endpoints of Databento's historical API over TLS, for the real client.

    with Server(key="db-test") as server: download(..., gateway=server.gateway)

`server.faults["timeseries.get_range"] = [429, "cut", 500]` makes the next three answers of that endpoint fail in turn.
"""
import base64, contextlib, datetime as dt, json, os, ssl, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import databento_dbn as dbn
import trustme
import zstandard

MINUTE, DAY = 60 * 10**9, 86400 * 10**9
IDS = {"6EH4": 1001, "6EM4": 1002, "6EH4-6EM4": 2001}


def ns(day: dt.date) -> int: return (day - dt.date(1970, 1, 1)).days * DAY


def bars_of(day: dt.date, per_hour: int = 6) -> list:
    "A few one-minute bars of two contracts and their spread; none on Saturdays."
    if day.weekday() == 5: return []
    out = []
    for i in range(24 * per_hour):
        for symbol, price in (("6EH4", 1_100_000_000), ("6EM4", 1_105_000_000), ("6EH4-6EM4", -5_000_000)):
            p = price + (i % 7) * 50_000
            out.append(dbn.OHLCVMsg(dbn.RType.OHLCV_1M, 1, IDS[symbol], ns(day) + i * (60 // per_hour) * MINUTE, p, p, p, p, 1 + i % 5))
    return out


def definitions_of(day: dt.date) -> list:
    make = lambda id, symbol, kind: dbn.InstrumentDefMsg(1, id, ns(day), ns(day), 50_000, 10**9, symbol, "6E", "FUT", dbn.InstrumentClass(kind), dbn.SecurityUpdateAction.ADD,
                                                         expiration=ns(dt.date(2024, 3, 18)), unit_of_measure_qty=125_000 * 10**9, currency="USD")
    return [make(IDS[s], s, "S" if "-" in s else "F") for s in IDS]


def file_of(schema: str, start: dt.date, end: dt.date) -> bytes:
    days = [start + dt.timedelta(i) for i in range((end - start).days)]
    records = [r for d in days for r in (definitions_of(d) if schema == "definition" else bars_of(d))]
    mappings = [SimpleNamespace(raw_symbol=s, intervals=[SimpleNamespace(start_date=start, end_date=end, symbol=str(i))]) for s, i in IDS.items()]
    meta = dbn.Metadata("GLBX.MDP3", start=ns(start), end=ns(end), stype_in=dbn.SType.PARENT, stype_out=dbn.SType.INSTRUMENT_ID, schema=dbn.Schema(schema), symbols=["6E.FUT"], mappings=mappings)
    return zstandard.compress(bytes(meta) + b"".join(map(bytes, records)))


class Server(contextlib.AbstractContextManager):
    def __init__(self, key: str = "db-unittest-key", price: float = 0.01, conditions: dict[str, str] | None = None):
        self.key, self.price, self.conditions = key, price, conditions or {}
        self.faults: dict[str, list] = {}      # endpoint -> what the next answers are: a status, "cut", or "silent" (ends early without an error)
        self.calls: list[tuple[str, dict]] = []

    def __enter__(self):
        ca = trustme.CA(); context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); ca.issue_cert("localhost").configure_cert(context)
        self.bundle = ca.cert_pem.tempfile(); path = self.bundle.__enter__()
        self.old = os.environ.get("REQUESTS_CA_BUNDLE"); os.environ["REQUESTS_CA_BUNDLE"] = path
        self.http = ThreadingHTTPServer(("localhost", 0), type("H", (Handler,), {"server_state": self}))
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.gateway = f"localhost:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown(); self.http.server_close(); self.bundle.__exit__(None, None, None)
        if self.old is None: os.environ.pop("REQUESTS_CA_BUNDLE", None)
        else: os.environ["REQUESTS_CA_BUNDLE"] = self.old

    def count(self, endpoint: str) -> int: return sum(e == endpoint for e, _ in self.calls)


class Handler(BaseHTTPRequestHandler):
    server_state: Server
    def log_message(self, *_): pass

    def do_GET(self): self.answer(parse_qs(urlsplit(self.path).query))

    def do_POST(self): self.answer(parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()))

    def send(self, status: int, body: bytes, **headers: str):
        self.send_response(status); self.send_header("Content-Type", "application/json")
        for k, v in headers.items(): self.send_header(k.replace("_", "-"), v)
        self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)

    def answer(self, form: dict):
        state, endpoint = self.server_state, urlsplit(self.path).path.removeprefix("/v0/"); q = {k: v[0] for k, v in form.items()}
        state.calls.append((endpoint, q))
        if self.headers.get("Authorization") != "Basic " + base64.b64encode(f"{state.key}:".encode()).decode():
            return self.send(401, json.dumps({"detail": {"case": "auth_invalid_key", "message": "Authentication failed.", "docs": ""}}).encode())
        fault = state.faults.get(endpoint, []).pop(0) if state.faults.get(endpoint) else None
        if isinstance(fault, int): return self.send(fault, json.dumps({"detail": {"case": f"case_{fault}", "message": f"failed with {fault}", "docs": ""}}).encode(), **({"Retry_After": "0"} if fault == 429 else {}))
        date = lambda k: dt.datetime.fromisoformat(q[k].replace("Z", "+00:00")).date()
        if endpoint == "metadata.get_dataset_condition":
            a, b = dt.date.fromisoformat(q["start_date"]), dt.date.fromisoformat(q["end_date"])
            days = [a + dt.timedelta(i) for i in range((b - a).days + 1)]
            return self.send(200, json.dumps([{"date": str(d), "condition": state.conditions.get(str(d), "available"), "last_modified_date": str(d)} for d in days]).encode())
        records = sum(len(definitions_of(d) if q["schema"] == "definition" else bars_of(d)) for d in (date("start") + dt.timedelta(i) for i in range((date("end") - date("start")).days)))
        if endpoint == "metadata.get_cost": return self.send(200, json.dumps(state.price * (date("end") - date("start")).days).encode())
        if endpoint == "metadata.get_record_count": return self.send(200, json.dumps(records).encode())
        if endpoint != "timeseries.get_range": return self.send(404, b"{}")
        body = file_of(q["schema"], date("start"), date("end"))
        if fault == "silent": return self.send(200, body[:len(body) // 2])
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        if fault == "cut": self.wfile.write(body[:len(body) // 2]); self.wfile.flush(); self.connection.close(); return
        self.wfile.write(body)
