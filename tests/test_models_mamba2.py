"Mamba-2: three forms of one function, safe numbers, live = trained, and transformers agrees."
import copy, math, pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from foxhunt.core import generator
from foxhunt.models.mamba2 import (Mamba2, Mamba2Block, Mamba2Forecaster, causal_conv, monotone, reference_weights, ssd_chunked, ssd_recurrent)
from foxhunt.models.mlp import param_groups
from foxhunt.params import Mamba2 as Config

GOLDEN = Path(__file__).parent / "golden" / "mamba2_transformers.safetensors"
CFG = Config(d_model=16, n_layers=2, head=8, d_state=8, chunk=8, horizon=3, dropout=0.0)


def relative(a, b): return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


def arguments(t, b=2, h=4, p=3, g=2, n=5, dtype=torch.float64, decay=1.0):
    gen = generator(0, "ssd", t)
    rnd = lambda *s: torch.randn(*s, generator=gen, dtype=dtype)
    return dict(x=rnd(b, t, h, p), dt=F.softplus(rnd(b, t, h)) * decay, A=-torch.rand(h, generator=gen, dtype=dtype) * 2 - 0.1, B=rnd(b, t, g, n), C=rnd(b, t, g, n), D=rnd(h))


def stack(seed=0, **size):
    torch.manual_seed(seed)
    return Mamba2(16, 2, **dict(d_state=8, head=8, chunk=8) | size)


def inputs(b=2, t=20, d=16): return torch.randn(b, t, d, generator=generator(0, "inputs", b, t, d))


def alive(model, loss):
    model.zero_grad(set_to_none=True); loss.backward()
    for n, p in model.named_parameters(): assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.abs().max() > 0, n


# one function, three forms

@pytest.mark.unit
@pytest.mark.parametrize("t", (1, 3, 63, 64, 65, 127, 128, 129))
@pytest.mark.parametrize("dtype, bound", ((torch.float64, 1e-9), (torch.float32, 1e-4)))
def test_chunked_is_recurrent(t, dtype, bound):
    a = arguments(t, dtype=dtype); state = torch.randn(2, 4, 3, 5, generator=generator(0, "state"), dtype=dtype)
    for out, ref in zip(ssd_chunked(**a, state=state), ssd_recurrent(**a, state=state)): assert relative(out, ref) <= bound


@pytest.mark.unit
@settings(max_examples=20, deadline=None)
@given(t=st.integers(2, 40), cut=st.floats(0.01, 0.99), chunk=st.integers(1, 48))
def test_split_is_whole(t, cut, chunk):
    k = min(max(1, int(t * cut)), t - 1); a = arguments(t)
    part = lambda s: {n: v[:, s] if v.dim() > 1 else v for n, v in a.items()}
    first, state = ssd_chunked(**part(slice(k)), chunk=chunk)
    second, end = ssd_chunked(**part(slice(k, None)), chunk=chunk, state=state)
    whole, last = ssd_chunked(**a, chunk=chunk)
    assert relative(torch.cat([first, second], 1), whole) <= 1e-10 and relative(end, last) <= 1e-10


@pytest.mark.unit
@pytest.mark.parametrize("t", (1, 3, 63, 64, 65, 127, 128, 129))
@pytest.mark.parametrize("dtype, bound", ((torch.float64, 1e-9), (torch.float32, 1e-4)))
def test_written_out_gradients_are_autograds(t, dtype, bound):
    block = Mamba2Block(6, d_state=3, head=3, groups=2, chunk=64).to(dtype); gen = generator(0, "block", t)
    with torch.no_grad():
        for p in block.parameters(): p.add_(0.3 * torch.randn(p.shape, generator=gen, dtype=dtype))
    u, weight = (torch.randn(3, t, 6, generator=gen, dtype=dtype) for _ in range(2)); u.requires_grad_()
    runs = []
    for y in (block(u), block.scan(u)[0]):
        runs.append((y.detach(), *torch.autograd.grad((y * weight).sum(), (u, *block.parameters()))))
    scale = max(g.abs().max() for g in runs[1])
    for fast, plain in zip(*runs): assert (fast - plain).abs().max() <= bound * scale


