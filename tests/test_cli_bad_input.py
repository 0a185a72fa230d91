"""What a user can do wrong at the command line gets one clear line and exit code 2, and leaves nothing half-written."""
import gzip, json, shutil, subprocess, sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytestmark = pytest.mark.integration
GOOD = """timestamp_utc,open,high,low,close,volume
2024-01-02T00:00:00Z,1.1000,1.1010,1.0990,1.1005,10
2024-01-02T00:01:00Z,1.1005,1.1015,1.1000,1.1010,11
2024-01-02T00:02:00Z,1.1010,1.1020,1.1005,1.1015,12
2024-01-02T00:03:00Z,1.1015,1.1025,1.1010,1.1020,13
2024-01-02T00:04:00Z,1.1020,1.1030,1.1015,1.1025,14
"""


def foxhunt(*args):
    from foxhunt.cli import app
    return CliRunner().invoke(app, [str(a) for a in args])


def refused(result, *words):
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    lines = [l for l in result.stderr.splitlines() if l.strip()]
    assert len(lines) == 1 and "Traceback" not in result.output, result.output
    for w in words: assert w in lines[0], (w, lines[0])
    return lines[0]


@pytest.fixture()
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text(GOOD)
    return tmp_path


def test_good_file_passes(here):
    result = foxhunt("bars", "good.csv", "out", "--contract", "6E")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in Path("out").iterdir()) == ["6E.parquet", "bars.json"]


