"""What holds for a graft of every family: its function, padding, packing, generation, training, folders."""

import pytest
import torch
from safetensors import safe_open
from transformers import StaticCache
from transformers.models.auto import modeling_auto

from headloom.core.errors import HeadloomError
from headloom.hf import graft

SPECS = {
    "carrier": ("iha", {"pseudo_heads": 2}),
    "virtual": ("iha", {"pseudo_heads": 3, "order": "virtual"}),
    "identity": ("iha", {"pseudo_heads": 2, "init": "identity"}),
    "sas": ("sas", {"simulated_heads": 8, "kernel_size": 3}),
    "sas-base": ("sas", {"simulated_heads": 8, "cache": "base"}),
    "talking": ("talking_heads", {}),
}
IHA = SPECS["carrier"]


def logits(model, x, **kwargs):
    with torch.no_grad():
        return model(x, **kwargs, use_cache=False).logits


def alone(model, x, mask, encoder):
    """Each row of a padded batch by itself, its tokens at the places they have in the batch."""
    rows = []
    for ids, real in zip(x, mask.bool(), strict=True):
        places = {} if encoder else {"position_ids": torch.arange(len(ids))[real][None]}
        rows.append(logits(model, ids[real][None], **places)[0])
    return torch.cat(rows)


@pytest.mark.parametrize("spec", [*SPECS, "plain"])
def test_the_function_is_kept(base, batch, near, slack, encoder, plain, spec):
    mechanism, options = SPECS.get(spec, plain)
    x, mask = batch
    model = base()
    whole, rows = logits(model, x), alone(model, x, mask, encoder)
    model = graft(model, mechanism, **options)
    report = model.graft_report
    assert report.exact and report.relative <= slack and report.compared == "logits"
    near(logits(model, x), whole)
    near(logits(model, x, attention_mask=mask)[mask.bool()], rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ["carrier", "sas"])
def test_in_the_models_type(base, batch, near, spec, dtype):
    x, mask = batch
    model = base(dtype=dtype)
    before = logits(model, x, attention_mask=mask)
    model = graft(model, SPECS[spec][0], **SPECS[spec][1])
    report = model.graft_report
    assert report.exact and model.dtype == dtype
    near(logits(model, x, attention_mask=mask)[mask.bool()], before[mask.bool()], 2e-4 if dtype.itemsize > 2 else 5e-2)


@pytest.mark.parametrize("layers", [None, [1]])
def test_packed_documents_are_apart(base, name, encoder, near, layers):
    """As rows of their own in the original; decoders also as transformers packs them itself."""
    x = torch.randint(3, 37, (1, 13), generator=torch.Generator().manual_seed(2))
    places = torch.cat((torch.arange(6), torch.arange(7)))[None]
    documents = (torch.arange(13) >= 6).long()[None]
    model = base()
    if name == "roberta":
        places = places + 1 + model.config.pad_token_id  # its positions start behind the padding token's id
    rows = torch.cat((logits(model, x[:, :6]), logits(model, x[:, 6:])), 1)
    if not encoder:
        near(logits(model, x, position_ids=places), rows)
    model = graft(model, IHA[0], layers=layers, **IHA[1])
    near(logits(model, x, position_ids=places), rows)
    near(logits(model, x, position_ids=places, documents=documents), rows)
    assert (logits(model, x) - rows).abs().max() > 1e-3
    if name in ("gpt2", "bert", "roberta"):
        return  # learned positions are absolute
    near(logits(model, x, documents=documents), rows, 1e-6)


@pytest.mark.parametrize("spec", ["carrier", "sas", "sas-base"])
@pytest.mark.parametrize("layers", [None, 1])
def test_generation(base, batch, encoder, spec, layers):
    if encoder:
        with pytest.raises(Exception, match="generate"):
            base().generate(batch[0])
        return
    x, mask = batch
    model = base(dtype=torch.float32)
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    before = model.generate(x, **settings)
    model = graft(model, SPECS[spec][0], layers=layers, **SPECS[spec][1])
    assert torch.equal(model.generate(x, **settings), before)
    assert torch.equal(model.generate(x, **settings, use_cache=False), before)