@pytest.mark.unit
@pytest.mark.parametrize("decay", (1e-6, 1e4, 1e8))
def test_strong_and_weak_decay(decay):
    a = {k: v.requires_grad_() for k, v in arguments(70, dtype=torch.float32, decay=decay).items()}
    y, state = ssd_chunked(**a); (y.sum() + state.sum()).backward()
    assert all(torch.isfinite(v.grad).all() for v in a.values()) and torch.isfinite(y).all()
    model = stack()
    with torch.no_grad():
        for block in model.layers: block.dt_bias.fill_(decay if decay > 1 else -30.0); block.A_log.fill_(15.0 if decay > 1 else -15.0)
    model(inputs(t=70)).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


STRONG = (([5], 20.0), ([5, *range(70, 75)], 1e3), ([5, *range(70, 75)], 1e7), (range(40), 30.0))   # bars that forget everything, and their dt


@pytest.mark.unit
@pytest.mark.parametrize("at, size", STRONG)
@pytest.mark.parametrize("dtype, bound", ((torch.float64, 1e-9), (torch.float32, 1e-4)))
def test_strong_bars_among_weak_ones(at, size, dtype, bound):
    a = arguments(128); gen = generator(0, "strong")
    a["dt"] = 1e-3 * torch.rand(2, 128, 4, generator=gen, dtype=torch.float64); a["dt"][:, list(at)] = size
    a["A"] = -15 * torch.rand(4, generator=gen, dtype=torch.float64) - 1
    a = {k: v.to(dtype) for k, v in a.items()}
    exact = ssd_recurrent(**{k: v.double() for k, v in a.items()})
    for out, ref in zip(ssd_chunked(**a), exact): assert relative(out.double(), ref) <= bound


@pytest.mark.unit
@pytest.mark.parametrize("at, size", STRONG)
@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("dtype, bound", ((torch.float64, 1e-9), (torch.float32, 1e-4)))
def test_strong_bars_in_both_forms_and_their_gradients(at, size, groups, dtype, bound):
    "The first input says how much is forgotten. Values against a loop of steps in double precision, gradients against autograd's."
    torch.manual_seed(0); block, gen = Mamba2Block(8, d_state=3, head=4, groups=groups), generator(0, "strong block")
    with torch.no_grad():
        for p in block.parameters(): p.add_(0.3 * torch.randn(p.shape, generator=gen))
        block.dt_bias.fill_(-7); block.A_log.uniform_(0, 2.7, generator=gen)
        block.in_proj.weight[-4:] = 0; block.in_proj.weight[-4:, 0] = size / 2
    u, weight = (torch.randn(3, 100, 8, generator=gen) for _ in range(2))
    u[..., 0] *= 1e-3 / size; u[:, list(at), 0] = 4
    exact, block = copy.deepcopy(block).double(), block.to(dtype)
    def loop(module, u):
        state, ys = module.init_state(3), []
        for i in range(100): y, state = module.step(u[:, i], state); ys.append(y)
        return torch.stack(ys, 1)
    def run(f, module, dtype):
        v = u.to(dtype).requires_grad_(); y = f(module, v)
        return y.detach().double(), [g.double() for g in torch.autograd.grad((y * weight.to(dtype)).sum(), (v, *module.parameters()))]
    ref, grads = run(loop, exact, torch.float64); scale = max(g.abs().max() for g in grads)
    fast, plain = run(lambda m, v: m(v), block, dtype), run(lambda m, v: m.scan(v)[0], block, dtype)
    rounding = relative(loop(block, u.to(dtype)).detach().double(), ref)                # of the steps themselves: one case is badly conditioned
    for y, _ in (fast, plain): assert relative(y, ref) <= max(bound, rounding)
    for a, b in zip(fast[1], plain[1] if dtype == torch.float32 else grads): assert (a - b).abs().max() <= bound * scale


