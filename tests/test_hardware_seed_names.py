"The tests that the seed documents list by name: device choice, memory and, for the three forecasters, shapes and training on CUDA. The agents' are in their own files."
import dataclasses
import re

import pytest
import torch

from foxhunt.core import UserError, choose_device, jsonable
from foxhunt.hardware.batch_size import accumulation, search_batch, try_batch
from foxhunt.hardware.device import device_report
from foxhunt.hardware.memory import CARDS, MIB, measure_host, predict
from foxhunt.params import DQN, Mamba2, Params, TLOB, Train, validate
from foxhunt.train.registry import MODELS, spec, synthetic, workload

HOST, NAME = torch.device("cpu"), "foxhunt.train.registry:workload"
FORECASTERS = ("mamba2", "tft", "tlob")
SMALL = Params(train=Train(mamba2=Mamba2(lookback=16, d_model=16, n_layers=1, d_state=8, head=8, stride=64, batch=8, epochs=2),
                           tft=dataclasses.replace(Params().train.tft, lookback=8, hidden=8, heads=2, stride=64, batch=8, epochs=2),
                           tlob=TLOB(hidden=16, n_layers=1, stride=256, batch=8, epochs=2)))


def with_config(model, **change):
    "Default parameters with one model's changed, as plain values."
    p = Params()
    return jsonable(dataclasses.replace(p, train=dataclasses.replace(p.train, **{model: dataclasses.replace(spec(model).config(p), **change)})))


def forecast_peak(model, **change): return predict(NAME, kwargs={"name": model, "params": with_config(model, **change)})


# ---- device

@pytest.mark.device
def test_cuda_available():
    "What torch, the chooser and the report say of CUDA is one thing."
    there, choice, report = torch.cuda.is_available(), choose_device("auto"), device_report("auto", steps={})
    assert (choice.device.type == "cuda") == there == (report.facts["cuda_devices"] > 0) == (report.facts["card"] is not None and report.device.startswith("cuda"))
    assert [c.name for c in report.checks] == ([] if there else ["cuda"]) and report.ok      # without a card: said, and no failure


@pytest.mark.device
def test_device_selection():
    "Each wish ends in a device and a reason in the first line, or in one line that names the wish."
    for want in ("auto", "cpu"):
        choice, line = choose_device(want), device_report(want, steps={}).text().splitlines()[0]
        assert line == f"device: {choice.device} ({choice.reason})" and len(choice.reason) > 5
    assert choose_device("cpu").device == HOST and choose_device("auto").reason.startswith("auto: ")
    for want in (f"cuda:{torch.cuda.device_count()}", "gpu", "meta"):
        with pytest.raises(UserError, match=f"^device '{want}' ") as e: choose_device(want)
        assert "\n" not in str(e.value)


def uses_cuda(model):
    "Two epochs on CUDA with finite losses; the state goes on the CPU, trains there, and both give the same outputs."
    cfg, table = SMALL, synthetic(spec(model).kind)
    trainer = spec(model).trainer(table, cfg, 0, torch.device("cuda", 0))
    assert all(torch.tensor(trainer.run_epoch()["loss"]).isfinite() for _ in range(2))
    assert all(p.is_cuda for p in trainer.model.parameters())
    assert all(v.is_cuda for s in trainer.opt.state.values() for k, v in s.items() if k != "step")
    here = spec(model).trainer(table, cfg, 0, HOST)
    here.load_state_dict(trainer.state_dict())
    w = spec(model).workload(cfg, table); batch = w.batch(4, HOST)
    there = tuple(x.cuda() if isinstance(x, torch.Tensor) else x for x in batch[0])
    trainer.model.eval(); here.model.eval()
    with torch.no_grad(): torch.testing.assert_close(trainer.model(*there).cpu(), here.model(*batch[0]), atol=1e-3, rtol=1e-3)
    assert torch.tensor(here.run_epoch()["loss"]).isfinite()


@pytest.mark.gpu
@pytest.mark.device
def test_mamba2_uses_cuda_device(): uses_cuda("mamba2")


@pytest.mark.gpu
@pytest.mark.device
def test_tft_uses_cuda_device(): uses_cuda("tft")


@pytest.mark.gpu
@pytest.mark.device
def test_tlob_uses_cuda_device(): uses_cuda("tlob")


# ---- shapes, at the default size

def forecast(model, n=3):
    w = workload(model); m, b = w.model().eval(), w.batch(n, HOST)
    with torch.no_grad(): return spec(model).config(Params()), w.infer(m, b), w.infer(m, (tuple(x[:1] for x in b[0]), *b[1:]))


