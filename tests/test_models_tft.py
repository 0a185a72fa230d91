"""The Temporal Fusion Transformer against a second implementation, and what its notebook does not show."""
import copy
import dataclasses
import io
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from foxhunt import params
from foxhunt.models.mlp import param_groups
from foxhunt.models.tft import GRN, TFT, Dropout, InterpretableAttention, ScalarEmbedding, VariableSelection, decoder_mask, masked_softmax

GOLDEN = Path(__file__).parent / "golden" / "tft_neuralforecast.safetensors"
CFG = params.TFT(hidden=8, heads=2, lookback=6, horizon=3, dropout=0.0)
LEVELS = CFG.quantiles


def model(v=2, u=1, static=2, dtype=torch.float32, seed=0, values=0, **over):
    cfg = params.TFT(**(dict(hidden=8, heads=2, lookback=6, horizon=3, dropout=0.0) | over))
    torch.manual_seed(seed)
    return TFT(cfg, v, u, static, values).to(dtype)


def batch(b=4, t=6, v=2, u=1, static=2, dtype=torch.float32, k=3):
    g = torch.Generator().manual_seed(1)
    past, known = torch.randn(b, t, v, generator=g, dtype=dtype), torch.randn(b, t + k, u, generator=g, dtype=dtype) if u else None
    return past, known, (torch.arange(b) % (static + 1)) if static else None


def pinball(predicted, y):
    e, tau = y[..., None] - predicted, torch.tensor(LEVELS, dtype=y.dtype)
    return torch.maximum(tau * e, (tau - 1) * e).mean()


def pinball_on_device(predicted, y):
    e, tau = y[..., None] - predicted, torch.tensor(LEVELS, device=y.device)
    return torch.maximum(tau * e, (tau - 1) * e).mean()


# ---- a second implementation: neuralforecast's TFT, the same weights

def copy_grn(mine: GRN, theirs: nn.Module) -> None:
    pairs = [(mine.first, theirs.lin_a), (mine.second, theirs.lin_i), (mine.gate, theirs.glu.lin), (mine.norm, theirs.layer_norm.ln)]
    if mine.skip is not None: pairs.append((mine.skip, theirs.out_proj))
    if mine.context is not None: pairs.append((mine.context, theirs.lin_c))
    for a, b in pairs: a.load_state_dict(b.state_dict())


@torch.no_grad()
def copy_selection(mine: VariableSelection, theirs: nn.Module, order: list[int]) -> None:
    "Our variable i is theirs order[i]."
    d = mine.d
    for i, j in enumerate(order):
        g = theirs.var_grns[j]
        for ours, other in ((mine.w1, g.lin_a.weight.mT), (mine.b1, g.lin_a.bias), (mine.w2, g.lin_i.weight.mT), (mine.b2, g.lin_i.bias), (mine.w3, g.glu.lin.weight.mT),
                            (mine.b3, g.glu.lin.bias), (mine.gain, g.layer_norm.ln.weight), (mine.shift, g.layer_norm.ln.bias)): ours[i].copy_(other)
    if mine.weights is None: return
    copy_grn(mine.weights, theirs.joint_grn)
    inputs = torch.cat([torch.arange(j * d, (j + 1) * d) for j in order])
    for ours, other in ((mine.weights.first, theirs.joint_grn.lin_a), (mine.weights.skip, theirs.joint_grn.out_proj)): ours.weight.copy_(other.weight[:, inputs])
    w, n, skip, gate = mine.weights, theirs.joint_grn.layer_norm.ln, theirs.joint_grn.out_proj, theirs.joint_grn.glu.lin
    outputs, both = torch.tensor(order), torch.tensor(order + [len(order) + j for j in order])
    w.norm.weight.copy_(n.weight[outputs]); w.norm.bias.copy_(n.bias[outputs])
    w.skip.weight.copy_(w.skip.weight[outputs]); w.skip.bias.copy_(skip.bias[outputs])
    w.gate.weight.copy_(gate.weight[both]); w.gate.bias.copy_(gate.bias[both])


