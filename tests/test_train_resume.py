"Resume: train(N + M) is train(N), save, new process, load, train(M), bit for bit; killed at any moment the run goes on."
import dataclasses
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from foxhunt import params as P
from foxhunt.core import UserError, read_json
from foxhunt.data.windows import synthetic_table
from foxhunt.train import coordinator
from foxhunt.train.checkpoint import load_state, save_state
from foxhunt.train.coordinator import partial_of, read_history, train_all, train_model
from foxhunt.train.health import TrainingError
from foxhunt.train.replay import Replay
from foxhunt.train.registry import MODELS, spec, synthetic

pytestmark = pytest.mark.checkpoint
CPU = torch.device("cpu")
replace = dataclasses.replace

SMALL = P.Params(features=P.Features(state_bars=3), train=P.Train(
    dqn=P.DQN(epochs=8, updates_per_epoch=4, lanes=16, hidden=(24, 24), batch=16, replay_size=2_000, learn_starts=64, checkpoint_every=2),
    ppo=P.PPO(epochs=6, lanes=16, hidden=(16,), rollout=16, minibatch=64, passes=2, checkpoint_every=2),
    mamba2=P.Mamba2(epochs=6, lookback=8, stride=16, d_model=16, n_layers=1, d_state=8, head=8, checkpoint_every=2),
    tft=P.TFT(epochs=6, lookback=8, stride=16, hidden=8, heads=2, checkpoint_every=2, patience=20),
    tlob=P.TLOB(epochs=4, stride=128, hidden=16, n_layers=1, checkpoint_every=2)))
VARIANTS = {"dqn": {}, "dqn-prioritized-3step": dict(prioritized=True, n_step=3, dueling=True), "dqn-dense-hard": dict(replay="dense", target="hard", target_every=3), "dqn-wrapped": dict(replay_size=400),
            "ppo": {}, "mamba2": {}, "tft": {}, "tft-fp16": dict(precision="fp16"), "tft-accumulated": dict(accumulate=4), "tlob": {}}


@pytest.fixture(scope="module")
def tables(): return {"bars": synthetic_table(512, 4, kind="visible"), "book": synthetic("book")}


def make(variant, tables, seed=0):
    name = variant.split("-")[0]; s = spec(name)
    p = replace(SMALL, train=replace(SMALL.train, **{name: replace(getattr(SMALL.train, name), **VARIANTS[variant])}))
    return s.trainer(tables["book" if s.kind == "book" else "bars"], p, seed, CPU)


