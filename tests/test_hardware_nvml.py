"The real bindings (nvidia-ml-py) against a stub of NVIDIA's library, built here from C: every kind of machine that users met."
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_cc = pytest.mark.skipif(CC is None or not sys.platform.startswith("linux"), reason="no C compiler")


@pytest.fixture(scope="session")
def stubs(tmp_path_factory):
    "Folders that hold a libnvidia-ml.so.1: complete, and as an old driver has it."
    out = {}
    for name, flags in (("complete", []), ("old", ["-DMISSING"])):
        out[name] = tmp_path_factory.mktemp(name)
        subprocess.run([CC, "-shared", "-fPIC", "-Wall", "-Werror", *flags, "-o", out[name] / "libnvidia-ml.so.1", HERE / "nvml_stub.c"], check=True)
    return out


def run(code, folder=None, **env):
    "A fresh interpreter: the library is searched when a process starts. It must not import torch to answer."
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")} | env
    if folder: env["LD_LIBRARY_PATH"] = str(folder)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


READ = """
import dataclasses, json, os, sys
from foxhunt.hardware.nvml import open_nvml, find_gpu
n, why = open_nvml()
g, why = find_gpu(n) if n else (None, why)
print(json.dumps(dict(why=why, sample=dataclasses.asdict(g.read(1.0, {os.getpid()})) if g else None, missing=g.missing if g else None, name=g.name if g else None, torch="torch" in sys.modules)))
"""


@needs_cc
def test_complete(stubs):
    r = run(READ, stubs["complete"]); s = r["sample"]
    assert not r["missing"] and not r["torch"] and r["name"] == "Stub 4 GB"
    assert all(v is not None for v in s.values()), s
    assert (s["memory_total"], s["memory_process"], s["power"], s["clock_sm"], s["clock_memory"], s["persistence"]) == (4096, 132, 54, 1485, 6000, "on")


@needs_cc
def test_laptop_without_power(stubs):
    r = run(READ, stubs["complete"], NVML_STUB="nopower"); s = r["sample"]
    assert (s["power"], s["power_limit"], s["energy"]) == (None, None, None) and set(r["missing"]) == {"power", "power_limit", "energy"}
    assert s["memory_process"] is None and s["memory_used"] is not None and s["temperature"] is not None     # a container does not list its pid


@needs_cc
def test_mig_is_found_by_its_uuid(stubs):
    r = run(READ, stubs["complete"], NVML_STUB="mig", CUDA_VISIBLE_DEVICES="MIG-cccccccc-0000-0000-0000-000000000000")
    assert r["sample"]["gpu"] is None and r["sample"]["memory_total"] == 2048


@needs_cc
def test_wsl_without_process_memory(stubs):
    s = run(READ, stubs["complete"], NVML_STUB="wsl")["sample"]
    assert s["memory_process"] is None and s["memory_used"] == 3 and s["energy"] is None and s["power"] == 54     # ~0ull is not 17179869184 GiB


@needs_cc
def test_driver_mismatch_is_a_reason(stubs):
    r = run(READ, stubs["complete"], NVML_STUB="mismatch")
    assert r["sample"] is None and "reboot" in r["why"] and "\n" not in r["why"]


@needs_cc
def test_missing_symbols(stubs):
    r = run(READ, stubs["old"]); s = r["sample"]
    assert (s["energy"], s["memory_process"]) == (None, None) and s["throttle"] == "" and s["power"] == 54        # the older name of the throttle function is used


def test_no_library(tmp_path):
    r = run(READ, tmp_path)
    assert r["sample"] is None or r["why"]
    if not shutil.which("nvidia-smi"): assert "libnvidia-ml is not on this machine" in r["why"]