def same_alone(out, alone): torch.testing.assert_close(out[:1], alone, atol=1e-5, rtol=1e-5)      # a row does not see its neighbours


@pytest.mark.unit
def test_mamba2_forward_pass_shape():
    cfg, out, alone = forecast("mamba2")
    assert out.shape == (3, cfg.horizon, len(cfg.quantiles)) and out.isfinite().all(); same_alone(out, alone)


@pytest.mark.unit
def test_tft_forward_pass_shape():
    cfg, out, alone = forecast("tft")
    assert out.shape == (3, cfg.horizon, len(cfg.quantiles)) and out.isfinite().all(); same_alone(out, alone)


@pytest.mark.unit
def test_tlob_forward_pass_shape():
    cfg, out, alone = forecast("tlob")
    assert out.shape == (3, 3) and out.isfinite().all(); same_alone(out, alone)                     # up, flat, down


# ---- memory

@pytest.mark.unit
@pytest.mark.parametrize("model", MODELS)
def test_4gb_gpu_memory_compatibility(model):
    "Default settings, context included, leave a tenth of a 4 GB card free."
    card = CARDS["RTX 3050 Ti Laptop"]; f = predict(NAME, card=card, kwargs={"name": model})
    assert card.memory == 4096 * MIB and f.fits and f.allocated <= f.reserved < f.total <= 0.9 * card.memory


@pytest.mark.unit
def test_memory_stats_tracking():
    "What is recorded is the training's: weights, gradients and optimizer by their size, activations that grow with the batch, a peak above all that stays."
    w = workload("ppo"); small, large = measure_host(w, 64), measure_host(w, 256)
    weights = sum(p.numel() * 4 for p in w.model().parameters())
    for m in (small, large):
        assert abs(m.parameters - weights) <= 0.02 * weights and abs(m.gradients - weights) <= 0.02 * weights and abs(m.optimizer - 2 * weights) <= 0.02 * weights
        assert m.peak >= m.parameters + m.gradients + m.optimizer
    assert 3 < large.activations / small.activations < 5 and large.peak > small.peak
    assert try_batch(w, 8, HOST).peak is None                                   # the CPU keeps no such count: said, not 0
    if torch.cuda.is_available():
        a, b = (try_batch(w, n, torch.device("cuda", 0)).peak for n in (64, 65_536))
        assert weights < a < b


@pytest.mark.unit
@pytest.mark.parametrize("model", FORECASTERS)
def test_gradient_checkpointing_simulation(model):
    "Keeping only inputs lowers the predicted peak by what the activations lose; weights and optimizer stay as they are."
    plain, saving = (forecast_peak(model, grad_checkpoint=on, batch=128) for on in (False, True))
    assert saving.allocated < plain.allocated and saving.categories["activations"] < plain.categories["activations"]
    assert saving.categories["parameters"] == plain.categories["parameters"] and saving.categories["optimizer"] == plain.categories["optimizer"]


@pytest.mark.unit
def test_memory_optimization_config():
    "The three settings that save memory are read from plain values, keep what they must, and refuse nonsense in one line."
    p = validate(with_config("tft", grad_checkpoint=True, precision="bf16", accumulate=4)).train.tft
    assert (p.grad_checkpoint, p.precision, p.accumulate, p.batch) == (True, "bf16", 4, Params().train.tft.batch)
    for wrong in ({"precision": "int8"}, {"accumulate": 0}, {"grad_checkpoint": "often"}):
        plain = with_config("tft"); plain["train"]["tft"] |= wrong
        with pytest.raises(Exception, match=next(iter(wrong))): validate(plain)
    assert [accumulation(n, fits) for n, fits in ((32, 8), (32, 100), (30, 8))] == [(8, 4), (32, 1), (6, 5)]


@pytest.mark.slow
@pytest.mark.unit
def test_half_precision_fits_a_larger_batch():
    half = search_batch(NAME, card=dataclasses.replace(CARDS["RTX 3050 Ti Laptop"], memory=800 * MIB), precision="bf16", limit=256, kwargs={"name": "tft"})
    full = search_batch(NAME, card=dataclasses.replace(CARDS["RTX 3050 Ti Laptop"], memory=800 * MIB), limit=256, kwargs={"name": "tft"})
    assert 0 < full.batch < half.batch or full.batch == half.batch == 256
    assert re.fullmatch(r"prediction for .* in bf16", half.how) and DQN().precision == "fp32"