def same(a, b, path=""):
    if isinstance(a, torch.Tensor): assert a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for k in a: same(a[k], b[k], f"{path}/{k}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)): same(x, y, f"{path}/{i}")
    else: assert a == b or a != a, (path, a, b)


def metrics(rows): return [[v for k, v in r.items() if k != "seconds"] for r in rows]


@pytest.mark.parametrize("variant", VARIANTS)
def test_n_plus_m(variant, tables, tmp_path):
    pytest.importorskip(f"foxhunt.train.{variant.split('-')[0]}" if variant[:3] in ("dqn", "ppo") else f"foxhunt.models.{variant.split('-')[0]}")
    n, m = (2, 1) if variant != "tlob" else (1, 1)
    whole = make(variant, tables); rows = [whole.run_epoch() for _ in range(n + m)]
    first = make(variant, tables)
    for _ in range(n): first.run_epoch()
    save_state(tmp_path, first.state_dict())
    torch.manual_seed(77); torch.rand(5)                       # the global generator is nobody's business
    second = make(variant, tables, seed=0); second.load_state_dict(load_state(tmp_path)[0])
    later = [second.run_epoch() for _ in range(m)]
    same(whole.state_dict(), second.state_dict()); same(rows[n:], later)
    assert whole.epoch == second.epoch == n + m


# ---- through the coordinator, in processes that are killed ----

def forked(fn):
    def child():
        torch.set_num_threads(1)                               # a fork has no OpenMP pool
        sys.stderr = open(os.devnull, "w")
        fn()
    p = multiprocessing.get_context("fork").Process(target=child); p.start(); return p


def slowly(trainer, row): time.sleep(0.02)


def run(name, tables, out, **kw): return train_model(name, tables["bars"], SMALL, out, device="cpu", resume=True, callbacks=[slowly], **kw)


def same_folder(a, b):
    names = sorted(p.name for p in a.glob("*.safetensors")); assert names == sorted(p.name for p in b.glob("*.safetensors")) and names
    for n in names: assert (a / n).read_bytes() == (b / n).read_bytes(), n
    assert str(metrics(read_history(a / "history.csv"))) == str(metrics(read_history(b / "history.csv")))
    sa, sb = read_json(a / "summary.json"), read_json(b / "summary.json")
    for k in ("identity", "trend", "stable", "converged", "epochs", "parameters", "dead_parameters"): assert sa[k] == sb[k], k
    same({k: v for k, v in load_state(a / "resume")[0].items()}, load_state(b / "resume")[0])


@pytest.mark.parametrize("name", ["dqn", pytest.param("ppo", marks=pytest.mark.slow)])
def test_killed_at_random_moments(name, tables, tmp_path):
    pytest.importorskip(f"foxhunt.train.{name}")
    p = forked(lambda: run(name, tables, tmp_path / "whole")); p.join(60); assert p.exitcode == 0
    rng, kills = random.Random(3), 0
    for attempt in range(30):
        p = forked(lambda: run(name, tables, tmp_path / "killed")); p.join(rng.uniform(0.1, 0.5) if attempt < 6 else 60)
        if p.exitcode is None: p.kill(); p.join(); kills += 1; continue
        assert p.exitcode == 0; break
    assert kills >= 1 and not partial_of(tmp_path / "killed").exists() and not list(tmp_path.glob(".*"))
    same_folder(tmp_path / "whole", tmp_path / "killed")


def test_killed_after_the_last_epoch_reports_the_same(tables, tmp_path, monkeypatch):
    "Between the last resume state and the summary: nothing is left to train, and what the last backward showed must still be told."
    import foxhunt.train.coordinator as c
    run("dqn", tables, tmp_path / "whole")
    def die(*_, **__): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(c, "summarize", die)
        with pytest.raises(KeyboardInterrupt): run("dqn", tables, tmp_path / "killed")
    run("dqn", tables, tmp_path / "killed")
    same_folder(tmp_path / "whole", tmp_path / "killed")
    a, b = (read_json(tmp_path / n / "summary.json") for n in ("whole", "killed"))
    assert a["dead_parameters"] == b["dead_parameters"] == [] and a["update_to_weight_last_epoch"] == b["update_to_weight_last_epoch"] is not None


def test_ctrl_c_leaves_a_whole_checkpoint(tables, tmp_path):
    def child():
        signal.signal(signal.SIGINT, signal.default_int_handler)     # a background job starts with Ctrl-C ignored
        try: run("dqn", tables, tmp_path / "run")
        except KeyboardInterrupt: os._exit(130)
    p = forked(child)
    partial, end = partial_of(tmp_path / "run"), time.time() + 30
    while not (partial / "resume" / "latest.json").exists() and time.time() < end: time.sleep(0.01)
    os.kill(p.pid, signal.SIGINT); p.join(30)
    assert p.exitcode == 130 and not (tmp_path / "run").exists()
    epoch = load_state(partial / "resume")[1]["epoch"]; assert epoch >= 2 and epoch % 2 == 0
    assert "KeyboardInterrupt" in (partial / "train.log").read_text()
    assert run("dqn", tables, tmp_path / "run")["epochs"] == 8 and "resumed at epoch" in (tmp_path / "run" / "train.log").read_text()


def test_an_orphan_and_its_successor_write_one_folder_once(tables, tmp_path):
    "Killed `dvc repro`: the orphan trains on; the new one waits, and finds its work done."
    orphan = forked(lambda: run("dqn", tables, tmp_path / "run")); time.sleep(0.15)
    second = forked(lambda: run("dqn", tables, tmp_path / "run"))
    orphan.join(60); second.join(60); assert orphan.exitcode == second.exitcode == 0
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("Epoch 8/8") == 1 and log.count("Starting") == 1 and "resumed" not in log


def test_a_dead_orphan_frees_its_successor(tables, tmp_path):
    orphan = forked(lambda: run("dqn", tables, tmp_path / "run")); time.sleep(0.3)
    second = forked(lambda: run("dqn", tables, tmp_path / "run")); time.sleep(0.1)
    orphan.kill(); orphan.join(); second.join(60)
    assert second.exitcode == 0 and len(read_history(tmp_path / "run" / "history.csv")) == 8


CHANGES = {"params.config.lr": lambda p, t: (replace(p, train=replace(p.train, dqn=replace(p.train.dqn, lr=5e-4))), t),
           "params.env.slippage_ticks": lambda p, t: (replace(p, env=replace(p.env, slippage_ticks=2.0)), t),
           "params.state_bars": lambda p, t: (replace(p, features=replace(p.features, state_bars=4)), t),
           "seed": lambda p, t: (replace(p, seed=9), t),
           "data": lambda p, t: (p, replace(t, close=t.close * 1.0001))}


def test_what_differs_is_named(tables):
    ident = lambda p, t: coordinator.run_identity(spec("dqn"), t, p, p.seed)
    for what, change in CHANGES.items():
        found = coordinator.differences(ident(SMALL, tables["bars"]), ident(*change(SMALL, tables["bars"])))
        assert len(found) == 1 and found[0].startswith(what + ": "), found


def stopped(tables, out, at=3, p=None):
    "A run that was interrupted after `at` epochs; its folder."
    def stop(trainer, row):
        if row["epoch"] == at: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): train_model("dqn", tables["bars"], p or SMALL, out, device="cpu", callbacks=[stop])
    return partial_of(out)


