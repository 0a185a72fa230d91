"""The real Databento client against a local TLS server: price, ranges, refusals, busy servers, broken lines, resuming."""
import json, logging

import pytest

from _databento_server import Server
from foxhunt.core import UserError
from foxhunt.data.dbn import read_definitions, read_ohlcv
from foxhunt.data.download import Request, download, load_request

KEY = "db-UnitTestSecretKey0123456789"
R = Request(["6E.FUT"], "2024-01-04", "2024-01-09")     # Thursday to Monday


@pytest.fixture
def server():
    with Server(KEY) as s: yield s


def get(server, out, request=R, key=KEY, **k):
    said = []; options = dict(max_cost=1.0, retries=2, sleep=lambda s: said.append(s)) | k
    return download(request, out, key=key, gateway=server.gateway, say=said.append, **options), said


def test_price_first_then_days(server, tmp_path):
    manifest, said = get(server, tmp_path / "d")
    order = [e for e, _ in server.calls]; first = order.index("timeseries.get_range")
    assert {"metadata.get_dataset_condition", "metadata.get_cost", "metadata.get_record_count"} <= set(order[:first]) and "$0.05" in said[0] and "2,1" not in said[0][:3]
    ranges = [q for e, q in server.calls if e == "timeseries.get_range"]
    assert [q["start"][:10] for q in ranges] == ["2024-01-04", "2024-01-05", "2024-01-06", "2024-01-07", "2024-01-08"] and ranges[0]["end"][:10] == "2024-01-05" and {q["stype_in"] for q in ranges} == {"parent"}
    bars, report = read_ohlcv(tmp_path / "d", "6E"); files = {f["day"]: f for f in manifest["files"]}
    assert files["2024-01-06"]["records"] == 0 and sum(f["records"] for f in manifest["files"]) == len(bars) + sum(report["spreads"].values()) == 4 * 432 and bars.ts_event.is_monotonic_increasing


def test_too_dear_buys_nothing(server, tmp_path):
    with pytest.raises(UserError, match=r"\$0.05 is more than --max-cost 0.01; nothing was bought"): get(server, tmp_path / "d", max_cost=0.01)
    assert server.count("timeseries.get_range") == 0 and not (tmp_path / "d").exists()


def test_the_key(server, tmp_path, monkeypatch):
    monkeypatch.delenv("DATABENTO_API_KEY", raising=False)
    with pytest.raises(UserError, match="environment variable DATABENTO_API_KEY"): get(server, tmp_path / "d", key=None)
    with pytest.raises(UserError, match="refused the key; check DATABENTO_API_KEY") as e: get(server, tmp_path / "d", key="db-wrong")
    assert "db-wrong" not in str(e.value) and server.count("metadata.get_dataset_condition") == 1         # asked once: waiting does not mend a key
    monkeypatch.setenv("DATABENTO_API_KEY", KEY); assert len(get(server, tmp_path / "d", key=None)[0]["files"]) == 5


@pytest.mark.parametrize("status, says", [(402, "wants payment"), (403, "no access"), (422, "the request is wrong")])
def test_refusals_are_said_once(server, tmp_path, status, says):
    server.faults["timeseries.get_range"] = [status]
    with pytest.raises(UserError, match=rf"2024-01-04 ohlcv-1m: .*{says}.* \({status}: "): get(server, tmp_path / "d")
    assert server.count("timeseries.get_range") == 1 and not list((tmp_path / "d").glob("*.dbn*"))


@pytest.mark.parametrize("fault", [429, 500, 503, "cut", "silent"])
def test_what_passes_is_tried_again(server, tmp_path, fault):
    server.faults["timeseries.get_range"] = [fault]; server.faults["metadata.get_cost"] = [429]
    manifest, said = get(server, tmp_path / "d")
    assert len(manifest["files"]) == 5 and server.count("timeseries.get_range") == 6 and sum("trying again" in str(s) for s in said) == 2
    assert len(read_ohlcv(tmp_path / "d", "6E")[0]) == 4 * 288


