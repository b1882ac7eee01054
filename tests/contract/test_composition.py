"""IHA and SAS over every base: oracles, exact inits, caches, generation; parameters matched as TPA publishes them."""

import itertools

import pytest
import torch
from oracles import ORACLES
from oracles.common import settings
from oracles.compare import assert_close, assert_matches, assert_rounds, draw, randomise, sides

import headloom as hl
from headloom.contract.bases import BASES
from headloom.core.errors import HeadloomError
from headloom.ops.mixing import mix_heads

SIZES = {"hidden_size": 11, "num_heads": 3, "head_dim": 6}
BASE = {
    "mla": {"base": "mla", "latent_dim": 7, "rotary_dim": 4, "plain_dim": 5, "q_rank": 8},
    "tpa": {"base": "tpa", "q_rank": 3, "k_rank": 2, "v_rank": 3},
    "kv_only": {"base": "tpa", "kv_only": True},
    "direct": {"base": "mla"},
}
IHA = {"pseudo_heads": 2}
SAS = {"simulated_heads": 6, "simulated_width": 12, "kernel_size": 3}
IHA_OPTIONS = [
    {"order": order, "phase": phase, "collapse": collapse}
    for order, phase, collapse in itertools.product(["virtual", "token"], ["virtual", "token"], ["full", "head"])
] + [
    {"interaction": "paired", "phase": "token", "collapse": "mean"},
    {"cache": "expanded"},
    {"rope_theta": None},
    {"value_dim": 4, "window": 2},
    {"causal": False, "softcap": 0.8},
    {"projection": "bit"},
]
SAS_OPTIONS = [
    {"order": order, "aggregate": aggregate}
    for order, aggregate in itertools.product(["head_first", "feature_first"], ["mean", "nonlinear", "full"])
] + [
    {"cache": "base"},
    {"rope_theta": None},
    {"value_dim": 4, "window": 2},
    {"causal": False, "softcap": 0.8},
    {"simulated_heads": None, "simulated_width": None},
    {"qkv_bias": True, "scale": 0.3},
]


def build(name, *options, spread=0.4):
    merged = dict(SIZES)
    for part in options:
        merged |= part
    module = randomise(hl.attention(name, **merged).double(), 0, spread).eval()
    return module, settings(name, **merged)


@pytest.mark.parametrize("base", BASE.values(), ids=BASE)
@pytest.mark.parametrize("options", IHA_OPTIONS, ids=str)
def test_iha_equals_the_oracle(options, base):
    module, s = build("iha", IHA, base, options)
    assert_matches(module, ORACLES["iha"], s, draw(2, 5, 11), **sides("padded_documents"))


@pytest.mark.parametrize("base", BASE.values(), ids=BASE)
@pytest.mark.parametrize("options", SAS_OPTIONS, ids=str)
def test_sas_equals_the_oracle(options, base):
    module, s = build("sas", SAS, base, options)
    assert_matches(module, ORACLES["sas"], s, draw(2, 5, 11), **sides("left"))


def test_sas_sizes_follow_the_base():
    """J is counted from the base's query width, K_r + K_n over mla, and may not be below it."""
    assert hl.attention("sas", **SIZES, **BASE["mla"]).config.simulated_width == 12
    assert hl.attention("sas", **SIZES, **BASE["tpa"]).config.simulated_width == 8
    with pytest.raises(HeadloomError, match="simulated_width must be even and at least 9"):
        hl.attention("sas", **SIZES, **BASE["mla"], simulated_width=8)


# Exact inits: a fresh composition with the base's weights computes what the base does.
EXACT = [
    ("iha", {**IHA, "init": "carrier", "order": "virtual", "phase": "token"}),
    ("iha", {**IHA, "init": "carrier", "order": "token", "phase": "token", "collapse": "head", "pseudo_heads": 3}),
    ("iha", {**IHA, "init": "identity", "order": "token", "phase": "token"}),
    ("iha", {**IHA, "init": "identity", "interaction": "paired"}),
    ("sas", {**SAS, "init": "identity"}),
    ("sas", {**SAS, "init": "identity", "order": "feature_first", "cache": "base"}),
    ("sas", {**SAS, "init": "identity", "aggregate": "full"}),
]
MODES = [{}, {"causal": False}, {"window": 2}, {"rope_theta": None}, {"value_dim": 4}, {"scale": 0.7}]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("name", "options"), EXACT, ids=str)
@pytest.mark.parametrize("base", BASE.values(), ids=BASE)
def test_exact_inits_are_exact(base, name, options, mode):
    plain, _ = build(base["base"], base, mode)
    torch.manual_seed(1)
    made = hl.attention(name, **SIZES, **base, **options, **mode).double().eval()
    assert made.config.exact
    made.reset_heads()
    weights = plain.state_dict()
    if options.get("aggregate") == "full":
        full = torch.zeros_like(made.o_proj.weight)
        full[:, : weights["o_proj.weight"].shape[1]] = weights["o_proj.weight"]
        weights = {**weights, "o_proj.weight": full}
    missing = made.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    if options.get("aggregate") == "full":
        made.reset_heads()
    x = draw(2, 5, 11)
    for kind in ("plain", "padded_documents"):
        assert_close(made(x, **sides(kind)).detach(), plain(x, **sides(kind)).detach(), "exact", 1e-12)
    cache = hl.Cache()
    if made.config.causal:
        parts = torch.cat([made(part, cache=cache) for part in x.split([3, 1, 1], 1)], 1)
        assert_close(parts.detach(), plain(x).detach(), "exact and cached", 1e-12)


