"""Initialisations of iha: exact where its docstring says exact, not exact where it says so, never stuck."""

import itertools

import pytest
import torch
from oracles.compare import draw, sides

import headloom as hl
from headloom.core.errors import HeadloomError

SIZES = {"hidden_size": 13, "num_heads": 4, "head_dim": 6}
EXACT = [
    {"init": "carrier", "order": order, "phase": "token", "collapse": collapse}
    for order, collapse in itertools.product(["virtual", "token"], ["full", "head"])
] + [{"init": "identity", "order": "token", "phase": "token", "collapse": collapse} for collapse in ("full", "head")]
MODES = {
    "causal": {},
    "encoder": {"causal": False},
    "window": {"window": 2},
    "window3": {"window": 3},
    "encoder_window": {"causal": False, "window": 2},
    "norm": {"qk_norm": "head"},
    "no_rotary": {"rope_theta": None},
    "value_dim": {"value_dim": 5, "qkv_bias": True, "out_bias": True},
}


def pair(kv, options, mode, pseudo=3):
    """A base and an iha module with the base's weights and its own fresh mixes."""
    torch.manual_seed(3)
    base = hl.attention("mha" if kv == 4 else "gqa", **SIZES, num_kv_heads=kv, **mode).double().eval()
    iha = hl.attention("iha", **SIZES, num_kv_heads=kv, pseudo_heads=pseudo, **{"init_std": 0.5, **options}, **mode)
    iha = iha.double().eval()
    iha.reset_heads()  # drawn and centred in float64: in float32 the zero sums hold to 1e-8
    missing = iha.load_state_dict(base.state_dict(), strict=False)
    assert not missing.unexpected_keys and all("mix" in name for name in missing.missing_keys)
    return base, iha


@pytest.mark.parametrize("kind", ["plain", "left", "documents", "restart"])
@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("options", EXACT, ids=["-".join(map(str, o.values())) for o in EXACT])
def test_exact_inits_equal_the_base(options, mode, kv, kind):
    base, iha = pair(kv, options, mode)
    x = draw(2, 5, 13)
    assert (iha(x, **sides(kind)) - base(x, **sides(kind))).abs().max() < 1e-12


@pytest.mark.parametrize("pseudo", [1, 2, 5])
@pytest.mark.parametrize("options", EXACT, ids=["-".join(map(str, o.values())) for o in EXACT])
def test_exact_for_every_number_of_pseudo_heads(options, pseudo):
    base, iha = pair(2, options, {}, pseudo)
    x = draw(2, 7, 13)
    assert (iha(x) - base(x)).abs().max() < 1e-12


@pytest.mark.parametrize("options", EXACT, ids=["-".join(map(str, o.values())) for o in EXACT])
def test_effective_map_of_an_exact_init_is_the_bases(options):
    """M[h, m] is the base's map at m = h // (H/G), zero elsewhere, and its rows sum to 1."""
    base, iha = pair(2, options, {})
    x = draw(1, 5, 13)
    effective, wanted = iha.maps(x).effective[0], base.maps(x).patterns[0]
    for h, m in itertools.product(range(4), range(2)):
        expected = wanted[h] if m == h // 2 else torch.zeros_like(wanted[h])
        assert (effective[h, m] - expected).abs().max() < 1e-12
    assert (effective.sum((1, 3)) - 1).abs().max() < 1e-12


@pytest.mark.parametrize("order", ["virtual", "token"])
def test_virtual_phase_is_not_exact(order):
    """Pseudo-tokens at n P + p turn by P (n - n') + p - p': no mix of heads undoes it for P > 1; P = 1 is exact."""
    options = {"init": "identity", "order": order, "phase": "virtual"}
    base, iha = pair(4, options, {}, 2)
    x = draw(2, 7, 13)
    assert (iha(x) - base(x)).abs().max() > 1e-2
    base, iha = pair(4, options, {}, 1)
    assert (iha(x) - base(x)).abs().max() < 1e-12


def test_identity_in_virtual_order_is_not_exact():
    base, iha = pair(4, {"init": "identity", "order": "virtual", "phase": "token"}, {}, 2)
    x = draw(2, 7, 13)
    assert (iha(x) - base(x)).abs().max() > 1e-3