def test_an_interrupted_download_continues_with_the_day_that_is_missing(server, tmp_path):
    server.faults["timeseries.get_range"] = [None, None, "cut", "cut", "cut"]
    with pytest.raises(UserError, match="2024-01-06 ohlcv-1m: still failing after 3 tries .*run it again to continue"): get(server, tmp_path / "d")
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["glbx-mdp3-20240104.ohlcv-1m.dbn.zst", "glbx-mdp3-20240105.ohlcv-1m.dbn.zst", "manifest.json"]     # whole days, no litter
    before = {p.name: p.read_bytes() for p in (tmp_path / "d").glob("*.dbn.zst")}; server.calls.clear()
    manifest, said = get(server, tmp_path / "d")
    assert server.count("timeseries.get_range") == 3 and "$0.03" in said[0] and "2 files are there already" in said[0] and len(manifest["files"]) == 5
    assert all((tmp_path / "d" / n).read_bytes() == b for n, b in before.items())
    server.calls.clear(); get(server, tmp_path / "d", max_cost=0); assert server.count("timeseries.get_range") == server.count("metadata.get_cost") == 0


def test_a_changed_file_is_fetched_again(server, tmp_path):
    get(server, tmp_path / "d"); f = next((tmp_path / "d").glob("*0105*")); raw = f.read_bytes(); f.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(UserError, match="SHA-256 differs"): read_ohlcv(tmp_path / "d")
    server.calls.clear(); get(server, tmp_path / "d"); assert server.count("timeseries.get_range") == 1 and f.read_bytes() == raw


def test_a_longer_request_adds_days_and_another_is_refused(server, tmp_path):
    get(server, tmp_path / "d"); server.calls.clear()
    manifest, _ = get(server, tmp_path / "d", Request(["6E.FUT"], "2024-01-03", "2024-01-10")); assert server.count("timeseries.get_range") == 2 and len(manifest["files"]) == 7
    with pytest.raises(UserError, match="was made for symbols"): get(server, tmp_path / "d", Request(["ES.FUT"], "2024-01-04", "2024-01-09"))
    (tmp_path / "mine").mkdir(); (tmp_path / "mine" / "x").write_text("x")
    with pytest.raises(UserError, match="holds other files"): get(server, tmp_path / "mine")


def test_conditions_of_days(server, tmp_path):
    server.conditions.update({"2024-01-06": "missing", "2024-01-07": "degraded", "2024-01-08": "pending"}); manifest, said = get(server, tmp_path / "d")
    assert [f["day"] for f in manifest["files"]] == ["2024-01-04", "2024-01-05", "2024-01-07"] and manifest["condition"] == server.conditions
    assert "2024-01-07: degraded" in said and "2024-01-08: pending, left out" in said


def test_definitions_come_along(server, tmp_path):
    get(server, tmp_path / "d", Request(["6E.FUT"], "2024-01-04", "2024-01-06", schemas=["ohlcv-1m", "definition"]))
    facts = read_definitions(tmp_path / "d"); assert {f[0].symbol: f[0].kind for f in facts.values()} == {"6EH4": "F", "6EM4": "F", "6EH4-6EM4": "S"}
    assert read_ohlcv(tmp_path / "d", "6E")[1]["spreads"] == {"6EH4-6EM4": 2 * 144}


def test_the_key_is_nowhere(server, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG); server.faults["timeseries.get_range"] = [429, "cut", 500, 500, 500]
    _, said = get(server, tmp_path / "d", retries=5)
    written = b"".join(p.read_bytes() for p in (tmp_path / "d").iterdir()); out = capfd.readouterr()
    for text in (caplog.text, out.out, out.err, json.dumps([str(s) for s in said]), written.decode("latin-1")): assert KEY not in text


def test_the_seed_documents_request_is_priced_before_it_is_bought(server, tmp_path):
    seed = load_request("seed_90_days"); assert (len(seed.days()), seed.symbols) == (90, ("ES.FUT", "NQ.FUT", "ZN.FUT", "6E.FUT"))
    with pytest.raises(UserError, match=r"\$1.80 is more than"): get(server, tmp_path / "d", seed, max_cost=1)
    asked = next(q for e, q in server.calls if e == "metadata.get_cost"); assert asked["symbols"] == "ES.FUT,NQ.FUT,ZN.FUT,6E.FUT" and asked["end"][:10] == "2024-03-31"