@pytest.mark.integration
def test_forward_scan_and_step_agree():
    model, u = stack(groups=2), inputs(3, 29)
    with torch.no_grad():
        whole, end = model.scan(u); fast = model(u)
        state, ys = model.init_state(3), []
        for i in range(29): y, state = model.step(u[:, i], state); ys.append(y)
        a, mid = model.scan(u[:, :2]); b, _ = model.scan(u[:, 2:], mid)             # a piece shorter than the convolution
    for other in (fast, torch.stack(ys, 1), torch.cat([a, b], 1)): assert relative(other, whole) <= 1e-4
    assert all(relative(p, q) <= 1e-4 for s, e in zip(state, end) for p, q in zip(s, e))
    assert [s.ssm.shape for s in state] == [s.ssm.shape for s in model.init_state(3)]   # the state does not grow


@pytest.mark.integration
def test_causal_and_rows_are_independent():
    model, u = stack(), inputs(4, 21); changed = u.clone(); changed[:, 13:] *= -3
    y = model(u)
    assert torch.equal(model(changed)[:, :13], y[:, :13]) and not torch.allclose(model(changed)[:, 13:], y[:, 13:])
    assert relative(model(u[2:3]), y[2:3]) <= 1e-4
    u.requires_grad_(); model(u)[1, 9].sum().backward()
    seen = u.grad.abs().sum(-1) > 0
    assert seen[1, :10].all() and seen.sum() == 10                                     # nothing ahead, no other row


@pytest.mark.integration
@pytest.mark.parametrize("b", (1, 3))
def test_left_padding_is_as_if_it_were_not_there(b):
    model, u = stack(), inputs(b, 17)
    valid = torch.arange(22)[None].expand(b, -1) >= 5
    padded = torch.cat([torch.full((b, 5, 16), 7.0), u], 1).requires_grad_()
    y = model(padded, valid); y[:, 5:].square().sum().backward()
    assert relative(y[:, 5:], model(u)) <= 1e-4 and (padded.grad[:, :5] == 0).all() and torch.isfinite(padded.grad).all()


# gradients, precision, repeatability

@pytest.mark.integration
@pytest.mark.parametrize("cast", (None, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("t", (1, 5, 8, 19))
def test_every_gradient_is_finite_and_alive(cast, t):
    torch.manual_seed(0); f = Mamba2Forecaster(CFG, 4)
    with torch.autocast("cpu", cast, enabled=cast is not None): y = f.every(inputs(3, t, 4))
    assert y.dtype == torch.float32 and torch.isfinite(y).all()
    if t == 1:                                                                          # one bar from a zero state: nothing can decay yet
        f.zero_grad(); (y * torch.arange(3)).square().mean().backward()
        assert all(torch.isfinite(p.grad).all() for p in f.parameters())
    else: alive(f, (y - torch.arange(3)).square().mean())
    assert all(p.dtype == torch.float32 for p in f.parameters())


@pytest.mark.integration
@pytest.mark.parametrize("cast", (None, torch.bfloat16, torch.float16))
def test_a_row_of_nothing_but_padding_is_safe(cast):
    "Finite forecast and gradients, and the other rows do not notice; padding holds garbage."
    model, u = stack(), inputs(3, 19); valid = torch.ones(3, 19, dtype=torch.bool); valid[1] = False; u[1] = 1e4
    with torch.autocast("cpu", cast, enabled=cast is not None): y = model(u, valid)
    alive(model, y.float().square().sum())
    assert torch.isfinite(y).all()
    if cast is None:
        assert relative(y[[0, 2]], model(u[[0, 2]])) <= 1e-4 and relative(model.scan(u[:1])[0], y[:1]) <= 1e-4
        nothing = stack(); nothing(u, torch.zeros_like(valid)).square().sum().backward()       # a whole batch of it
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in nothing.parameters())


@pytest.mark.unit
def test_one_variable_is_enough_and_none_is_named():
    torch.manual_seed(0); f = Mamba2Forecaster(CFG, 1)
    alive(f, (f.every(inputs(3, 19, 1)) - torch.arange(3)).square().mean())
    with pytest.raises(ValueError, match="variables must be at least 1, got 0"): Mamba2Forecaster(CFG, 0)


@pytest.mark.unit
def test_autocast_keeps_decay_and_states_in_fp32():
    block = Mamba2Block(16, d_state=8, head=8)
    with torch.autocast("cpu", torch.bfloat16): _, state = block.scan(inputs()); _, step = block.step(inputs()[:, 0], state)
    assert {state.ssm.dtype, state.conv.dtype, step.ssm.dtype} == {torch.float32}
    exact = block(inputs())
    with torch.autocast("cpu", torch.bfloat16): assert relative(block(inputs()).float(), exact) < 0.03


@pytest.mark.integration
@pytest.mark.parametrize("cast", (None, torch.bfloat16))
def test_checkpointing_changes_no_gradient_and_keeps_less(cast):
    kept, grads = [], []
    for saving in (False, True):
        model, seen = stack(grad_checkpoint=saving), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel() * t.element_size()) or t, lambda t: t), torch.autocast("cpu", cast, enabled=cast is not None):
            loss = model(inputs(8, 64)).float().square().sum()
        kept.append(sum(seen)); loss.backward(); grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads)) and kept[1] < kept[0] / 2