def test_carrier_values():
    """As the docstring of iha says: last pseudo-head identity, others pick head (h+1+p) mod H, e of zero sum over p."""
    iha = hl.attention("iha", **SIZES, num_kv_heads=2, pseudo_heads=3, init="carrier", order="token", phase="token")
    q, k, v, o = (getattr(iha, f"{n}_mix").weight.detach() for n in ("q", "k", "v", "out"))
    for h, p, m in itertools.product(range(4), range(3), range(4)):
        assert q[h, p, m] == float(m == (h if p == 2 else (h + 1 + p) % 4))
        assert o[h, m, p] == float(m == h and p == 2)
    identity = torch.zeros(4, 3, 2)
    for h, p in itertools.product(range(4), range(3)):
        identity[h, p, h // 2] = 1
    assert torch.equal(k, identity)
    e = v - identity
    assert e.sum(1).abs().max() < 1e-6
    assert 0.1 < e.std() < 0.5 and (e != 0).all()


def test_identity_values():
    """q_mix and k_mix identity for every p; v_mix - identity and out_mix - identity/P sum to zero over p, none zero."""
    iha = hl.attention("iha", **SIZES, num_kv_heads=2, pseudo_heads=3, init="identity", order="token", phase="token")
    q, k, v, o = (getattr(iha, f"{n}_mix").weight.detach() for n in ("q", "k", "v", "out"))
    assert torch.equal(q, torch.eye(4)[:, None].expand(4, 3, 4))
    to_kv = torch.repeat_interleave(torch.eye(2), 2, 0)[:, None].expand(4, 3, 2)
    assert torch.equal(k, to_kv)
    e, c = v - to_kv, o - torch.eye(4)[:, :, None] / 3
    for spread, axis in ((e, 1), (c, 2)):
        assert spread.sum(axis).abs().max() < 1e-6
        assert (spread != 0).all() and 0.1 < spread.std() < 0.5


@pytest.mark.parametrize("init_std", [0.0, 0.02, 0.3, 0.4])
def test_head_collapse_identity_needs_negative_weights(init_std):
    """collapse="head" with all weights positive only averages: init_std below 1/P is refused or made up for."""
    options = {"pseudo_heads": 3, "init": "identity", "collapse": "head", "init_std": init_std}
    try:
        built = [hl.attention("iha", **SIZES, **options).out_mix.weight.detach() for _ in range(50)]
    except HeadloomError as error:
        assert init_std < 1 / 3 and "init_std" in str(error) and str(init_std) in str(error)
        return
    weights = torch.stack(built)
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    assert (weights < 0).float().mean() > 0.05


def test_paired_normal_init_is_small_noise():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 16, "head_dim": 2, "pseudo_heads": 5}
    iha = hl.attention("iha", **sizes, interaction="paired", phase="token", collapse="mean", init="normal")
    for name in "qkv":
        mix = getattr(iha, f"{name}_mix").weight
        assert abs(float(mix.detach().std()) - 0.02) < 0.003 and abs(float(mix.detach().mean())) < 0.003


def test_paired_identity_equals_the_base():
    """With k and q identity and e of zero sum, the mean over pairs is the base (P equal patterns)."""
    base, iha = pair(2, {"init": "identity", "interaction": "paired", "phase": "token", "collapse": "mean"}, {})
    x = draw(2, 5, 13)
    assert (iha(x) - base(x)).abs().max() < 1e-12


def deviations(iha, base, steps=10):
    """Share of each mix's update that differs between pseudo-heads, after AdamW steps towards another teacher."""
    before = {n: p.detach().clone() for n, p in iha.named_parameters()}
    torch.manual_seed(11)
    teacher = hl.attention("mha", **SIZES).double()
    optimizer = torch.optim.AdamW(iha.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps):
        x = draw(3, 7, 13, seed=100 + step)
        loss = (iha(x) - teacher(x).detach()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    out = {}
    for name in ("q_mix.weight", "k_mix.weight"):
        update = dict(iha.named_parameters())[name].detach() - before[name]
        out[name] = float((update - update.mean(1, keepdim=True)).norm() / update.norm())
    return out


@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize("options", EXACT, ids=["-".join(map(str, o.values())) for o in EXACT])
def test_pseudo_heads_come_apart(options, kv):
    base, iha = pair(kv, options, {})
    for name, share in deviations(iha, base).items():
        assert share > 1e-3, f"{name}: pseudo-heads move together ({share:.1e})"


def test_paired_identity_comes_apart():
    base, iha = pair(4, {"init": "identity", "interaction": "paired", "phase": "token", "collapse": "mean"}, {})
    for name, share in deviations(iha, base).items():
        assert share > 1e-3, f"{name}: pairs move together ({share:.1e})"


def test_mixes_stay_float32_and_exact_in_half_precision():
    """Mixes keep float32 under .to(bfloat16): rounding them would lose the zero sums."""
    _base, iha = pair(4, EXACT[0], {})
    iha = iha.float().to(torch.bfloat16)
    for name in ("q_mix", "k_mix", "v_mix", "out_mix"):
        assert getattr(iha, name).weight.dtype == torch.float32
    assert iha.q_proj.weight.dtype == torch.bfloat16
    assert (iha.v_mix.weight.sum(1) - torch.eye(4) * 3).abs().max() < 1e-6