@torch.no_grad()
def copy_model(mine: TFT, theirs: nn.Module) -> None:
    "Weights of neuralforecast's TFT. Past variables: theirs are (observed, known, target), ours (observed, target, known)."
    e, u, hist = theirs.embedding, mine.u, mine.v - 1
    for ours, kind in (("weight", "vectors"), ("bias", "bias")):
        get = lambda name: getattr(e, f"{name}_embedding_{kind}")
        getattr(mine.past_embed, ours).copy_(torch.cat((get("hist_exog"), get("tgt"))))
        getattr(mine.known_embed, ours).copy_(get("futr_exog"))
        getattr(mine.static.values, ours).copy_(get("stat_exog"))
    t, s, f = theirs.temporal_encoder, theirs.static_encoder, theirs.temporal_fusion_decoder
    copy_selection(mine.choose_past, t.history_vsn, [*range(hist), hist + u, *range(hist, hist + u)])
    copy_selection(mine.choose_known, t.future_vsn, list(range(u)))
    copy_selection(mine.static.choose, s.vsn, list(range(mine.s[1])))
    for ours, other in zip((mine.static.select, mine.static.enrich, mine.static.hidden, mine.static.cell), s.context_grns): copy_grn(ours, other)
    copy_grn(mine.enrich, f.enrichment_grn); copy_grn(mine.position_wise, f.positionwise_grn)
    for ours, gate, norm in ((mine.local, t.input_gate, t.input_gate_ln), (mine.attended, f.attention_gate, f.attention_ln), (mine.last, f.decoder_gate, f.decoder_ln)):
        ours.gate.load_state_dict(gate.lin.state_dict()); ours.norm.load_state_dict(norm.state_dict())
    mine.encoder.load_state_dict(t.history_encoder.state_dict()); mine.decoder.load_state_dict(t.future_encoder.state_dict())
    a, d = mine.attention, mine.cfg.hidden
    for ours, w in zip((a.query, a.key, a.value), f.attention.qkv_linears.weight.split((d, d, d // mine.cfg.heads))): ours.weight.copy_(w)
    a.out.load_state_dict(f.attention.out_proj.state_dict()); mine.head.load_state_dict(theirs.output_adapter.state_dict())


def second_implementation() -> tuple[dict[str, torch.Tensor], TFT]:
    "Inputs, weights and outputs of neuralforecast's TFT, and our model with its weights."
    import logging
    for name in ("lightning", "lightning.fabric", "pytorch_lightning"): logging.getLogger(name).setLevel(logging.ERROR)
    from neuralforecast.losses.pytorch import MQLoss
    from neuralforecast.models import TFT as Theirs
    theirs = Theirs(h=3, input_size=6, hidden_size=8, n_head=2, dropout=0.0, attn_dropout=0.0, loss=MQLoss(quantiles=list(LEVELS)),
                    hist_exog_list=["a", "b"], futr_exog_list=["c", "d"], stat_exog_list=["e", "f"]).eval()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():                                          # all weights differ from their start, norms and biases too
        for p in theirs.parameters(): p.add_(0.1 * torch.randn(p.shape, generator=g))
    hist, y, known, values = (torch.randn(*shape, generator=g) for shape in ((4, 6, 2), (4, 6, 1), (4, 9, 2), (4, 2)))
    with torch.no_grad(): out = theirs(dict(insample_y=y, hist_exog=hist, futr_exog=known, stat_exog=values))
    seen = theirs.interpretability_params
    mine = TFT(CFG, 3, 2, 0, 2); copy_model(mine, theirs)
    past = seen["history_vsn_wgts"][..., [0, 1, 4, 2, 3]]
    tensors = dict(past=torch.cat((hist, y), -1), known=known, values=values, quantiles=out.sort(-1).values, attention=seen["attn_wts"].mean(1)[:, 6:],
                   past_weights=past, future_weights=seen["future_vsn_wgts"], static_weights=seen["static_encoder_sparse_weights"])
    return {k: v.detach().contiguous() for k, v in tensors.items()} | {f"weight.{k}": v for k, v in mine.state_dict().items()}, mine


def compare(golden: dict[str, torch.Tensor], **tolerance) -> None:
    mine = TFT(CFG, 3, 2, 0, 2); mine.load_state_dict({k.removeprefix("weight."): v for k, v in golden.items() if k.startswith("weight.")})
    want = [golden[k] for k in ("quantiles", "attention", "past_weights", "future_weights", "static_weights")]
    for form in (mine.train().explain, mine.reference):            # dropout is 0, so training mode is the plain product
        for a, b in zip(form(golden["past"], golden["known"], None, golden["values"]), want): torch.testing.assert_close(a, b, **tolerance)
    with torch.no_grad():
        for a, b in zip(mine.eval().explain(golden["past"], golden["known"], None, golden["values"]), want): torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.integration
def test_equals_a_second_implementation(): compare(load_file(GOLDEN), rtol=1e-4, atol=1e-5)


@pytest.mark.peers
@pytest.mark.integration
def test_golden_tensors_recomputed():
    pytest.importorskip("neuralforecast")
    fresh, _ = second_implementation()
    compare(fresh, rtol=1e-4, atol=1e-5)
    stored = load_file(GOLDEN)
    assert fresh.keys() == stored.keys()
    for k in fresh: torch.testing.assert_close(fresh[k], stored[k], rtol=1e-4, atol=1e-5, msg=lambda m: f"{k}: {m}")


# ---- laws over all shapes

@pytest.mark.unit
@settings(max_examples=25, deadline=None)
@given(v=st.integers(0, 4), u=st.integers(0, 3), static=st.sampled_from([0, 1, 3]), b=st.integers(1, 4), t=st.integers(1, 9), layers=st.integers(1, 2), seed=st.integers(0, 99))
def test_fast_form_is_plain_form(v, u, static, b, t, layers, seed):
    m, x = model(v, u, static, torch.float64, seed, lstm_layers=layers), batch(b, t, v, u, static, torch.float64)
    fast, plain = m.explain(*x), m.reference(*x)
    torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-11)
    a, c = (torch.autograd.grad(e.quantiles.sin().sum(), list(m.parameters()), retain_graph=True) for e in (fast, plain))
    torch.testing.assert_close(a, c, rtol=1e-6, atol=1e-9)
    with torch.no_grad(): torch.testing.assert_close(m.eval().explain(*x), plain, rtol=1e-9, atol=1e-11)
    assert (fast.quantiles.diff(dim=-1) >= 0).all() and fast.quantiles.shape == (b, 3, 3)


@pytest.mark.unit
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 50), v=st.integers(1, 6), p=st.sampled_from([0.0, 0.3]), checkpointed=st.booleans())
def test_groups_do_not_matter(rows, v, p, checkpointed):
    "Cut after any variable: the same sum (dropout aside, whose draws come per group)."
    torch.manual_seed(rows)
    net, e = VariableSelection(v, 8, dropout=p, checkpointed=checkpointed).double(), ScalarEmbedding(v, 8).double()
    x = torch.randn(1, rows, v, dtype=torch.float64)
    wide = x.repeat(2048 // rows + 1, 1, 1)                        # more than 1,024 rows: fewer variables per group
    with torch.no_grad(): one, many = net.eval()(x, [e]), net(wide, [e])
    for a, b in zip(one, many): torch.testing.assert_close(a, b[:1], rtol=1e-9, atol=1e-11)


VARIANTS = [dict(v=v, u=u, static=s, layers=n) for v, u, s, n in ((2, 1, 2, 1), (1, 0, 0, 1), (0, 1, 0, 1), (1, 1, 2, 1), (0, 0, 2, 1), (3, 0, 2, 2), (3, 2, 0, 2))]


@pytest.mark.integration
@pytest.mark.parametrize("p", (0.0, 0.1))
@pytest.mark.parametrize("c", VARIANTS, ids=str)
def test_every_parameter_is_alive(c, p):
    m, x = model(c["v"], c["u"], c["static"], dropout=p, lstm_layers=c["layers"]), batch(8, 6, c["v"], c["u"], c["static"])
    pinball(m(*x), torch.randn(8, 3)).backward()
    for n, q in m.named_parameters(): assert q.grad is not None and q.grad.isfinite().all() and q.grad.any(), n


@pytest.mark.integration
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("c", VARIANTS, ids=str)
def test_half_precision_is_finite(c, dtype):
    m, (past, known, static) = model(c["v"], c["u"], c["static"], lstm_layers=c["layers"]), batch(4, 6, c["v"], c["u"], c["static"])
    full = m(past, known, static)
    with torch.autocast("cpu", dtype): out = m(past, known, static); assert m.eval()(past, known, static).isfinite().all()
    pinball(out.float(), torch.randn(4, 3)).backward()
    assert (out - full).abs().max() < 0.1 and all(q.grad.isfinite().all() for q in m.parameters())
    with torch.autocast("cpu", dtype), torch.no_grad(): assert m.train()(past * 1e4, known, static).isfinite().all()


@pytest.mark.unit
def test_a_row_that_sees_nothing_is_zero_and_harmless():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        att, x = InterpretableAttention(8, 2).to(dtype), torch.randn(2, 5, 8, dtype=dtype, requires_grad=True)
        mask = torch.ones(2, 3, 5, dtype=torch.bool); mask[0, 1] = False
        out, a = att(x[:, 2:], x, mask)
        out.sum().backward()
        assert out[0, 1].eq(0).all() and a[0, 1].eq(0).all() and a[1].sum(-1).allclose(torch.ones(3, dtype=dtype), atol=1e-3)
        assert x.grad.isfinite().all() and all(p.grad.isfinite().all() and p.grad.any() for p in att.parameters())
    assert masked_softmax(torch.full((1, 3), 1e30), torch.tensor([True, True, False])).tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.unit
@pytest.mark.parametrize("t, k", ((0, 1), (0, 4), (1, 1), (60, 10)))
def test_every_step_sees_the_past_itself_and_nothing_later(t, k):
    m = decoder_mask(t, k)
    assert m.shape == (k, t + k) and m[:, :t].all() and m.any(-1).all()
    for i in range(k): assert m[i, t : t + i + 1].all() and not m[i, t + i + 1 :].any()


@pytest.mark.integration
def test_past_reaches_all_and_future_only_forward():
    m, (past, known, static) = model(dtype=torch.float64), batch(dtype=torch.float64)
    past.requires_grad_(); known.requires_grad_()
    out = m(past, known, static)
    for j in range(3):
        gp, gk = torch.autograd.grad(out[:, j].sum(), (past, known), retain_graph=True)
        assert gp.abs().amax((0, 2)).min() > 0                                  # no past bar is cut off
        moves = gk.abs().amax((0, 2))[6:] > 0
        assert moves.tolist() == [i <= j for i in range(3)]


@pytest.mark.integration
def test_accumulated_gradients_equal_the_large_batch_and_checkpointing_changes_nothing():
    m, x, y = model(dtype=torch.float64), batch(dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    def grads(net, parts):
        net.zero_grad(); torch.manual_seed(0)
        for i in range(0, 4, 4 // parts): pinball(net(*(a[i : i + 4 // parts] for a in x)), y[i : i + 4 // parts]).div(parts).backward()
        return [p.grad for p in net.parameters()]
    whole = [g.clone() for g in grads(m, 1)]
    torch.testing.assert_close(grads(m, 4), whole, rtol=1e-9, atol=1e-12)
    plain, saving = model(dtype=torch.float64, dropout=0.3), model(dtype=torch.float64, dropout=0.3, grad_checkpoint=True)
    torch.testing.assert_close(grads(saving, 1), grads(plain, 1), rtol=1e-12, atol=1e-14)


@pytest.mark.integration
def test_checkpointing_keeps_less():
    "Bytes kept for the backward pass, each storage once, the parameters aside."
    def kept(saving):
        m, size = model(v=17, hidden=32, heads=4, lookback=40, horizon=5, dropout=0.1, grad_checkpoint=saving), {}; own = {p.data_ptr() for p in m.parameters()}
        def note(a):
            if a.data_ptr() not in own: size[a.data_ptr()] = a.untyped_storage().nbytes()
            return a
        with torch.autograd.graph.saved_tensors_hooks(note, lambda a: a): out = m(*batch(8, 40, 17, k=5))
        out.sum().backward(); return sum(size.values())
    assert kept(True) < kept(False) / 2


@pytest.mark.unit
def test_unknown_categories_and_missing_static_are_index_zero():
    m, (past, known, _) = model(static=3), batch()
    same = lambda *index: [m(past, known, i) for i in index]
    zero, over, under, none, wide = same(torch.zeros(4, dtype=torch.int64), torch.full((4,), 4), torch.full((4,), -7), None, torch.zeros(4, 1, dtype=torch.int32))
    assert all(torch.equal(zero, a) for a in (over, under, none, wide)) and not torch.equal(zero, m(past, known, torch.full((4,), 3)))


@pytest.mark.unit
def test_dropout_rate_mean_and_evaluation():
    d, x = Dropout(0.25), torch.ones(1000, 1001)
    out = d(x)
    torch.testing.assert_close(out.unique(), torch.tensor([0.0, 4 / 3]))
    assert abs((out == 0).double().mean() - 0.25) < 4 * (0.25 * 0.75 / x.numel()) ** 0.5
    assert torch.equal(d.eval()(x), x) and Dropout(0.0).train()(x) is x
    assert abs(torch.corrcoef(torch.stack((out[:-1].flatten(), out[1:].flatten())))[0, 1]) < 4e-3
    m, x = model(dropout=0.5), batch()
    assert not torch.equal(m(*x), m(*x)) and torch.equal(m.eval()(*x), m(*x))


@pytest.mark.unit
def test_bad_shapes_are_named():
    m, (past, known, static) = model(), batch()
    for x, words in (((past[..., :1], known), "past must have shape"), ((past, None), "known must have shape .* got None"), ((past, known[:, 1:]), "known must have shape"),
                     ((past[:, :0], known[:, 6:]), "at least one step")):
        with pytest.raises(ValueError, match=words): m(*x, static)
    with pytest.raises(ValueError, match="static_values must have shape"): model(values=2)(past, known, static)


# ---- kept products: never stale

@pytest.mark.unit
@pytest.mark.parametrize("change", ("optimizer", "load", "half and back", "write", "data between modes"))
def test_kept_folds_follow_the_parameters(change):
    m, x = model(), batch()
    def evaluated():
        with torch.no_grad(): return m.eval()(*x)
    evaluated(); assert m.choose_past._kept is not None
    if change == "optimizer":
        opt = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
        pinball(m(*x), torch.zeros(4, 3)).backward(); opt.step()                # in evaluation mode: only the version tells
    elif change == "load": m.load_state_dict(model(seed=5).state_dict())
    elif change == "half and back": m.half().float()
    elif change == "write":
        with torch.no_grad(): m.choose_past.w2.mul_(1.5)
    else:
        m.train()
        for p in m.parameters(): p.data.mul_(1.1)
    out = evaluated()
    fresh = model(); fresh.load_state_dict(m.state_dict())
    with torch.no_grad(): assert torch.equal(out, fresh.eval()(*x))


@pytest.mark.unit
def test_kept_folds_stay_private():
    m, x = model(), batch()
    with torch.inference_mode(): out = m.eval()(*x)
    other = copy.deepcopy(m)
    with torch.no_grad():
        other.choose_past.w2.mul_(2); assert not torch.equal(other(*x), out) and torch.equal(m(*x), out)
        assert torch.equal(pickle.loads(pickle.dumps(m))(*x), out)
    assert m(*x).requires_grad                                                  # with gradients nothing kept is used
    zero = {n: torch.zeros_like(p) for n, p in m.named_parameters()}
    with torch.no_grad(): assert torch.func.functional_call(m, zero, x).eq(0).all() and torch.equal(m(*x), out)
    assert not any("kept" in k for k in m.state_dict())


@pytest.mark.unit
def test_decay_groups():
    m = model(values=2); names = {id(p): n for n, p in m.named_parameters()}
    decay, free = ([names[id(p)] for p in g["params"]] for g in param_groups(m, 0.1))
    ends = ("bias", "b1", "b2", "b3", "gain", "shift", "common", "empty")
    assert all(n.rsplit(".", 1)[-1].startswith(ends) or "norm" in n for n in free) and not any(n.endswith(ends) or "norm" in n for n in decay)
    assert {"choose_past.w1", "choose_past.w2", "choose_past.w3"} <= set(decay)


# ---- devices and checkpoints

@pytest.mark.device
def test_built_on_the_default_device_and_silent_about_it():
    with torch.device("meta"): m = model(values=1); past, known, static = batch()
    assert all(p.is_meta for p in (*m.parameters(), *m.buffers()))
    values = torch.empty(4, 1, device="meta")
    out = m(past.to("meta"), known.to("meta"), static.to("meta"), values)
    assert out.is_meta and out.shape == (4, 3, 3)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in m.parameters())


@pytest.mark.device
def test_nothing_leaves_a_pretend_gpu():
    from foxhunt.hardware.audit import Workload, audit
    put = lambda b, device: tuple(a.to(device) for a in (*batch(b), torch.zeros(b, 3)))
    result = audit(Workload("tft", lambda: TFT(dataclasses.replace(CFG, dropout=0.1), 2, 1, 2), lambda m: torch.optim.AdamW(param_groups(m, 0.01), lr=1e-3), put,
                            lambda m, x: pinball_on_device(m(*x[:3]), x[3]), lambda m, x: m(*x[:3]), batch_size=4))
    assert result.ok and not result.syncs, result


@pytest.mark.checkpoint
def test_state_loads_with_weights_only_and_gives_the_same_forecast():
    m, x = model(values=1), (*batch(), torch.ones(4, 1))
    with torch.no_grad(): out = m.eval()(*x)                                    # folds are kept by now
    file = io.BytesIO(); torch.save(m.state_dict(), file); file.seek(0)
    again = model(seed=9, values=1); again.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"), strict=True)
    with torch.no_grad(): assert torch.equal(again.eval()(*x), out)


@pytest.mark.checkpoint
def test_same_seed_same_weights_and_training_goes_on_as_if_never_stopped():
    x, y = batch(), torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    def step(m, opt): opt.zero_grad(); pinball(m(*x), y).backward(); opt.step()
    m = model(); opt = torch.optim.AdamW(param_groups(m, 0.01), lr=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(m.parameters(), model().parameters()))
    for _ in range(2): step(m, opt)
    saved = copy.deepcopy((m.state_dict(), opt.state_dict()))
    for _ in range(2): step(m, opt)
    other = model(seed=7); other.load_state_dict(saved[0]); opt2 = torch.optim.AdamW(param_groups(other, 0.01), lr=1e-2); opt2.load_state_dict(saved[1])
    for _ in range(2): step(other, opt2)
    assert all(torch.equal(a, b) for a, b in zip(m.parameters(), other.parameters()))


# `python tests/test_models_tft.py` writes the golden tensors anew
if __name__ == "__main__": save_file(second_implementation()[0], GOLDEN)
