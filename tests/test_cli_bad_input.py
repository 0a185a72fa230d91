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