@pytest.mark.parametrize("base", ["mla", "tpa"])
def test_virtual_phase_is_not_exact_over_rotary(base):
    module = hl.attention("iha", **SIZES, **BASE[base], pseudo_heads=2, init="identity", order="token", phase="virtual")
    assert not module.config.exact


@pytest.mark.parametrize("virtual", [False, True])
def test_the_extra_turn_is_on_the_rotary_features_alone(virtual):
    """Without rotary parts in q and k the phase means nothing over mla; with them it does."""
    found = []
    for phase in ("virtual", "token"):
        module, _ = build("iha", {"pseudo_heads": 3, "phase": phase}, BASE["direct"])
        c = module.config
        if not virtual:
            with torch.no_grad():
                module.kv_down.weight[c.latent_dim :].zero_()
                module.q_proj.weight.view(3, c.query_dim, 11)[:, : c.rotary_dim].zero_()
        found.append(module(draw(1, 5, 11)).detach())
    difference = float((found[0] - found[1]).abs().max())
    assert difference > 1e-3 if virtual else difference < 1e-13


@pytest.mark.parametrize("base", ["gqa", "mla", "tpa"])
def test_mixed_heads_are_mixes_of_the_heads(base):
    """`Base.mixed` is expand, then mix, whatever it mixes inside."""
    module, _ = build("iha", IHA, BASE.get(base, {}))
    _, slots = module.project(draw(2, 5, 11))
    k_weight, v_weight = draw(2, 7, 3)
    found = BASES[base].mixed(module, slots, k_weight, v_weight)
    for ours, weight, heads in zip(found, (k_weight, v_weight), BASES[base].expand(module, slots), strict=True):
        assert_close(ours.detach(), mix_heads(weight, heads).detach(), "mixed", 1e-12)


def elements(name, *options):
    return hl.attention(name, **{**SIZES, **{k: v for part in options for k, v in part.items()}}).cache_slots()


def count(slots):
    return sum(heads * width for heads, width in slots.values())


def test_cache_elements():
    """iha: C + K_r over mla, (R_k + R_v) (H + K) over tpa; expanded P H (K + V) at the base's widths."""
    assert count(elements("iha", IHA, BASE["mla"])) == 7 + 4
    assert count(elements("iha", IHA, BASE["tpa"])) == (2 + 3) * (3 + 6)
    assert count(elements("iha", IHA, BASE["mla"], {"cache": "expanded"})) == 2 * 3 * (9 + 6)
    assert count(elements("sas", SAS, BASE["mla"])) == 6 * (12 + 6)
    assert count(elements("sas", SAS, BASE["mla"], {"cache": "base"})) == 7 + 4
    assert count(elements("sas", SAS, BASE["tpa"], {"cache": "base"})) == (2 + 3) * (3 + 6)


def test_iha_over_factors_mixes_the_factors():
    """Expanding k and v costs the mix of R numbers a head and R products, not the mix of K numbers."""
    D, H, P, K, R, T = 64, 4, 3, 16, 2, 8
    cost = hl.cost("iha", hidden_size=D, num_heads=H, pseudo_heads=P, base="tpa", k_rank=R, v_rank=R, tokens=T)
    expand = next(part for part in cost.parts if part.step == "expand")
    assert expand.flops_full == 2 * T * 2 * (P * H * H * R + P * H * R * K)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "options"), [("iha", IHA), ("sas", {"simulated_heads": 6, "kernel_size": 1})])
