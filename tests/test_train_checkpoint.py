"Checkpoints: whole or refused, on any device, with tied tensors and any nesting."
import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from foxhunt.core import UserError
from foxhunt.train import checkpoint as ck

pytestmark = pytest.mark.checkpoint

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
tensors = st.builds(lambda shape, dtype: (torch.arange(math.prod(shape)) % 2).reshape(shape).to(dtype), st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES))
leaves = st.none() | st.booleans() | st.integers(-2**100, 2**100) | st.floats(allow_nan=False) | st.text(max_size=5) | tensors
keys = st.text(max_size=4) | st.integers(-5, 5)
states = st.dictionaries(keys, st.recursive(leaves, lambda s: st.lists(s, max_size=3) | st.lists(s, max_size=3).map(tuple) | st.dictionaries(keys, s, max_size=3), max_leaves=8), max_size=4)


def same(a, b):
    if isinstance(a, torch.Tensor): return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict): return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(state=states)
def test_any_state_comes_back(state, tmp_path):
    ck.save_state(tmp_path / "r", state, {"epoch": 1})
    assert same(ck.load_state(tmp_path / "r")[0], state)


def test_odd_values_come_back(tmp_path):
    bits = np.random.default_rng(5).bit_generator.state
    state = {"nan": float("nan"), "inf": -math.inf, "rng": bits, "np": np.arange(6.0).reshape(2, 3)[:, ::-1], "np0": np.float32(0.1), "flag": np.bool_(True), "k": {(1, 2): 3}}
    ck.save_state(tmp_path / "r", state); back, _ = ck.load_state(tmp_path / "r")
    assert math.isnan(back["nan"]) and back["inf"] == -math.inf and back["rng"] == bits and back["k"] == {(1, 2): 3}
    assert np.array_equal(back["np"], state["np"]) and back["np0"] == np.float32(0.1) and back["np0"].dtype == np.float32 and back["flag"] == np.True_


def test_shared_tensors_of_a_state_stay_shared(tmp_path):
    w = torch.randn(4, 4)
    ck.save_state(tmp_path, {"a": w, "b": [w], "row": w[1]})
    s, _ = ck.load_state(tmp_path)
    assert s["a"].data_ptr() == s["b"][0].data_ptr() and torch.equal(s["row"], w[1])


def test_every_truncation_is_refused(tmp_path):
    f = tmp_path / "w.safetensors"
    ck.save_weights(f, {"a": torch.randn(3, 5), "b": torch.zeros(2, dtype=torch.int64)}, {"model": "x"})
    data = f.read_bytes()
    for n in range(0, len(data), 7):
        (tmp_path / "cut").write_bytes(data[:n])
        with pytest.raises(UserError, match="cut: "): ck.load_weights(tmp_path / "cut")
    (tmp_path / "long").write_bytes(data + b"x")
    with pytest.raises(UserError): ck.load_weights(tmp_path / "long")


def test_messages_are_one_line(tmp_path):
    (tmp_path / "x").write_bytes(b"\x80\x04\x95" + bytes(300))
    for call in (lambda: ck.load_weights(tmp_path / "x"), lambda: ck.load_weights(tmp_path / "none"), lambda: ck.load_state(tmp_path / "none"),
                 lambda: ck.check_architecture({"w": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2)}, "f")):
        with pytest.raises(UserError) as e: call()
        assert "\n" not in str(e.value)