@pytest.mark.integration
def test_deterministic_algorithms_suffice():
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            m = stack(); m(inputs(t=33)).square().sum().backward(); m.scan(inputs(t=33))[0].sum().backward(); runs.append([p.grad for p in m.parameters()])
        assert all(torch.equal(*p) for p in zip(*runs))
    finally: torch.use_deterministic_algorithms(False)


# what it is made of

@pytest.mark.unit
def test_initial_dt_and_weight_decay_groups():
    f = Mamba2Forecaster(CFG, 4); f.body.check()
    for block in f.body.layers:
        dt = F.softplus(block.dt_bias)
        assert (dt >= 0.99e-4).all() and (dt <= 0.101).all() and (block.A_log.exp() >= 0.99).all() and (block.A_log.exp() <= 16.1).all() and (block.D == 1).all()
    free = {id(p) for g in param_groups(f, 0.1) if g["weight_decay"] == 0 for p in g["params"]}
    for n, p in f.named_parameters():
        assert (id(p) in free) == any(k in n for k in ("dt_bias", "A_log", ".D", "norm", "bias")), n
    for m in f.modules():                                                               # a generic initialisation that comes later is noticed
        for p in m.parameters(recurse=False): torch.nn.init.normal_(p)
    with pytest.raises(RuntimeError, match="layer 0: softplus\\(dt_bias\\)"): f.body.check()


@pytest.mark.unit
def test_initial_spread_of_dt_and_of_a_deep_stacks_outputs():
    "dt is log-uniform on [1e-3, 0.1], A uniform on [1, 16]; the output projection shrinks with the root of the depth."
    torch.manual_seed(0); one, four = (Mamba2Block(512, head=1, d_state=2, n_layers=n) for n in (1, 4))
    place = (F.softplus(one.dt_bias).log() - math.log(1e-3)) / math.log(100)                    # 1,024 heads; uniform on [0, 1] if so
    grid = (torch.arange(1024) + 0.5) / 1024
    for x in (place, (one.A_log.exp() - 1) / 15): assert (x.detach().sort().values - grid).abs().max() < 1.95 / 32   # Kolmogorov-Smirnov at 0.001
    assert abs(one.out_proj.weight.std() / four.out_proj.weight.std() - 2) < 0.02
    assert abs(one.out_proj.weight.std() * math.sqrt(3 * 1024) - 1) < 0.02                      # nn.Linear's own, uniform within 1 / sqrt(1024)
    for a, b in zip(Mamba2(512, 4, head=1, d_state=2).layers, [four] * 4): assert abs(a.out_proj.weight.std() / b.out_proj.weight.std() - 1) < 0.02


@pytest.mark.unit
@pytest.mark.parametrize("size, text", ((dict(head=7), "must be a multiple of head = 7"), (dict(head=8, groups=3), "multiple of groups = 3"), (dict(d_state=0), "d_state must be a whole number"), (dict(d_conv=2.5), "d_conv must be"), (dict(chunk=-1), "chunk must be")))
def test_sizes_are_checked(size, text):
    with pytest.raises(ValueError, match=text): Mamba2Block(16, **dict(head=8) | size)


@pytest.mark.unit
def test_monotone():
    raw = torch.randn(50, 7, generator=generator(0, "raw")) * 30
    assert (monotone(raw).diff(dim=-1) >= 0).all() and torch.equal(monotone(raw)[:, 0], raw[:, 0]) and monotone(raw[:, :1]).shape == (50, 1)