@pytest.mark.parametrize("base", ["mla", "tpa"])
def test_large_logits_stay_finite(base, name, options, dtype):
    module = hl.attention(name, hidden_size=24, num_heads=3, base=base, **options).to(dtype).eval()
    x = torch.randn(2, 6, 24, dtype=dtype)
    ready = module._prepare(x)
    k = module.expand(ready.handle)[0]
    peak = (ready.q.float() @ k.float().transpose(-1, -2)).abs().max() * module._scale(ready.q)
    grow = module.q_mix if name == "iha" else module.feature_q[0]
    with torch.no_grad():
        grow.weight.mul_(1e3 / peak)
    x.requires_grad_()
    out = module(x)
    out.float().pow(2).sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("iha", {"base": "mfa"}, ["mfa", "gqa", "mla", "tpa"]),
        ("gqa", {"base": "tpa"}, ["tpa", "gqa"]),
        ("mha", {"base": "mla"}, ["mla", "mha"]),
        ("sas", {"base": "tpa", "latent_dim": 4}, ["latent_dim", "mla", "tpa"]),
        ("iha", {"base": "mla", "k_rank": 4}, ["k_rank", "tpa", "mla"]),
        ("iha", {"base": "tpa", "num_kv_heads": 2}, ["tpa", "2", "4"]),
        ("sas", {"base": "mla", "qk_norm": "head"}, ["qk_norm", "mla"]),
        ("sas", {"base": "tpa", "v_rank": 0}, ["v_rank", "0"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(name, options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention(name, **{"hidden_size": 16, "num_heads": 4, **options})
    assert all(word in str(caught.value) for word in words), caught.value


def test_base_sizes_are_filled_in_only_for_their_base():
    config = hl.attention("iha", **SIZES).config
    assert all(getattr(config, n) is None for n in ("q_rank", "latent_dim", "plain_dim", "k_rank", "v_rank", "kv_only"))
    assert hl.attention("iha", **SIZES, base="mla").config.latent_dim == 11
    assert hl.attention("sas", **SIZES, base="tpa").config.k_rank == 2


SPECS = {
    "mla": ("mla", {}),
    "tpa": ("tpa", {}),
    "iha-mla": ("iha", {"base": "mla", "pseudo_heads": 2}),
    "iha-tpa": ("iha", {"base": "tpa", "pseudo_heads": 2}),
    "sas-tpa": ("sas", {"base": "tpa"}),
    "sas-mla": ("sas", {"base": "mla", "cache": "base"}),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_model_generates_with_its_cache_as_without(spec, tmp_path):
    """Two left-padded prompts; saved and loaded it is the same; the cache holds what the slots say."""
    from transformers import AutoModelForCausalLM, DynamicCache

    sizes = {"vocab_size": 31, "hidden_size": 24, "num_layers": 2, "num_heads": 3, "intermediate_size": 16}
    model = hl.build_model(spec, **sizes, max_positions=32, pad_token_id=0).double().eval()
    ids = torch.randint(1, 31, (2, 6))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    call = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    cached, plain = (model.generate(ids, use_cache=use, **call) for use in (True, False))
    assert torch.equal(cached, plain) and cached.shape == (2, 12)
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache, use_cache=True)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert held == 2 * 2 * 6 * count(model.model.layers[0].self_attn.cache_slots())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_rounds(again(ids).logits, model(ids).logits, "loaded", terms=24)


# TPA's head counts (arXiv:2501.06425): about equal attention parameters, head_dim 64.
MLA_SIZES = {"q_rank": 512, "latent_dim": 256, "rotary_dim": 32}
MATCHES = {
    768: {"mha": (12, {}), "gqa": (22, {"num_kv_heads": 2}), "mqa": (23, {}), "mla": (13, MLA_SIZES), "tpa": (34, {})},
    1024: {"mha": (16, {}), "gqa": (30, {"num_kv_heads": 2}), "mqa": (31, {}), "mla": (23, MLA_SIZES), "tpa": (47, {})},
}
KV_ONLY = {768: 22, 1024: 29}


def parameters(name, width, heads, options):
    return hl.cost(name, hidden_size=width, num_heads=heads, head_dim=64, tokens=1, **options).parameters


@pytest.mark.parametrize("width", MATCHES)
def test_published_head_counts_match_in_parameters(width):
    """All within 3 % of mha's 4 D^2."""
    counts = {name: parameters(name, width, heads, options) for name, (heads, options) in MATCHES[width].items()}
    counts["kv_only"] = parameters("tpa", width, KV_ONLY[width], {"kv_only": True})
    assert counts["mha"] == 4 * width**2
    assert all(abs(found / counts["mha"] - 1) < 0.03 for found in counts.values()), counts


def test_a_comparison_may_differ_in_what_the_bases_decide_and_in_nothing_else():
    """mla's rotary width and each base's sizes follow from the base; another mechanism's rotary width does not."""
    from headloom.lab.compare import comparison_study
    from headloom.lab.plan.fairness import refuse_other_differences
    from headloom.lab.plan.layers import allowed_differences, meaningless, resolved_attention
    from headloom.lab.spec.resolve import resolve_study

    def check(variants):
        common = {"seeds": 1, "data": "stdlib", "tokenizer": "bytes", "threads": 1}
        found = resolve_study(comparison_study(variants, "tiny", **common), kind="compare")
        configs = {v.label: {"mechanism": v.mechanism, **resolved_attention(found, v)} for v in found.variants}
        refuse_other_differences(configs, allowed_differences(found), meaningless(found))

    check("mha,mla,tpa,sas:base=tpa,iha:base=mla")
    check("mla:latent_dim=32,mla:latent_dim=64")
    with pytest.raises(HeadloomError, match=r"attention\.rotary_dim: mha 8, tpa 16"):
        check("mla,mha:rotary_dim=8,tpa")
