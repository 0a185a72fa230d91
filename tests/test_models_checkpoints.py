"Checkpoints of the sequence models: plain tensors that load on any device, whatever device wrote them."
import pytest
import torch

from foxhunt import params as P
from foxhunt.core import generator
from foxhunt.models.mamba2 import Mamba2Forecaster
from foxhunt.models.tft import TFT
from foxhunt.models.tlob import MLPLOB, TLOB

BOOK = P.TLOB(lookback=16, hidden=8, n_layers=2, dropout=0.0)
MAKE = {"mamba2": lambda: Mamba2Forecaster(P.Mamba2(d_model=16, n_layers=2, head=8, d_state=8, horizon=3, dropout=0.0), 4),
        "tft": lambda: TFT(P.TFT(hidden=8, heads=2, lookback=6, horizon=3, dropout=0.0), 4, 0, 2), "tlob": lambda: TLOB(BOOK, features=4), "mlplob": lambda: MLPLOB(BOOK, features=4)}
EVERY = pytest.mark.parametrize("name", MAKE)


def build(name, seed=0):
    torch.manual_seed(seed); return MAKE[name]().eval()


def past(b=3): return torch.randn(b, 16, 4, generator=generator(0, "past"))


@EVERY
@pytest.mark.checkpoint
@pytest.mark.device
def test_written_on_a_gpu_loads_without_one(name, tmp_path, monkeypatch):
    "A file whose tensors carry the tag of a CUDA device, as a training machine writes it, opens on a machine that has none."
    model, file = build(name), tmp_path / "m.pt"
    with monkeypatch.context() as m, torch.no_grad():
        m.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0"); out = model(past()); torch.save(model.state_dict(), file)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"): torch.load(file, weights_only=True)      # the tag is really in the file
    again = build(name, seed=1); again.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    with torch.no_grad(): assert torch.equal(again(past()), out)


@EVERY
@pytest.mark.checkpoint
@pytest.mark.device
def test_loads_on_a_device_without_memory(name, tmp_path):
    "Built and loaded on `meta`: nothing of the model or its checkpoint holds on to the device it came from."
    torch.save(build(name).state_dict(), tmp_path / "m.pt")
    with torch.device("meta"): model = MAKE[name]()
    model.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True, map_location="meta"), assign=True)
    out = model(past().to("meta")); out.sum().backward()
    assert {out.device.type, *(p.device.type for p in model.parameters()), *(p.grad.device.type for p in model.parameters()), *(b.device.type for b in model.buffers())} == {"meta"}


@pytest.mark.parametrize("name", [n for n in MAKE if n != "tft"])     # tft, with its static variable: test_models_tft
@pytest.mark.checkpoint
@pytest.mark.device
def test_loads_on_a_pretend_gpu(name):
    "Host tensors of a checkpoint into a model that lives on an accelerator; forecasts and gradients stay there."
    from foxhunt.hardware.audit import Workload, audit
    result = audit(Workload(name, MAKE[name], lambda m: torch.optim.AdamW(m.parameters()), lambda n, device: (past(n).to(device),), lambda m, x: m(*x).square().mean(), lambda m, x: m(*x), batch_size=3))
    assert result.ok and not result.syncs, result