@pytest.mark.unit
@pytest.mark.parametrize("w", (1, 2, 4))
@pytest.mark.parametrize("t", (1, 2, 9))
def test_convolution_is_torchs(w, t):
    x, k, b = inputs(2, t, 6), inputs(1, 6, w)[0], inputs(1, 1, 6)[0, 0]
    assert torch.allclose(causal_conv(x, k, b)[0], F.conv1d(F.pad(x.transpose(1, 2), (w - 1, 0)), k[:, None], b, groups=6).transpose(1, 2), atol=1e-5)


@pytest.mark.integration
def test_live_forecasts_are_the_trained_ones():
    torch.manual_seed(0); f = Mamba2Forecaster(CFG, 4).eval(); past = inputs(2, 25, 4)
    with torch.no_grad():
        every = f.every(past); state = f.init_state(2)
        for i in range(25):
            y, state = f.step(past[:, i], state)
            assert relative(y, every[:, i]) <= 1e-4
        warm, _ = f.scan(past)
        assert relative(warm, f(past)) <= 1e-4 and f(past).shape == (2, 3, 3) and (every.diff(dim=-1) >= 0).all()


# the folded step

def eager(model, bar, state):
    "The plain step: with gradients nothing is kept and nothing folded."
    with torch.enable_grad(): return model.step(bar, state)[0].detach()


def fused_update(m):
    opt = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
    m(inputs()).square().sum().backward(); opt.step()


def update(m):
    opt = torch.optim.AdamW(m.parameters(), lr=0.1)
    m(inputs()).square().sum().backward(); opt.step()


def quiet_update(m):
    with torch.inference_mode():
        for p in m.parameters(): p.mul_(1.1)


def replace(m):
    for block in m.layers: block.D = torch.nn.Parameter(block.D.detach() + 1)


def trained(m):
    m.train(); update(m); m.eval()


def assign(m): m.load_state_dict({k: v * 1.1 for k, v in m.state_dict().items()}, assign=True)


WRITERS = dict(update=update, fused_update=fused_update, quiet_update=quiet_update, replace=replace, trained=trained, assign=assign,
               load=lambda m: m.load_state_dict(stack(1, groups=2).state_dict()))


@pytest.mark.unit
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("guard", (torch.no_grad, torch.inference_mode))
def test_a_folded_step_is_never_stale(writer, guard):
    model, bar = randomised(stack(groups=2)).eval(), inputs(3, 1)[:, 0]
    with torch.no_grad(): _, state = model.scan(inputs(3, 9))
    with guard(): before, _ = model.step(bar, state); again, _ = model.step(bar, state)
    assert torch.equal(before, again) and relative(before, eager(model, bar, state)) <= 1e-5
    with guard(): model.step(bar, state)
    assert all(block._kept is not None for block in model.layers)
    twin = copy.deepcopy(model); shipped = pickle.loads(pickle.dumps(model))
    assert all(block._kept is None for m in (twin, shipped) for block in m.layers)
    for m in (model, twin, shipped):
        with guard(): m.step(bar, state)
        writer(m)
        with guard(): after, _ = m.step(bar, state)
        assert not torch.allclose(after, before, rtol=1e-3) and relative(after, eager(m, bar, state)) <= 1e-5