@needs_cc
@pytest.mark.parametrize("visible, total", [("1", 16384), ("0", 4096), ("GPU-bbbbbbbb", 16384), ("1,0", 16384)])
def test_the_visible_device_is_watched(stubs, visible, total):
    r = run(READ, stubs["complete"], CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert r["sample"]["memory_total"] == total


@needs_cc
def test_hidden_devices(stubs):
    assert "hides every GPU" in run(READ, stubs["complete"], CUDA_VISIBLE_DEVICES="")["why"]


def test_import_touches_nothing():
    "Importing the monitor loads neither the bindings nor torch."
    r = run("import sys, json, foxhunt.hardware.monitor; print(json.dumps([m in sys.modules for m in ('pynvml', 'torch')]))")
    assert r == [False, False]


COST = """
import json, time
from foxhunt.hardware.monitor import Monitor
with Monitor(interval=0.05) as m: time.sleep(1.5)
s = m.summary()
print(json.dumps(dict(samples=s.samples, cpu=s.cpu_seconds, source=s.energy_source, counts=s.counts)))
"""


@needs_cc
def test_cost_at_1_hz(stubs):
    r = run(COST, stubs["complete"])
    assert r["samples"] >= 10 and r["source"] == "counter"
    assert r["cpu"] / r["samples"] < 0.01, r     # seconds per sample: less than 1 % of the wall at one sample a second


LOST = """
import json
from foxhunt.hardware.monitor import Monitor
m = Monitor()
for _ in range(12): m.sample()
s = m.summary()
print(json.dumps(dict(samples=s.samples, errors=s.errors, counts=s.counts)))
"""


@needs_cc
def test_a_lost_gpu_empties_cells_and_does_not_stop(stubs):
    r = run(LOST, stubs["complete"], NVML_STUB="lost")
    assert r["samples"] == 12 and r["errors"] == 7 and r["counts"]["unknown"] == 7


@needs_cc
def test_around_a_command(stubs, tmp_path):
    code = f"import json; from foxhunt.hardware.monitor import monitor_command; c, s = monitor_command(['sleep', '0.3'], {str(tmp_path / 'gpu.csv')!r}, 0.05); print(json.dumps([c, s.samples]))"
    rc, n = run(code, stubs["complete"])
    lines = (tmp_path / "gpu.csv").read_text().splitlines()
    assert rc == 0 and len(lines) == n + 1 and lines[0].startswith("time,gpu_percent,memory_used_mib")


SAVES = "import sys, time\nprint('up', flush=True)\ntry: time.sleep(60)\nexcept KeyboardInterrupt: time.sleep(0.5); open(sys.argv[1], 'w').write('saved'); sys.exit(0)"


def monitoring(out, *command, folder=None):
    "`foxhunt monitor` as a process of its own, where Ctrl-C is not switched off."
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")} | ({"LD_LIBRARY_PATH": str(folder)} if folder else {})
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from foxhunt.cli import main; main()"
    args = ["monitor", "--out", str(out), "--interval", "0.05", *(["--", *command] if command else [])]
    return subprocess.Popen([sys.executable, "-c", code, *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True, start_new_session=True)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_command_saves_what_it_has(tmp_path, name):
    "Asking the monitor to end neither kills a training that is writing its checkpoint, nor leaves it running."
    p = monitoring(tmp_path / "gpu.csv", sys.executable, "-c", SAVES, str(tmp_path / "ckpt"))
    try:
        assert p.stdout.readline() == "up\n"
        p.send_signal(getattr(signal, name)); said, _ = p.communicate(timeout=60)
    finally: p.kill()
    assert p.returncode == 128 + getattr(signal, name) and (tmp_path / "ckpt").read_text() == "saved" and said.strip()


@needs_cc
@pytest.mark.parametrize("name, code", [("SIGINT", 0), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_monitor_alone_writes_its_summary_however_it_ends(stubs, tmp_path, name, code):
    out = tmp_path / "gpu.csv"; p = monitoring(out, folder=stubs["complete"])
    try:
        for _ in range(600):
            if out.exists() and len(out.read_text().splitlines()) > 3: break
            time.sleep(0.05)
        p.send_signal(getattr(signal, name)); said, _ = p.communicate(timeout=60)
    finally: p.kill()
    kept = json.loads((tmp_path / "gpu.summary.json").read_text())
    assert p.returncode == code and kept["samples"] == len(out.read_text().splitlines()) - 1 > 2 and said.strip()


def test_one_reading_takes_no_command(tmp_path):
    p = subprocess.run([sys.executable, "-c", "from foxhunt.cli import main; main()", "monitor", "--once", "--", "sleep", "9"], capture_output=True, text=True)
    assert p.returncode == 2 and "--once is one reading" in p.stderr and p.stderr.count("\n") == 1


def grown(m, skip, watch):
    "Bytes that a monitor holds more after `watch` further samples."
    from foxhunt.hardware.nvml import Sample
    def feed(a, b):
        for k in range(a, b): m.add(Sample(float(k), gpu=float(k % 40), memory_used=135.0, temperature=55.0, power=50.0, energy=1.0 * k, throttle="thermal" if k % 7 else ""))
    feed(0, skip); tracemalloc.start()
    try: feed(skip, skip + watch); return tracemalloc.get_traced_memory()[0]
    finally: tracemalloc.stop()


@pytest.mark.parametrize("samples", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_million_samples_stay_bounded(tmp_path, samples):
    "The whole monitor with its file, not its statistics alone; one that keeps every sample is found by the same measure."
    from foxhunt.hardware.monitor import Monitor
    warn = lambda s: None
    with (tmp_path / "gpu.csv").open("w") as f:
        m = Monitor(ceiling=100, warn=warn); m.file = f
        late = grown(m, samples - 40_000, 40_000)
    assert m.stats.samples == samples and len(m.stats.timeline) <= 2048 and late < 500_000, late
    assert sum(1 for _ in (tmp_path / "gpu.csv").open()) == samples
    leaky = Monitor(warn=warn); leaky.stats.keep = 10**9
    assert grown(leaky, 1000, 40_000) > 5_000_000


@needs_cc
def test_the_summary_lies_beside_the_csv(stubs, tmp_path):
    r = run(f"""
import json, time
from foxhunt.hardware.monitor import Monitor
with Monitor({str(tmp_path / 'gpu.csv')!r}, interval=0.05) as m: time.sleep(0.4)
print(json.dumps(dict(samples=m.summary().samples)))
""", stubs["complete"])
    kept = json.loads((tmp_path / "gpu.summary.json").read_text())
    assert kept["samples"] == r["samples"] == len((tmp_path / "gpu.csv").read_text().splitlines()) - 1 > 2
    assert kept["device"] == "Stub 4 GB" and kept["memory_total"] == 4096 and kept["energy_source"] == "counter" and kept["ranges"]["all"]["temperature"][0] > 0