def test_wrong_architecture_names_tensor_and_both_shapes():
    a, b = nn.Linear(3, 4).state_dict(), nn.Linear(3, 5).state_dict()
    with pytest.raises(UserError, match=r"tensor weight: the checkpoint has \(5, 3\), the model has \(4, 3\)"): ck.check_architecture(a, b)
    with pytest.raises(UserError, match=r"tensor bias: the checkpoint has no such tensor, the model has \(4,\)"): ck.check_architecture(a, {"weight": a["weight"]})
    with pytest.raises(UserError, match=r"tensor extra: the checkpoint has \(1,\), the model has no such tensor"): ck.check_architecture(a, a | {"extra": torch.zeros(1)})


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    f = tmp_path / "w.safetensors"
    ck.save_weights(f, {"a": torch.ones(2)}); before = f.read_bytes()
    def full(fd): raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="no space left"): ck.save_weights(f, {"a": torch.zeros(2)})
    monkeypatch.undo()
    def rust(*a, **k): raise ck.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(ck, "save_file", rust)
    with pytest.raises(UserError, match="no space left"): ck.save_weights(f, {"a": torch.zeros(2)})
    monkeypatch.undo()
    assert f.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("number, says", [(27, "ulimit -f"), (28, "no space left"), (122, "quota")])
def test_every_kind_of_full_is_one_line(tmp_path, monkeypatch, number, says):
    "From the system, and from safetensors, which words it in its own way."
    def full(fd): raise OSError(number, os.strerror(number))
    def rust(*a, **k): raise ck.SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")
    for module, name, fault in ((os, "fsync", full), (ck, "save_file", rust)):
        with monkeypatch.context() as m, pytest.raises(UserError, match=says) as e:
            m.setattr(module, name, fault); ck.save_weights(tmp_path / "w.safetensors", {"a": torch.zeros(2)})
        assert "\n" not in str(e.value) and not list(tmp_path.iterdir())


def test_a_limit_of_the_file_size_is_one_line(tmp_path):
    "`ulimit -f`, in a process of its own: Python's files, and those that safetensors writes."
    import subprocess, sys
    code = ("import resource, sys, torch; from foxhunt.core import UserError, write_json; from foxhunt.train.checkpoint import save_weights; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
            "for f in (lambda: save_weights('w', {'a': torch.ones(9999)}), lambda: write_json('j', ['x' * 9999])):\n    try: f()\n    except UserError as e: print(e)")
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert len(out.splitlines()) == 2 and out.count("ulimit -f") == 2 and not list(tmp_path.iterdir())


def test_no_bit_of_a_checkpoint_may_change(tmp_path):
    f, model = tmp_path / "w.safetensors", nn.Linear(5, 3)
    ck.save_weights(f, model.state_dict(), {"model": "x", "lr": 1e-3}); data = f.read_bytes(); rng = np.random.default_rng(0)
    for i in range(len(data)):
        f.write_bytes(data[:i] + bytes([data[i] ^ 1 << int(rng.integers(8))]) + data[i + 1:])
        with pytest.raises(UserError) as e: ck.load_weights(f)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path, bad):
    ck.save_weights(tmp_path / "w", {"fine": torch.ones(2), "head.bias": torch.tensor([0.0, bad])})
    with pytest.raises(UserError, match="head.bias holds numbers that are not finite"): ck.load_weights(tmp_path / "w")


@pytest.mark.parametrize("change", [{"order": None}, {"order": ["zz"]}, {"alias": 3}, {"meta": None}, {"meta": {"model": "y"}}])
def test_a_header_that_lacks_or_changes_something(tmp_path, change):
    f = tmp_path / "w"; ck.save_weights(f, {"a": torch.ones(2)}, {"model": "x"})
    from safetensors import safe_open
    with safe_open(f, "pt") as file: doc = json.loads(file.metadata()[ck.FORMAT])
    doc = {k: v for k, v in (doc | change).items() if v is not None}
    for kind in (ck.FORMAT, ck.OLD):                        # an older file has no checksum: what is left out is noticed all the same
        ck.save_file({"a": torch.ones(2)}, f, {kind: json.dumps(doc)})
        if kind == ck.OLD and change == {"meta": {"model": "y"}}: continue
        with pytest.raises(UserError, match="damaged"): ck.load_weights(f)