@pytest.mark.unit
def test_a_folded_step_leaves_no_trace():
    model, bar = randomised(stack(groups=2)).eval(), inputs(3, 1)[:, 0]
    with torch.no_grad():
        _, state = model.scan(inputs(3, 9)); saved, names = copy.deepcopy(state), list(model.state_dict())
        _, new = model.step(bar, state)
        assert list(model.state_dict()) == names and len(list(model.parameters())) == len(list(copy.deepcopy(model).parameters()))
        for a, b, c in zip(state, saved, new):
            for x, y, z in zip(a, b, c): assert torch.equal(x, y) and x.untyped_storage().data_ptr() != z.untyped_storage().data_ptr()
        wide = model.double(); y, _ = wide.step(bar.double(), tuple(type(s)(*(t.double() for t in s)) for s in state))
        assert y.dtype == torch.float64 and relative(y, eager(wide, bar.double(), tuple(type(s)(*(t.double() for t in s)) for s in state))) <= 1e-12
    model.float(); bar.requires_grad_(); y, _ = model.step(bar, state); alive(model, y.square().sum())   # gradients flow, from evaluation mode too
    assert bar.grad.abs().max() > 0 and all(block._kept is None for block in model.layers)
    model.train()
    with torch.no_grad(): model.step(bar, state); assert all(block._kept is None for block in model.layers)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, new = model.step(bar, state); assert relative(y.float(), eager(model, bar, state)) < 0.05 and {t.dtype for s in new for t in s} == {torch.float32}
    with torch.inference_mode(): born = stack(groups=2).eval(); y, _ = born.step(bar, state)             # parameters without a version
    assert torch.isfinite(y).all() and all(block._kept is None for block in born.layers)


@pytest.mark.unit
@pytest.mark.slow
def test_a_compiled_step_is_the_folded_one():
    model, bar = randomised(stack()).eval(), inputs(3, 1)[:, 0]
    with torch.inference_mode():
        state = model.init_state(3); plain = model.step(bar, state)[0]; fused = torch.compile(model.step, fullgraph=True)
        assert relative(fused(bar, state)[0], plain) <= 1e-5
        quiet_update(model); assert relative(fused(bar, state)[0], model.step(bar, state)[0]) <= 1e-5


# devices and checkpoints

@pytest.mark.device
def test_builds_and_runs_on_the_default_device():
    with torch.device("meta"):
        f = Mamba2Forecaster(CFG, 4); past = torch.empty(2, 19, 4)
    assert {p.device.type for p in (*f.parameters(), *f.buffers())} == {"meta"}
    f(past).sum().backward()                                                            # a tensor made on another device would not mix
    y, state = f.scan(past); y, state = f.step(past[:, 0], state)
    assert {y.device.type, *(t.device.type for s in state for t in s), *(p.grad.device.type for p in f.parameters())} == {"meta"}
    f(past, torch.empty(2, 19, dtype=torch.bool, device="meta")).sum().backward()


@pytest.mark.checkpoint
def test_safetensors_round_trip(tmp_path):
    from safetensors.torch import load_file, save_file
    torch.manual_seed(0); f, g = Mamba2Forecaster(CFG, 4).eval(), Mamba2Forecaster(CFG, 4).eval()
    save_file(f.state_dict(), tmp_path / "m.safetensors"); g.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert torch.equal(f(inputs(d=4)), g(inputs(d=4)))
    torch.save(f.state_dict(), tmp_path / "m.pt")
    assert all(torch.equal(a, f.state_dict()[k]) for k, a in torch.load(tmp_path / "m.pt", weights_only=True).items())


@pytest.mark.checkpoint
def test_a_live_state_can_be_saved_and_continued(tmp_path):
    from safetensors.torch import load_file, save_file
    torch.manual_seed(0); f = Mamba2Forecaster(CFG, 4).eval(); past = inputs(1, 12, 4)
    _, state = f.scan(past[:, :8])
    save_file({f"{i}.{k}": t.contiguous() for i, s in enumerate(state) for k, t in s._asdict().items()}, tmp_path / "state.safetensors")
    saved = load_file(tmp_path / "state.safetensors")
    again = tuple(type(s)(saved[f"{i}.conv"], saved[f"{i}.ssm"]) for i, s in enumerate(state))
    assert torch.equal(f.step(past[:, 8], again)[0], f.step(past[:, 8], state)[0])


# a second implementation

def hf_model(hidden, layers, state, head, chunk=16):
    from transformers import Mamba2Config, Mamba2Model
    return Mamba2Model(Mamba2Config(hidden_size=hidden, num_hidden_layers=layers, expand=2, head_dim=head, num_heads=2 * hidden // head, state_size=state, n_groups=1,
                                    vocab_size=1, pad_token_id=None, bos_token_id=None, eos_token_id=None, chunk_size=chunk, conv_kernel=4))