def again(tables, out, p=None, **kw): return train_model("dqn", tables["bars"], p or SMALL, out, device="cpu", **{"resume": True, **kw})


def with_dqn(**kw): return replace(SMALL, train=replace(SMALL.train, dqn=replace(SMALL.train.dqn, **kw)))


@pytest.mark.parametrize("what", CHANGES)
def test_another_run_is_not_continued_and_not_wiped(what, tables, tmp_path):
    partial = stopped(tables, tmp_path / "run"); before = {p: p.read_bytes() for p in partial.rglob("*") if p.is_file()}
    p, t = CHANGES[what](SMALL, tables["bars"])
    with pytest.raises(UserError, match="an unfinished run that differs .*--fresh") as e: train_model("dqn", t, p, tmp_path / "run", device="cpu", resume=True)
    assert what in str(e.value) and "\n" not in str(e.value) and before == {p: p.read_bytes() for p in partial.rglob("*") if p.is_file()}


def test_without_resume_an_unfinished_run_is_not_wiped_either(tables, tmp_path):
    partial = stopped(tables, tmp_path / "run")
    with pytest.raises(UserError, match="of these settings: go on with --resume"): again(tables, tmp_path / "run", resume=False)
    assert load_state(partial / "resume")[1]["epoch"] == 2 and again(tables, tmp_path / "run")["epochs"] == 8


def test_fresh_sets_the_other_run_aside(tables, tmp_path):
    "As a pipeline's stage asks for it: `--resume --fresh`, whatever its parameters were before."
    stopped(tables, tmp_path / "run"); p = with_dqn(lr=5e-4)
    assert again(tables, tmp_path / "run", p, fresh=True)["epochs"] == 8
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"starting afresh: params.config.lr: {SMALL.train.dqn.lr} -> 0.0005; the earlier run is in" in log and "Epoch 1/8" in log
    assert load_state(tmp_path / "run.partial.aside.1" / "resume")[1]["epoch"] == 2
    stopped(tables, tmp_path / "same", 5); again(tables, tmp_path / "same", fresh=True)            # the same run goes on
    assert "resumed at epoch 4" in (tmp_path / "same" / "train.log").read_text() and not list(tmp_path.glob("same.*"))


def test_a_finished_run_is_not_replaced_by_another(tables, tmp_path):
    again(tables, tmp_path / "run"); before = (tmp_path / "run" / "summary.json").read_bytes()
    for kw in ({}, {"resume": False}):
        with pytest.raises(UserError, match="a finished run that differs .seed: 0 -> 9"): again(tables, tmp_path / "run", replace(SMALL, seed=9), **kw)
    assert before == (tmp_path / "run" / "summary.json").read_bytes() and not partial_of(tmp_path / "run").exists()
    again(tables, tmp_path / "run", replace(SMALL, seed=9), fresh=True)
    assert read_json(tmp_path / "run" / "summary.json")["identity"]["seed"] == 9 and before == (tmp_path / "run.aside.1" / "summary.json").read_bytes()