def test_damage_to_a_state_is_one_line(tmp_path):
    ck.save_state(tmp_path, {"w": torch.arange(50.0)}, {"epoch": 1}); at = next(tmp_path.glob("state_*"))
    flipped = bytearray((at / "tensors.safetensors").read_bytes()); flipped[-7] ^= 1
    for file, data in ((at / "tree.json", b"{}"), (at / "tree.json", b"[]"), (at / "tree.json", b'{"tree'), (tmp_path / "latest.json", b"{}"), (tmp_path / "latest.json", b'{"state": "../elsewhere"}'), (at / "tensors.safetensors", bytes(flipped))):
        kept = file.read_bytes(); file.write_bytes(data)
        with pytest.raises(UserError) as e: ck.load_state(tmp_path)
        assert "\n" not in str(e.value); file.write_bytes(kept)
    assert ck.load_state(tmp_path)[1] == {"epoch": 1}


def test_full_disk_keeps_the_last_state(tmp_path, monkeypatch):
    ck.save_state(tmp_path, {"n": 1})
    def full(fd): raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="no space left"): ck.save_state(tmp_path, {"n": 2})
    monkeypatch.undo()
    assert ck.load_state(tmp_path)[0] == {"n": 1}
    ck.save_state(tmp_path, {"n": 3}); assert ck.load_state(tmp_path)[0] == {"n": 3}
    assert sorted(p.name.split("_")[0] for p in tmp_path.iterdir()) == ["latest.json", "state"]


def test_sweep_takes_only_temporaries(tmp_path):
    for n in ("keep.safetensors", ".gitignore"): (tmp_path / n).write_text("x")
    (tmp_path / ".w.safetensors.123.tmp").write_text("x"); (tmp_path / ".run.abc.tmp").mkdir(); (tmp_path / ".run.old").mkdir()
    assert ck.sweep(tmp_path) == [".run.abc.tmp", ".run.old", ".w.safetensors.123.tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".gitignore", "keep.safetensors"]


def test_the_file_holds_no_code(tmp_path):
    "A header of JSON and bytes: what an auditor can check without running anything."
    f = tmp_path / "w.safetensors"; ck.save_weights(f, nn.Linear(2, 2).state_dict(), {"model": "x"})
    data = f.read_bytes(); n = int.from_bytes(data[:8], "little"); header = json.loads(data[8:8 + n])
    assert json.loads(header["__metadata__"][ck.FORMAT])["meta"] == {"model": "x"}
    assert sum(t["data_offsets"][1] - t["data_offsets"][0] for k, t in header.items() if k != "__metadata__") == len(data) - 8 - n == 24


def test_view_of_a_large_storage_is_stored_alone(tmp_path):
    big = torch.zeros(1_000_000)
    ck.save_weights(tmp_path / "w", {"piece": big[10:13], "turned": big[:6].view(2, 3).T})
    assert (tmp_path / "w").stat().st_size < 1000


def test_tied_module_survives(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__(); self.emb, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False); self.head.weight = self.emb.weight
    m = Tied(); ck.save_weights(tmp_path / "w", m.state_dict())
    again = ck.load_into(Tied(), ck.load_weights(tmp_path / "w")[0])
    assert again.head.weight is again.emb.weight and torch.equal(again.emb.weight, m.emb.weight)


@pytest.mark.gpu
@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_devices_both_ways(tmp_path):
    "Saved on CUDA, loaded on the CPU and back, then one step each (SB3 #1561: Adam's steps on the wrong device)."
    for src, dst in (("cuda", "cpu"), ("cpu", "cuda")):
        m = nn.Linear(3, 3, device=src); opt = torch.optim.AdamW(m.parameters(), fused=True); m(torch.ones(1, 3, device=src)).sum().backward(); opt.step()
        ck.save_state(tmp_path / src, {"m": m.state_dict(), "opt": opt.state_dict()}); ck.save_weights(tmp_path / f"{src}.st", m.state_dict())
        s, _ = ck.load_state(tmp_path / src); n = nn.Linear(3, 3, device=dst); o = torch.optim.AdamW(n.parameters(), fused=True)
        n.load_state_dict(s["m"]); o.load_state_dict(s["opt"]); n(torch.ones(1, 3, device=dst)).sum().backward(); o.step()
        assert ck.load_weights(tmp_path / f"{src}.st", dst)[0]["weight"].device.type == dst