BAD = {
    "nan open": (GOOD.replace("1.1010,1.1020,1.1005,1.1015,12", ",1.1020,1.1005,1.1015,12"), ["bad.csv", "open"]),
    "nan high": (GOOD.replace("1.1010,1.1020,1.1005,1.1015,12", "1.1010,,1.1005,1.1015,12"), ["bad.csv", "high"]),
    "nan low": (GOOD.replace("1.1010,1.1020,1.1005,1.1015,12", "1.1010,1.1020,,1.1015,12"), ["bad.csv", "low"]),
    "nan close": (GOOD.replace("1.1010,1.1020,1.1005,1.1015,12", "1.1010,1.1020,1.1005,,12"), ["bad.csv", "close"]),
    "nan volume": (GOOD.replace("1.1010,1.1020,1.1005,1.1015,12", "1.1010,1.1020,1.1005,1.1015,"), ["bad.csv", "volume"]),
    "text for a number": (GOOD.replace("1.1015,12", "n/a,12"), ["bad.csv", "close"]),
    "no close column": (GOOD.replace("close", "last_thing"), ["bad.csv", "close"]),
    "no data": ("timestamp_utc,open,high,low,close,volume\n", ["bad.csv"]),
    "empty": ("", ["bad.csv"]),
    "off the grid": (GOOD.replace("1.1010,1.1020,1.1005,1.1015", "1.10101,1.1020,1.1005,1.1015"), ["bad.csv", "open", "grid"]),
    "high below low": (GOOD.replace("1.1020,1.1005,1.1015,12", "1.1000,1.1005,1.1015,12"), ["bad.csv"]),
    "zero price": (GOOD.replace("1.1010,1.1020,1.1005,1.1015", "1.1010,1.1020,0,1.1015"), ["bad.csv"]),
    "mixed intervals": (GOOD + "2024-01-02T00:04:30Z,1.1020,1.1030,1.1015,1.1025,14\n", ["bad.csv"]),
    "conflicting duplicate": (GOOD + "2024-01-02T00:04:00Z,1.1020,1.1030,1.1015,1.1015,14\n", ["bad.csv"]),
    "foreign": ("\x00\x01\x02binary", ["bad.csv"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_csv_is_refused(here, kind):
    text, words = BAD[kind]; Path("bad.csv").write_text(text)
    refused(foxhunt("bars", "bad.csv", "out", "--contract", "6E"), *words)
    assert not Path("out").exists() and sorted(p.name for p in here.iterdir()) == ["bad.csv", "good.csv"]      # nothing half-written


def test_duplicates_and_disorder_are_counted(here):
    rows = GOOD.splitlines(); Path("odd.csv").write_text("\n".join([rows[0], rows[2], rows[1], *rows[3:], rows[5]]) + "\n")
    assert foxhunt("bars", "odd.csv", "out", "--contract", "6E").exit_code == 0
    facts = json.loads(Path("out/bars.json").read_text())["contracts"]["6E"]
    assert facts["rows"] == 5 and facts["quality"]["duplicates_dropped"]["count"] == 1 and facts["quality"]["out_of_order"]["count"] >= 1


def test_missing_things_are_named(here):
    refused(foxhunt("bars", "none.csv", "out", "--contract", "6E"), "none.csv")
    refused(foxhunt("bars", "good.csv", "out", "--contract", "XX"), "XX", "6E")
    refused(foxhunt("bars", "good.csv", "out", "--contract", "6E", "--stamp", "middle"), "stamp")
    refused(foxhunt("features", "nowhere", "out"), "nowhere")
    refused(foxhunt("train", "dqn", "--features", "nowhere", "--out", "run"), "nowhere")
    refused(foxhunt("train", "dqnn", "--features", "nowhere", "--out", "run"), "dqnn", "did you mean dqn")
    refused(foxhunt("evaluate", "dqn", "--checkpoint", "none.safetensors", "--features", "nowhere", "--out", "run"), "none.safetensors")
    assert [p.name for p in here.iterdir()] == ["good.csv"]


def test_params_faults_name_the_key(here):
    Path("params.yaml").write_text("train: {dqn: {lrr: 1}}\n"); refused(foxhunt("bars", "good.csv", "out"), "train.dqn.lrr", "lr")
    Path("params.yaml").write_text("train: {dqn: {lr: fast}}\n"); refused(foxhunt("bars", "good.csv", "out"), "train.dqn.lr")
    Path("params.yaml").write_text("profile: huge\n"); refused(foxhunt("bars", "good.csv", "out"), "huge")


def test_an_earlier_result_survives_a_fault(here):
    assert foxhunt("bars", "good.csv", "out", "--contract", "6E").exit_code == 0
    before = {p.name: p.read_bytes() for p in Path("out").iterdir()}
    Path("bad.csv").write_text(BAD["nan close"][0]); refused(foxhunt("bars", "bad.csv", "out", "--contract", "6E"), "close")
    assert before == {p.name: p.read_bytes() for p in Path("out").iterdir()}


def test_a_folder_of_something_else_is_not_overwritten(here):
    Path("precious").mkdir(); Path("precious/thesis.txt").write_text("years of work")
    refused(foxhunt("bars", "good.csv", "precious", "--contract", "6E"), "precious")
    assert Path("precious/thesis.txt").read_text() == "years of work"


# --- outputs that would destroy something, checkpoints of another market, wrong command lines ---

TINY = """seed: 0
features: {state_bars: 3}
train:
  dqn: {epochs: 2, updates_per_epoch: 4, lanes: 16, hidden: [8], batch: 16, replay_size: 2000, learn_starts: 64}
  tft: {epochs: 1, hidden: 4, heads: 1, lookback: 8, horizon: 2, stride: 64}
"""


def renamed(table, **kw):
    import dataclasses
    return dataclasses.replace(table, **kw)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "Features and two trained models, to be copied."
    from foxhunt.data.windows import save_table, synthetic_table
    d = tmp_path_factory.mktemp("trained"); (d / "params.yaml").write_text(TINY); table = synthetic_table(400, 4)
    save_table(table, d / "feat")
    others = {"order": dict(feature_names=table.feature_names[::-1]), "name": dict(feature_names=("x", *table.feature_names[1:])), "interval": dict(interval_ns=3600 * 10**9), "contract": dict(contracts=("ES",))}
    for name, change in others.items(): save_table(renamed(table, **change), d / f"feat_{name}")
    for m in ("dqn", "tft"):
        r = foxhunt("train", m, "--features", d / "feat", "--out", d / m, "--device", "cpu", "--params", d / "params.yaml"); assert r.exit_code == 0, r.output
    return d


@pytest.fixture()
def market(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "m"); monkeypatch.chdir(tmp_path / "m"); return tmp_path / "m"


def bytes_of(folder): return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def train(out, *more): return foxhunt("train", "dqn", "--features", "feat", "--out", out, "--device", "cpu", *more)


def evaluate(out, *more, model="dqn", features="feat"): return foxhunt("evaluate", model, "--checkpoint", model, "--features", features, "--out", out, *more)


def test_no_output_replaces_what_is_not_its_own(market):
    Path("precious").mkdir(); Path("precious/thesis.txt").write_text("x"); Path("file").write_text("x"); Path("new.partial").mkdir(); Path("new.partial/thesis.txt").write_text("x")
    before = bytes_of(market)
    for out in ("feat", "feat/run", ".", "precious", "file", "new", "tft"): refused(train(out), str(out))
    for out in ("feat", "dqn", "dqn/eval", "feat/eval", ".", "precious", "file", "tft"): refused(evaluate(out), str(out))
    refused(evaluate("eval", "--metrics", "dqn/dqn_final_epoch2.safetensors"), "dqn"); refused(evaluate("eval", "--metrics", "precious"), "precious", "is a folder"); refused(evaluate("eval", "--metrics", "feat/features.json"), "feat")
    refused(foxhunt("seeds", "dqn", "--features", "feat", "--out", "feat", "--n", "3", "--epochs", "1"), "feat")
    refused(foxhunt("bench", "--models", "dqn", "--features", "feat", "--out", "feat/features.json"), "feat"); refused(foxhunt("bench", "--models", "dqn", "--out", "precious"), "precious", "is a folder")
    refused(foxhunt("decide", "feat/features.json", "--json", "feat/features.json"), "is the input")
    assert before == bytes_of(market)


def test_a_result_of_its_own_is_replaced(market):
    for _ in range(2): assert evaluate("eval", "--metrics", "m/dqn.json").exit_code == 0
    assert sorted(p.name for p in Path("eval").iterdir()) == ["equity.parquet", "metrics.json"]
    refused(evaluate("eval", model="tft"), "eval")
    assert train("dqn").exit_code == 0                                       # the same run again
    refused(train("dqn", "--seed", "1"), "finished run that differs (seed: 0 -> 1)", "--fresh"); assert train("dqn", "--seed", "1", "--fresh").exit_code == 0 and Path("dqn.aside.1/summary.json").exists()


@pytest.mark.parametrize("model", ["dqn", "tft"])
def test_a_checkpoint_knows_its_market(market, model):
    refused(evaluate("e", model=model, features="feat_order"), "another order"); refused(evaluate("e", model=model, features="feat_name"), "has x", "f0"); refused(evaluate("e", model=model, features="feat_interval"), "interval")
    other = evaluate("e", model=model, features="feat_contract")
    if model == "dqn": refused(other, "SYN0", "ES")
    else: assert other.exit_code == 0 and len(other.stderr.splitlines()) == 1 and "ES unknown to it" in other.stderr
    assert evaluate("e", model=model).stderr == ""


def test_an_older_checkpoint_says_what_it_does_not_know(market):
    from foxhunt.train.checkpoint import load_weights, save_weights
    f = Path("dqn/dqn_final_epoch2.safetensors"); weights, meta = load_weights(f)
    assert meta.pop("data")["features"] == ["f0", "f1", "f2", "f3"]; save_weights(f, weights, meta)
    r = evaluate("e"); assert r.exit_code == 0 and len(r.stderr.splitlines()) == 1 and "older checkpoint" in r.stderr
    del meta["state_bars"]; save_weights(f, weights, meta); refused(evaluate("e"), "damaged", "state_bars")


def test_an_agent_sees_its_profit_in_the_unit_it_learnt(market):
    "Another reward_scale in the parameters changes what a training would see, and nothing of a trained agent's backtest."
    net = []
    for k, scale in enumerate(("null", "1e-3", "1e6")):
        Path("params.yaml").write_text(TINY + f"env: {{reward_scale: {scale}}}\n"); r = evaluate(f"e{k}", "--split", "train"); assert r.exit_code == 0, r.output
        net.append(json.loads(Path(f"e{k}/metrics.json").read_text())["policy"])
    assert net[0] == net[1] == net[2]


def test_places_that_cannot_be_written_are_one_line(market):
    for out in ("/proc/x/y", "/dev/null/x", "o" * 300):
        for r in (train(out), evaluate(out), foxhunt("bars", "feat", out, "--contract", "6E"), evaluate("e", "--metrics", f"{out}/m.json")): refused(r)
    for r in (evaluate("e", "--metrics", "/proc/m.json"), foxhunt("features", "feat", "/proc/x"), evaluate("/proc/x"), train("/proc/x"), train("/sys/x")): assert ".tmp" not in refused(r) and ".lock" not in r.stderr


def test_a_command_that_is_not_there(here): refused(foxhunt("monitor", "--", "/nope/x"), "/nope/x")


def test_decide_names_the_file(here):
    for text in ("{}", "[]", "{"): Path("b.json").write_text(text); refused(foxhunt("decide", "b.json"), "b.json")


@pytest.mark.parametrize("args, words", [
    (["train", "dqn", "--features", "f", "--out", "o", "--epochs", "x"], ["foxhunt train: --epochs: ", "valid integer", "; see foxhunt train --help"]), (["train", "dqn", "--out", "o"], ["--features", "foxhunt train --help"]),
    (["train", "--features", "f", "--out", "o"], ["model"]), (["train", "dqn", "--foo"], ["--foo"]), (["trian"], ["trian", "foxhunt --help"]), (["device", "a"], ["foxhunt device"]), (["train", "dqn", "--features"], ["--features"])])
def test_a_wrong_command_line_is_one_line(here, args, words): refused(foxhunt(*args), *words)


def test_help_is_still_help(here):
    r = foxhunt(); assert len(r.output.splitlines()) > 10 and "train" in r.output
    assert foxhunt("train", "--help").exit_code == 0


def test_a_second_cpu_is_not_there(market): refused(train("o", "--device", "cpu:3"), "cpu:3", "--device cpu")


def test_report_reads_values_as_params_yaml_does(here):
    "1e-3 is a number (YAML 1.1 makes it text), a date stays text; what is not a value gets one line."
    import nbformat
    v4 = nbformat.v4
    book = v4.new_notebook(cells=[v4.new_code_cell("lr = 0.0\nday = ''\nsizes = []", metadata={"tags": ["parameters"]}), v4.new_code_cell("assert (lr, day, sizes) == (0.001, '2024-01-02', [1, 2]), (lr, day, sizes)")],
                          metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})
    nbformat.write(book, "t.ipynb")
    result = foxhunt("report", "t.ipynb", "out/t.ipynb", "-p", "lr=1e-3", "-p", "day=2024-01-02", "-p", "sizes=[1, 2]")
    assert result.exit_code == 0, result.output
    refused(foxhunt("report", "t.ipynb", "out/t.ipynb", "-p", "sizes=[1"), "-p sizes=[1", "not a YAML value")
    refused(foxhunt("report", "t.ipynb", "out/t.ipynb", "-p", "batch=3"), "batch", "no such parameter")
    refused(foxhunt("report", "t.ipynb", "out/t.ipynb", "-p", "lr=1"), "AssertionError", "cell 2")


def test_numbers_that_are_none(here):
    for wrong in ("nan", "inf", "0", "-1"):
        refused(foxhunt("monitor", "--interval", wrong), "--interval", "more than 0 seconds")
        refused(foxhunt("monitor", "--ceiling", wrong), "--ceiling", "more than 0 MiB")
    from foxhunt.cli import pairs
    from foxhunt.core import UserError
    with pytest.raises(UserError, match="a name appears twice"): pairs("dqn=1,dqn=2", "--epochs")


def test_audit_looks_at_the_sizes_of_params_yaml(here, monkeypatch):
    "The audit builds the user's model, not the default one."
    import foxhunt.hardware.audit as A
    from foxhunt.core import UserError
    from foxhunt.models.mlp import parameters
    from foxhunt.train.registry import workload
    def look(factory, index, kwargs):
        assert factory == "foxhunt.train.registry:workload"
        raise UserError(f"{parameters(workload(**json.loads(json.dumps(kwargs))).model())} parameters")
    monkeypatch.setattr(A, "audit", look)
    Path("params.yaml").write_text("train: {dqn: {hidden: [4]}}\n")
    result = foxhunt("audit", "--models", "dqn")
    assert result.exit_code == 2 and f"foxhunt audit: {2 * (256 * 4 + 4 + 4 * 11 + 11)} parameters" in result.stderr, result.output     # the network and its slow copy