def test_two_at_once_of_different_seeds(tables, tmp_path):
    "The second waits for the first, and then does not replace it."
    first = forked(lambda: run("dqn", tables, tmp_path / "run")); time.sleep(0.15)
    with pytest.raises(UserError, match="a finished run that differs|an unfinished run that differs"): again(tables, tmp_path / "run", replace(SMALL, seed=9))
    first.join(60); assert first.exitcode == 0 and read_json(tmp_path / "run" / "summary.json")["identity"]["seed"] == 0


def test_a_folder_of_something_else_is_not_replaced(tables, tmp_path):
    for name in ("run", "other.partial"):
        (tmp_path / name).mkdir(); (tmp_path / name / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("years of work")
    again(tables, tmp_path / "mixed"); (tmp_path / "mixed" / "thesis.txt").write_text("years of work")
    for out in ("run", "other", "file", "mixed"):
        for fresh in (False, True):
            with pytest.raises(UserError, match="choose"): again(tables, tmp_path / out, resume=False, fresh=fresh)
    for left in ("run/thesis.txt", "other.partial/thesis.txt", "file", "mixed/thesis.txt"): assert (tmp_path / left).read_text() == "years of work"


DAMAGE = {"identity []": ("identity.json", b"[]"), "identity cut": ("identity.json", b'{"mo'), "identity gone": ("identity.json", None), "latest {}": ("resume/latest.json", b"{}"), "tree {}": ("resume/state_1/tree.json", b"{}"),
          "history gone": ("history.csv", None), "history text": ("history.csv", b"epoch,loss\nx,y\nx,y\nx,y\n"), "a stray file": ("thesis.txt", b"x"), "tensors cut": ("resume/state_1/tensors.safetensors", b"x" * 99)}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_partial_run_is_one_line_and_stays(kind, tables, tmp_path, capsys):
    partial = stopped(tables, tmp_path / "run"); name, data = DAMAGE[kind]; capsys.readouterr()
    (partial / name).unlink() if data is None else (partial / name).write_bytes(data)
    with pytest.raises(UserError) as e: again(tables, tmp_path / "run")
    assert "\n" not in str(e.value) and (partial / "dqn_epoch_2.safetensors").exists() and "resumed" not in capsys.readouterr().err
    if kind.startswith(("latest", "tree", "tensors", "identity [", "identity c")): assert "--fresh" in str(e.value) and again(tables, tmp_path / "run", fresh=True)["epochs"] == 8 and (tmp_path / "run.partial.aside.1" / name).read_bytes() == data


def test_weights_of_another_name_do_not_stop_a_resume(tables, tmp_path):
    partial = stopped(tables, tmp_path / "run"); (partial / "dqn_best.safetensors").write_bytes(b"x")
    assert again(tables, tmp_path / "run")["epochs"] == 8


def test_a_run_that_cannot_update_is_refused_at_once(tables, tmp_path):
    with pytest.raises(UserError, match="learn_starts = 20000.*stores at most.*no update would be made"): again(tables, tmp_path / "run", with_dqn(steps_per_update=64, replay_size=30_000, learn_starts=20_000))     # the split is shorter than the parameters could know
    assert not (tmp_path / "run").exists()


def test_a_run_that_never_updates_is_no_result(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(Replay, "__len__", lambda self: 0)                            # never enough to learn from
    with pytest.raises(TrainingError, match="dqn: not one update in"): again(tables, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_replay_that_no_machine_holds(tables, tmp_path):
    with pytest.raises(TrainingError, match="not enough memory.*replay_size") as e: again(tables, tmp_path / "run", with_dqn(replay="dense", replay_size=10**12))
    assert "\n" not in str(e.value)


def test_broken_weights_are_no_result(tables, tmp_path):
    "An infinite learning rate: the loss of the first epoch was measured before the weights broke."
    p = replace(SMALL, train=replace(SMALL.train, mamba2=replace(SMALL.train.mamba2, epochs=1, lr=1e38, clip=1e38, stride=400)))
    with pytest.raises(TrainingError, match="not finite"): train_model("mamba2", tables["bars"], p, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_another_models_params_do_not_matter(tables, tmp_path):
    a = coordinator.run_identity(spec("dqn"), tables["bars"], SMALL, 0)
    assert a == coordinator.run_identity(spec("dqn"), tables["bars"], replace(SMALL, train=replace(SMALL.train, ppo=P.PPO(lr=1.0)), profile="seed"), 0)


def test_files_of_a_run(tables, tmp_path):
    s = train_model("dqn", tables["bars"], SMALL, tmp_path / "dqn", device="cpu")
    assert sorted(p.name for p in (tmp_path / "dqn").iterdir()) == ["dqn_epoch_2.safetensors", "dqn_epoch_4.safetensors", "dqn_epoch_6.safetensors", "dqn_epoch_8.safetensors",
                                                                    "dqn_final_epoch8.safetensors", "history.csv", "identity.json", "resume", "summary.json", "train.log"]
    log = (tmp_path / "dqn" / "train.log").read_text()
    for words in ("Configuration: ", "Device: cpu (as asked)", "Epoch 8/8: loss=", "Q-value=", "grad_norm=", "duration=", "Convergence: "): assert words in log, words
    for k in ("loss", "q_mean", "epsilon", "grad_norm"): assert s["last"][k] is not None and s["mean"][k] is not None
    for k in ("seconds", "converged", "stable", "trend", "warnings", "device", "machine", "device_reason"): assert k in s
    assert read_json(tmp_path / "dqn" / "summary.json") == s


def test_train_all_goes_on_after_a_failure_and_names_it(tables, tmp_path):
    with pytest.raises(TrainingError, match="1 of 2 models failed: tlob: no book table"): train_all(["tlob", "dqn"], {"bars": tables["bars"]}, SMALL, tmp_path, device="cpu")
    assert (tmp_path / "dqn" / "summary.json").exists() and not (tmp_path / "tlob").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_kill_9_of_a_fresh_interpreter(name, tmp_path):
    "The same law across interpreters and for every model, as `dvc repro` would see it."
    code = ("import sys, time; sys.path.insert(0, sys.argv[3]); from test_train_resume import SMALL, synthetic_table, synthetic, spec, train_model, slowly\n"
            "s = spec(sys.argv[1]); t = synthetic('book') if s.kind == 'book' else synthetic_table(512, 4, kind='visible')\n"
            "train_model(s.name, t, SMALL, sys.argv[2], device='cpu', resume=True, callbacks=[slowly])")
    def start(out): return subprocess.Popen([sys.executable, "-c", code, name, str(out), os.path.dirname(__file__)], stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert start(tmp_path / "whole").wait(300) == 0
    rng, kills = random.Random(5), 0
    for attempt in range(12):
        p, began = start(tmp_path / "killed"), time.time()
        while not partial_of(tmp_path / "killed").exists() and time.time() - began < 60 and p.poll() is None: time.sleep(0.005)
        try: assert p.wait(rng.uniform(0.02, 0.4) if attempt < 5 else 300) == 0; break
        except subprocess.TimeoutExpired: p.kill(); p.wait(); kills += 1
    assert kills >= 1; same_folder(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.gpu
@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_a_state_crosses_devices_and_memory_comes_back(name, tables, tmp_path):
    s, table = spec(name), tables["book" if spec(name).kind == "book" else "bars"]
    torch.cuda.empty_cache(); base = torch.cuda.memory_allocated()
    a = s.trainer(table, SMALL, 0, torch.device("cuda", 0)); a.run_epoch(); save_state(tmp_path, a.state_dict())
    b = s.trainer(table, SMALL, 0, CPU); b.load_state_dict(load_state(tmp_path)[0])
    for k, v in b.weights().items(): assert torch.allclose(v, a.weights()[k].cpu())
    b.run_epoch(); save_state(tmp_path, b.state_dict())
    a.load_state_dict(load_state(tmp_path)[0]); a.run_epoch(); del a
    import gc; gc.collect(); torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= base + 1024
