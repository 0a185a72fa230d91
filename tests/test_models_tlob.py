"TLOB and MLPLOB: the published function, safe numbers, live = batch."
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foxhunt.core import generator
from foxhunt.models.mlp import param_groups
from foxhunt.models.tlob import AttentionLayer, BiN, BookStream, FoldedAttention, MLPLOB, TLOB, positions, reference_weights, standardize
from foxhunt.params import TLOB as Config

CFG = Config(lookback=16, hidden=8, n_layers=2, dropout=0.0)
BOTH = pytest.mark.parametrize("kind", (TLOB, MLPLOB))


def books(b=3, t=16, v=6, seed=0): return torch.randn(b, t, v, generator=generator(seed, "books"))


def build(kind, cfg=CFG, features=6):
    torch.manual_seed(0)
    model = kind(cfg, features=features)
    with torch.no_grad():
        for p in model.parameters(): p.add_(0.1 * torch.randn(p.shape, generator=generator(1, "weights")))   # no weight at its special start
    return model


# the published function, written a second time with torch's own attention module

class PublishedLayer(nn.Module):
    def __init__(self, width, heads, out):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.ModuleDict({k: nn.Linear(width, width * heads) for k in "qkv"})
        self.attention = nn.MultiheadAttention(width * heads, heads, batch_first=True)
        self.mlp = nn.ModuleDict(dict(layer_norm=nn.LayerNorm(out), fc=nn.Linear(width, 4 * width), fc2=nn.Linear(4 * width, out)))
        self.w0 = nn.Linear(width * heads, width)

    def forward(self, x):
        seen, _ = self.attention(*(self.qkv[k](x) for k in "qkv"))
        y = self.norm(self.w0(seen) + x)
        z = self.mlp["fc2"](F.gelu(self.mlp["fc"](y)))
        z = F.gelu(self.mlp["layer_norm"](z + y if z.shape == y.shape else z))
        return z + x if z.shape == x.shape else z


class PublishedBiN(nn.Module):
    def __init__(self, d, t):
        super().__init__()
        self.B1, self.l1, self.B2, self.l2 = (nn.Parameter(torch.randn(n, 1)) for n in (t, t, d, d))
        self.y1, self.y2 = nn.Parameter(torch.tensor([0.4])), nn.Parameter(torch.tensor([0.7]))

    def forward(self, x):   # (b, d, t)
        over_time = self.l2 * ((x - x.mean(2, keepdim=True)) / x.std(2, keepdim=True)) + self.B2
        over_features = self.l1.T * ((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)) + self.B1.T
        return self.y1 * over_features + self.y2 * over_time