def randomised(model, seed=0):
    "Every parameter away from its initial value, so that a swapped or ignored one shows."
    gen = generator(seed, "golden")
    with torch.no_grad():
        for p in model.parameters(): p.add_(0.2 * torch.randn(p.shape, generator=gen))
    return model


def golden():
    "A small transformers model: weights, input, output."
    torch.manual_seed(0); hf = randomised(hf_model(16, 2, 8, 8)); u = inputs(2, 21, 16)
    with torch.no_grad(): y = hf(inputs_embeds=u, use_cache=False).last_hidden_state
    return {k: v.clone() for k, v in hf.state_dict().items() if "embedding" not in k} | {"input": u, "output": y}


@pytest.mark.integration
def test_transformers_golden_output():
    from safetensors.torch import load_file
    stored = load_file(GOLDEN); u, y = stored.pop("input"), stored.pop("output")
    model = stack(); model.load_state_dict(reference_weights(stored))
    assert relative(model(u), y) <= 1e-4 and relative(model.scan(u)[0], y) <= 1e-4


@pytest.mark.peers
def test_golden_is_what_transformers_computes():
    from safetensors.torch import load_file
    stored, hf = load_file(GOLDEN), hf_model(16, 2, 8, 8)
    hf.load_state_dict({k: v for k, v in stored.items() if k not in ("input", "output")}, strict=False)
    with torch.no_grad(): assert relative(hf(inputs_embeds=stored["input"], use_cache=False).last_hidden_state, stored["output"]) <= 1e-5


@pytest.mark.peers
def test_comparison_size_matches_transformers():
    torch.manual_seed(0); hf = randomised(hf_model(256, 4, 64, 64, chunk=64)); ours = Mamba2(256, 4)
    assert sum(p.numel() for p in ours.parameters()) == 1_728_352
    ours.load_state_dict(reference_weights(hf.state_dict()))
    u = inputs(2, 128, 256); target = inputs(2, 128, 257)[..., :256]
    outs = hf(inputs_embeds=u, use_cache=False).last_hidden_state, ours(u)
    assert relative(outs[1], outs[0].detach()) <= 1e-4
    for o in outs: F.mse_loss(o, target).backward()
    theirs = reference_weights({n: p.grad for n, p in hf.named_parameters()})
    for n, p in ours.named_parameters(): assert relative(p.grad, theirs[n]) <= 1e-3, n


@pytest.mark.peers
def test_step_matches_transformers_cache():
    torch.manual_seed(0); hf = randomised(hf_model(16, 2, 8, 8)).eval(); ours = stack(); ours.load_state_dict(reference_weights(hf.state_dict())); u = inputs(2, 12, 16)
    with torch.no_grad():
        _, state = ours.scan(u[:, :9]); out = hf(inputs_embeds=u[:, :9], use_cache=True); cache = out.cache
        for i in range(9, 12):
            y, state = ours.step(u[:, i], state)
            assert relative(y, hf(inputs_embeds=u[:, i : i + 1], cache=cache, use_cache=True).last_hidden_state[:, 0]) <= 1e-4


# a GPU

@pytest.mark.gpu
@pytest.mark.device
def test_cuda_is_cpu_and_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        cpu = stack(); gpu = copy.deepcopy(cpu).cuda(); u = inputs(3, 129)
        outs = []
        for m, x in ((cpu, u), (gpu, u.cuda()), (copy.deepcopy(gpu), u.cuda())):
            m.zero_grad(); y = m(x); y.square().mean().backward(); outs.append((y.cpu(), [p.grad.cpu() for p in m.parameters()]))
        assert relative(outs[1][0], outs[0][0]) <= 1e-3
        for a, b in zip(outs[1][1], outs[0][1]): assert relative(a, b) <= 1e-2
        assert all(torch.equal(a, b) for a, b in zip(outs[1][1], outs[2][1]))
        for cast in (torch.float16, torch.bfloat16):
            with torch.autocast("cuda", cast): y = gpu(u.cuda())
            alive(gpu, y.float().square().mean())
    finally: torch.use_deterministic_algorithms(False)


if __name__ == "__main__":   # python tests/test_models_mamba2.py: write the golden file anew
    from safetensors.torch import save_file
    GOLDEN.parent.mkdir(exist_ok=True); save_file(golden(), GOLDEN)