@pytest.mark.parametrize(("spec", "layers"), [("carrier", None), ("carrier", 0), ("sas", "0-1")])
def test_static_caches(base, batch, near, encoder, spec, layers):
    """Layers of every kind, grafted and not: a room by hand in chunks that fill a window (5) slowly and at once, and
    `generate`, whose masks are made beforehand, one for each kind of layer."""
    if encoder:
        return  # it has no cache
    (x, mask), model = batch, base()
    model = graft(model, SPECS[spec][0], layers=layers, **SPECS[spec][1])
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    whole, padded = logits(model, x), logits(model, x, attention_mask=mask, position_ids=places)
    for chunks in ([4] + [1] * 9, [6, 2, 1, 4]):
        ends = torch.tensor(chunks).cumsum(0).tolist()
        for given in (None, mask):
            cache, outs = StaticCache(config=model.config, max_cache_len=15), []
            for a, b in zip([0, *ends], ends, strict=False):
                call = {} if given is None else {"attention_mask": mask[:, :b], "position_ids": places[:, a:b]}
                with torch.no_grad():
                    outs.append(model(x[:, a:b], cache=cache, **call).logits)
            out = torch.cat(outs, 1)
            near(*((out, whole) if given is None else (out[mask.bool()], padded[mask.bool()])))
    for T in (3, 13):
        real = torch.ones(2, T, dtype=torch.long)
        for given in (real, torch.stack((real[0].index_fill(0, torch.arange(T // 2), 0), real[1]))):
            call = {"attention_mask": given, "max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
            call |= {"output_logits": True, "return_dict_in_generate": True}
            wanted = model.generate(x[:, -T:], use_cache=False, **call)
            got = model.generate(x[:, -T:], cache_implementation="static", **call)
            assert torch.equal(got.sequences, wanted.sequences)
            near(torch.stack(got.logits), torch.stack(wanted.logits), 1e-6)  # handed out in float32


def test_a_partial_graft_keeps_the_others(base, family, batch, encoder, near):
    x, mask = batch
    model = base()
    whole, rows = logits(model, x), alone(model, x, mask, encoder)
    model = graft(model, IHA[0], layers=1, **IHA[1])
    kinds = [type(family.attention_of(layer)) for layer in family.layers(model)]
    own = family.attention_class()
    assert [kind is own for kind in kinds] == [True, False, True]
    near(logits(model, x), whole)
    near(logits(model, x, attention_mask=mask)[mask.bool()], rows)


def test_modules_are_copied_and_tensors_shared(base, family):
    """Of the same classes, but for the attentions and the models themselves, and under the family's names."""
    model = base()
    modules = dict(model.named_modules())
    attentions = tuple(path for path, module in modules.items() if type(module) is family.attention_class())
    made = graft(model, IHA[0], **IHA[1])
    before, after = (dict(m.named_parameters(remove_duplicate=False)) for m in (model, made))
    assert all(after[name] is tensor for name, tensor in (*before.items(), *model.named_buffers()) if name in after)
    mixes = {name.rpartition(".")[0].rpartition(".")[2] for name in after.keys() - before.keys()}
    assert before.keys() <= after.keys() and mixes == {"q_mix", "k_mix", "v_mix", "out_mix"}
    now = dict(made.named_modules())
    assert not {*modules.values()} & {*now.values()}
    kept = {path for path in modules.keys() & now.keys() if path not in attentions}
    assert all(path.startswith(attentions) for path in modules.keys() - now.keys()), "what an attention has no use for"
    assert all(type(now[p]) is type(modules[p]) for p in kept if modules[p] not in (model, model.base_model))
    assert made.config is not model.config and type(model.config) is family.config_class()


@pytest.mark.parametrize("head", [None, "AutoModel"])
def test_hidden_states(base, batch, head):
    x, mask = batch
    model, other = (base(head, dtype=torch.float32).requires_grad_(False) for _ in range(2))
    before = model(x, attention_mask=mask, output_hidden_states=True).hidden_states
    for grafted in (model, other):  # with the hooks installed before the graft, and after it
        grafted = graft(grafted, IHA[0], **IHA[1])
        after = grafted(x, attention_mask=mask, output_hidden_states=True).hidden_states
        assert len(after) == len(before) == 4
        for new, old in zip(after, before, strict=True):
            torch.testing.assert_close(new[mask.bool()], old[mask.bool()], rtol=0, atol=1e-4 * float(old.abs().max()))


@pytest.mark.parametrize("spec", ["carrier", "sas"])
def test_a_folder_comes_back(base, family, batch, spec, tmp_path):
    x, mask = batch
    model = base(dtype=torch.float32)
    model = graft(model, SPECS[spec][0], layers="0-1", **SPECS[spec][1])
    with torch.no_grad():
        for attention in model.grafted():
            for name, parameter in attention.named_parameters():
                if "mix" in name or "head" in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = set(file.keys())
    assert not written & set(model.all_tied_weights_keys)
    assert {key for key in written if "_mix" in key or "head_q" in key}
    auto = {cls: auto for auto, cls in family.head_classes().items()}[type(base())]
    back, info = getattr(modeling_auto, auto).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and type(back) is type(model)
    own, loaded = model.state_dict(), back.state_dict()
    assert list(own) == list(loaded) and all(torch.equal(own[key], loaded[key]) for key in own)
    if back._can_set_experts_implementation():
        back.set_experts_implementation("eager")
    torch.testing.assert_close(logits(back, x, attention_mask=mask), logits(model, x, attention_mask=mask))
    for cls in (type(base()), family.head_classes()["AutoModel"]):
        with pytest.raises(Exception, match=rf"Headloom graft of a {family.name} model.*import headloom"):
            cls.from_pretrained(tmp_path)


def test_every_head(base, family, tmp_path):
    """Whatever transformers' Auto classes know of the family can be grafted, saved and loaded by that Auto class."""
    seen = {}
    for auto, cls in family.head_classes().items():
        model = base(auto, dtype=torch.float32)
        assert type(model) is cls
        model = graft(model, IHA[0], **IHA[1])
        report = model.graft_report
        assert report.exact, auto
        seen[cls.__name__] = report.compared
        folder = tmp_path / auto
        model.save_pretrained(folder)
        back = getattr(modeling_auto, auto).from_pretrained(folder)
        assert type(back) is type(model) and type(back).__name__ == f"Headloom{cls.__name__}"
        assert all(torch.equal(tensor, back.state_dict()[key]) for key, tensor in model.state_dict().items())
    wordy = [name for name, compared in seen.items() if compared == "logits"]
    assert wordy and all("LM" in name for name in wordy) and "last hidden states" in seen.values()


@pytest.mark.parametrize("spec", ["carrier", "identity", "sas"])
def test_a_base_checkpoint_loads_into_the_graft_class(base, graft_class, batch, near, encoder, spec, tmp_path):
    """The loader leaves no memory uninitialised: mixes are what the init says and the logits the base's."""
    x, mask = batch
    base().save_pretrained(tmp_path)
    model = type(base()).from_pretrained(tmp_path)
    mechanism, options = SPECS[spec]
    options = {"order": "token", "phase": "token", "init": "carrier", **options} if mechanism == "iha" else {
        "init": "identity", **options
    }  # fmt: skip
    layers = [{"mechanism": mechanism, "options": options}] * 3
    back = graft_class().from_pretrained(tmp_path, headloom={"layers": layers}).eval()
    if back._can_set_experts_implementation():
        for loaded in (model, back):
            loaded.set_experts_implementation("eager")
    assert back.dtype == torch.float64
    near(logits(back, x, attention_mask=mask)[mask.bool()], alone(model, x, mask, encoder))
    own = back.state_dict()
    assert all(torch.equal(tensor, own[key]) for key, tensor in model.state_dict().items())
    if mechanism == "iha":
        attention = back.grafted()[2]
        eye = torch.eye(4, dtype=torch.float64)
        assert torch.equal(attention.q_mix.weight[:, 1], eye)
        apart = attention.v_mix.weight - attention.v_mix.weight.mean(1, keepdim=True)
        assert 0.1 < apart.std() < 0.5


def test_gradient_checkpointing(base, name, batch, still):
    x, mask = batch
    model = base(**still(name)).train()
    model = graft(model, IHA[0], **IHA[1])
    grads = []
    for on in (False, True):
        if on:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(x, attention_mask=mask, labels=x).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert any("q_mix" in name for name in grads[0]) and grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-6, atol=1e-9)


def test_pseudo_heads_do_not_stay_copies(base, batch):
    x, _ = batch
    model = base().train()
    model = graft(model, IHA[0], **IHA[1])
    start = {n: p.detach().clone() for n, p in model.named_parameters() if "q_mix" in n or "k_mix" in n}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        model(x, labels=x).loss.backward()
        optimizer.step()
    for name, before in start.items():
        update = model.get_parameter(name).detach() - before
        apart = update - update.mean(1, keepdim=True)
        assert apart.norm() > 1e-3 * update.norm() > 0, name


def test_layouts_read_and_write(base, family):
    """`weights` are what `project` multiplies by; `write` puts others in their place."""
    model = base()
    model = graft(model, IHA[0], **IHA[1])
    attention, layout = model.grafted()[1], family.layout
    H, G, D = attention.config.num_heads, attention.config.num_kv_heads, attention.config.hidden_size
    x = torch.randn(2, 3, D, dtype=torch.float64)

    def check():
        found = layout.weights(attention)
        assert set(found) == ({"q", "k", "v"} if layout.out is None else {"q", "k", "v", "o"})
        for (letter, heads), part in zip((("q", H), ("k", G), ("v", G)), layout.split(attention, x), strict=True):
            weight, bias = found[letter]
            out = torch.nn.functional.linear(x, weight, bias)
            torch.testing.assert_close(part, out.unflatten(-1, (heads, -1)))
        return found

    before = check()
    native = family.attention_of(family.layers(base())[1])  # the family's own attention is read alike
    for letter, (weight, _) in layout.weights(native, heads=G).items():
        assert torch.equal(weight, before[letter][0])
    for letter, (weight, bias) in before.items():
        changed = torch.randn(weight.shape, dtype=torch.float64)
        layout.write(attention, letter, changed, None if bias is None else changed[:, 0])
        after = check()
        assert torch.equal(after[letter][0], changed)
        assert bias is None or torch.equal(after[letter][1], changed[:, 0])
        layout.write(attention, letter, changed)
        assert bias is None or not check()[letter][1].any()
        if bias is None:
            with pytest.raises(HeadloomError, match="has no bias to hold"):
                layout.write(attention, letter, changed, changed[:, 0])
    wider = torch.randn(4 * before["k"][0].shape[0], D, dtype=torch.float64)
    if len(layout.inputs) == 3:
        layout.write(attention, "k", wider)
        assert torch.equal(layout.weights(attention)["k"][0], wider)
    else:
        with pytest.raises(HeadloomError, match=rf"k \({4 * D}, {D}\) does not fit into .*, which holds \({D}, {D}\)"):
            layout.write(attention, "k", wider)
    output = family.output_of(family.layers(model)[1])
    assert output is (getattr(attention, layout.out) if layout.out else family.layers(model)[1].attention.output.dense)