class Published(nn.Module):
    def __init__(self, d, n, t, v, heads):
        super().__init__()
        self.order_type_embedder, self.norm_layer, self.emb_layer = nn.Embedding(3, 1), PublishedBiN(v, t), nn.Linear(v, d)
        self.layers = nn.ModuleList()
        for i in range(n):
            for w in (d, t): self.layers.append(PublishedLayer(w, heads, w // 4 if i == n - 1 else w))
        total, self.final_layers = (d // 4) * (t // 4), nn.ModuleList()
        while total > 128: self.final_layers += [nn.Linear(total, total // 4), nn.GELU()]; total //= 4
        self.final_layers.append(nn.Linear(total, 3))

    def forward(self, x, pos):
        x = self.emb_layer(self.norm_layer(x.mT).mT) + pos
        for layer in self.layers: x = layer(x).mT
        x = x.mT.flatten(1)                       # 'b s f -> b (f s)'
        for layer in self.final_layers: x = layer(x)
        return x


@pytest.mark.integration
@pytest.mark.parametrize("heads", (1, 2))
def test_it_is_the_published_function(heads):
    torch.manual_seed(0); theirs = Published(8, 2, 16, 6, heads).eval()
    with torch.no_grad():
        for p in theirs.parameters(): p.add_(0.05 * torch.randn_like(p))
    ours = TLOB(Config(lookback=16, hidden=8, n_layers=2, heads=heads, dropout=0.0), features=6).eval()
    ours.load_state_dict(reference_weights(theirs.state_dict()))
    pos = torch.zeros(16, 8); scale = 10000.0 ** (2 * torch.arange(4) / 8); pos[:, 0::2], pos[:, 1::2] = torch.sin(torch.arange(16)[:, None] / scale), torch.cos(torch.arange(16)[:, None] / scale)
    assert torch.allclose(ours(books()), theirs(books(), pos), atol=1e-4)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.unit
def test_reference_size():
    assert sum(p.numel() for p in TLOB().parameters()) == sum(p.numel() for p in Published(40, 4, 128, 40, 1).parameters()) == 1_135_974


@pytest.mark.integration
def test_published_mixer_weights_load():
    ours = build(MLPLOB); state = {}
    for key, x in ours.state_dict().items():        # the names of the authors' MLPLOB
        if key.startswith("emb_layer"): state[key.replace("emb_layer", "first_layer")] = state[key.replace("emb_layer", "layers.0")] = x
        elif key.startswith("layers."): _, i, rest = key.split(".", 2); state[f"layers.{int(i) + 2}.{rest}"] = x
        elif key == "order_type": state["order_type_embedder.weight"] = x[:, None]
        else: state[{"norm_layer.time_scale": "norm_layer.l1", "norm_layer.time_shift": "norm_layer.B1", "norm_layer.feature_scale": "norm_layer.l2", "norm_layer.feature_shift": "norm_layer.B2"}.get(key, key)] = x
    again = MLPLOB(CFG, features=6); again.load_state_dict(reference_weights(state))
    with torch.no_grad(): ours.order_type.zero_()
    assert torch.equal(again(books()), ours(books()))


# safe numbers

@pytest.mark.unit
def test_normalisation_is_safe():
    x = 16000 + books(2, 12, 5); x[..., 1] = 3.0; x[0] = 7.0
    norm = BiN(12, 5); y = norm(x.requires_grad_()); y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all() and all(torch.isfinite(p.grad).all() for p in norm.parameters())
    assert torch.isfinite(standardize(torch.ones(2, 1, 5), 1)).all()
    z = standardize(books(4, 50, 6), 1)
    assert torch.allclose(z.mean(1), torch.zeros(4, 6), atol=1e-5) and torch.allclose(z.std(1), torch.ones(4, 6), atol=1e-4)


@pytest.mark.unit
def test_mixing_weights_stay_positive_and_keep_their_parameter():
    norm = BiN(16, 6); opt = torch.optim.SGD(norm.parameters(), lr=0.0); before = id(norm.y1)
    with torch.no_grad(): norm.y1.fill_(-1.0); norm.y2.fill_(-5.0)
    floor = norm(books())
    with torch.no_grad(): norm.y1.fill_(0.01); norm.y2.fill_(0.01)
    assert torch.equal(floor, norm(books())) and id(norm.y1) == before and any(p is norm.y1 for p in opt.param_groups[0]["params"])


@BOTH
@pytest.mark.integration
@pytest.mark.parametrize("cast", (None, torch.bfloat16, torch.float16))
def test_every_gradient_is_finite_and_alive(kind, cast):
    model = build(kind)
    for b in (1, 3):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", cast, enabled=cast is not None): logits = model(books(b), torch.randint(0, 3, (b, 16), generator=generator(b, "kind")))
        F.cross_entropy(logits.float(), torch.arange(b) % 3).backward()
        for n, p in model.named_parameters():
            assert p.grad is not None and torch.isfinite(p.grad).all(), n
            if not n.endswith(("k.bias", "in_k.bias")): assert p.grad.abs().max() > 0, n    # softmax is blind to a bias of all keys
        assert kind is MLPLOB or cast or all(p.grad.abs().max() < 1e-6 for n, p in model.named_parameters() if n.endswith(("k.bias", "in_k.bias")))
    model.zero_grad(); model(books()).sum().backward()
    assert model.order_type.grad.abs().min() > 0                                            # unknown types: their mean, alive too


@BOTH
@pytest.mark.integration
def test_batch_of_one_is_a_row(kind):
    model = build(kind).eval(); y = model(books(5))
    for i in range(5): assert torch.allclose(model(books(5)[i : i + 1]), y[i : i + 1], atol=1e-5)
    assert y.shape == (5, 3) and not torch.allclose(y.exp().sum(-1), torch.ones(5))          # logits, not probabilities


@BOTH
@pytest.mark.unit
def test_bad_windows_and_sizes_are_named(kind):
    with pytest.raises(ValueError, match=r"expected windows \(b, 16, 6\), got \(2, 15, 6\)"): build(kind)(books(2, 15))
    with pytest.raises(ValueError, match="at least 4"): kind(Config(lookback=3, hidden=8))
    with pytest.raises(ValueError, match="classes at least 2"): kind(CFG, classes=1)
    with pytest.raises(ValueError, match="even width"): positions(8, 5)


@BOTH
@pytest.mark.unit
def test_no_decay_for_vectors_and_normalisation(kind):
    model = build(kind); free = {id(p) for g in param_groups(model, 0.1) if g["weight_decay"] == 0 for p in g["params"]}
    for n, p in model.named_parameters(): assert (id(p) in free) == (p.ndim < 2 or "norm_layer" in n), n


@BOTH
@pytest.mark.integration
@pytest.mark.parametrize("cast", (None, torch.bfloat16))
def test_checkpointing_changes_no_gradient_and_keeps_less(kind, cast):
    kept, grads = [], []
    for saving in (False, True):
        model, seen = build(kind, Config(lookback=16, hidden=8, n_layers=2, dropout=0.3, grad_checkpoint=saving)).train(), []
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t), torch.autocast("cpu", cast, enabled=cast is not None):
            loss = F.cross_entropy(model(books()).float(), torch.arange(3))
        loss.backward(); grads.append([p.grad for p in model.parameters()]); kept.append(sum(seen))
    assert all(torch.equal(a, b) for a, b in zip(*grads)) and kept[1] < kept[0] / 2
    with torch.no_grad(): assert torch.isfinite(model.eval()(books())).all()


# live

@BOTH
@pytest.mark.integration
@pytest.mark.parametrize("heads", (1, 2))
def test_live_is_batch(kind, heads):
    model = build(kind, Config(lookback=16, hidden=8, n_layers=2, heads=heads, dropout=0.3)).train(); feed = books(1, 70)[0]
    with torch.no_grad():
        g = torch.Generator().manual_seed(1)
        for w in model.parameters(): w.add_(torch.randn(w.shape, generator=g), alpha=0.2)    # far from its start, where all windows look alike
    stream = BookStream(model); decisions = [stream.push(x) for x in feed]
    with torch.no_grad(): y = model.eval()(feed.unfold(0, 16, 1).mT).softmax(-1)
    assert [d is None for d in decisions] == [True] * 15 + [False] * 55
    assert (y.amax(0) - y.amin(0)).max() > 0.05                                        # the bound below tells one window from another
    for d, p in zip(decisions[15:], y):
        assert torch.allclose(torch.tensor(d.probability), p, atol=1e-5, rtol=0) and d.seconds > 0 and math.isclose(sum(d.probability), 1, abs_tol=1e-4)
        assert d.probability[d.label] == max(d.probability)
    stream.reset(); assert stream.push(feed[0]) is None
    assert not any(isinstance(m, FoldedAttention) for m in model.modules())                  # the trained model is left as it was


@BOTH
@pytest.mark.unit
@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_a_refused_snapshot_leaves_no_trace(kind, value):
    model, feed, bad = build(kind), books(1, 60)[0], books(1, 1)[0, 0]; bad[3] = value
    clean, stream = BookStream(model), BookStream(model)
    for i, x in enumerate(feed):
        if i % 7 == 0:                                                                       # while the window fills, and after
            with pytest.raises(ValueError, match=r"^column 3 of the snapshot is (nan|inf|-inf): skip this event, or reset\(\) if the feed broke$"): stream.push(bad)
        a, b = clean.push(x), stream.push(x)
        assert (a is None) == (b is None) == (i < 15) and (a is None or a[:2] == b[:2])


@BOTH
@pytest.mark.integration
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_raw_snapshots_are_the_scaled_rows(kind, dtype):
    model, scaled = build(kind).eval(), books(1, 60)[0]
    center, scale = torch.tensor([16000.0, 20] * 3), torch.tensor([40.0, 8] * 3)
    raw = (scaled.double() * scale + center).to(dtype)
    same, bare = BookStream(model), BookStream(model)
    want = [same.push(x) for x in scaled]; [bare.push(x) for x in raw]
    for given in ((center, scale), (center.tolist(), scale.tolist())):                       # as a checkpoint's description holds them
        stream = BookStream(model, *given); found = [stream.push(x) for x in raw]
        assert torch.allclose(stream.ring, same.ring, atol=1e-3 if dtype == torch.float32 else 1e-6) and not torch.allclose(bare.ring, same.ring, atol=1.0)
        assert torch.allclose(torch.tensor([d.probability for d in found[15:]]), torch.tensor([d.probability for d in want[15:]]), atol=1e-5)
    bad = raw[0].clone(); bad[0] = math.nan
    with pytest.raises(ValueError, match="column 0 of the snapshot is nan"): stream.push(bad)


@pytest.mark.unit
def test_a_scaler_that_cannot_be_used_is_named():
    model, one = build(TLOB), torch.ones(6)
    for center, scale, says in ((one, None, "belong together"), (None, one, "belong together"), (one[:5], one, "finite \\(6,\\)"), (one, 0 * one, "scale positive"), (one * math.nan, one, "must be finite")):
        with pytest.raises(ValueError, match=says): BookStream(model, center, scale)


@pytest.mark.unit
def test_folding_keeps_the_function():
    torch.manual_seed(0)
    for heads, out in ((1, 8), (3, 2)):
        layer = AttentionLayer(8, heads, out).eval(); x = books(2, 5, 8)
        assert torch.allclose(FoldedAttention(layer)(x), layer(x), atol=1e-5)


# devices and checkpoints

@BOTH
@pytest.mark.device
def test_builds_and_runs_on_the_default_device(kind):
    with torch.device("meta"): model = kind(CFG, features=6); x = torch.empty(2, 16, 6)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    logits = model(x); logits.sum().backward()
    assert {logits.device.type, *(p.grad.device.type for p in model.parameters())} == {"meta"}


@BOTH
@pytest.mark.checkpoint
def test_safetensors_round_trip(kind, tmp_path):
    from safetensors.torch import load_file, save_file
    model, again = build(kind).eval(), kind(CFG, features=6).eval()
    save_file(model.state_dict(), tmp_path / "m.safetensors"); again.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert torch.equal(model(books()), again(books())) and "pos_encoder" not in model.state_dict()
    torch.save(model.state_dict(), tmp_path / "m.pt"); torch.load(tmp_path / "m.pt", weights_only=True)


@BOTH
@pytest.mark.gpu
@pytest.mark.device
def test_cuda_is_cpu(kind):
    model = build(kind).eval(); y = model(books()); model.cuda()
    assert torch.allclose(model(books().cuda()).cpu(), y, atol=1e-3)
    assert BookStream(model).ring.is_cuda
