"""`hl.Exactly(mask)`: the caller's mask is all there is, for every mechanism."""

import importlib

import pytest
import torch
from oracles.common import Row, settings
from oracles.compare import assert_close, assert_matches, draw
from oracles.modules import influence, module_of
from oracles.strategies import LOOKS_BACK, STATE
from oracles.variations import only

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.mechanism import Attention

ORACLES = {"mha": "gqa", "mqa": "gqa", "mfa_kr": "mfa"}
RESTARTS = torch.tensor([0, 1, 2, 1, 2])  # positions of two continuations of one prefix


def pairs(name, T=5, seed=0):
    """(1, T, T) booleans in both directions, as far as the mechanism has them; a token sees itself."""
    some = torch.rand(1, T, T, generator=torch.Generator().manual_seed(seed)) > 0.5
    some |= torch.eye(T, dtype=torch.bool)
    return some.tril() if name in LOOKS_BACK else some


def test_the_given_pairs_are_seen_and_no_others(spec):
    """No causality, no window, no documents from positions that start again."""
    name, config = spec
    module, mask = module_of(spec), pairs(name)
    wanted = mask[0]
    if name in LOOKS_BACK:  # a value already holds what its token has seen
        for _ in range(3):
            wanted = (wanted.double() @ wanted.double()) > 0
    found = influence(module, draw(2, 5, config.hidden_size), mask=hl.Exactly(hl.Dense(mask)), positions=RESTARTS)
    assert torch.equal(found, wanted.expand(2, -1, -1)), f"{found.int()}\nwanted\n{wanted.int()}"


@only(lambda name, config: config == type(config).tiny())
def test_values_are_the_oracles(few, monkeypatch):
    """Outputs and every gradient, the oracle being told who sees whom."""
    name, config = few
    mask = pairs(name, seed=1)
    monkeypatch.setattr(Row, "sees", lambda row, i, j: bool(mask[0, i, j]))
    oracle = importlib.import_module(f"oracles.{ORACLES.get(name, name)}")
    module, s = module_of(few), settings(name, **config.to_dict())

    def call(x, **side):
        return module(x, mask=hl.Exactly(hl.Dense(mask)))

    call.named_parameters = module.named_parameters
    assert_matches(call, oracle, s, draw(2, 5, config.hidden_size))


def test_the_layers_own_rule_said_exactly_changes_nothing(spec):
    """Exactly(what a layer shows by itself) gives what the layer gives, as pairs and as predicates."""
    config = spec[1]
    module, x = module_of(spec), draw(2, 5, config.hidden_size)
    rule = hl.Window(9)
    rule = rule & hl.Causal() if config.causal else rule
    rule = rule & hl.Window(config.window) if config.window else rule
    index = torch.arange(5)
    want = module(x).detach()
    for mask in (rule, hl.Dense(rule.visible(index[:, None], index)[None])):
        assert_close(module(x, mask=hl.Exactly(mask)).detach(), want, "said exactly", 1e-11)


@only(lambda name, config: name not in STATE)
def test_after_a_cache(spec):
    """Two tokens over three cached ones under their rows of a mask, with padding that the cache remembers: all of it
    counts for nothing beside the mask."""
    module, x = module_of(spec), draw(2, 5, spec[1].hidden_size)
    mask = pairs(spec[0], seed=2)
    mask[:, :3, 3:] = False
    want = module(x, mask=hl.Exactly(hl.Dense(mask)), positions=RESTARTS).detach()
    cache, first = hl.Cache(), hl.Exactly(hl.Dense(mask[:, :3, :3]))
    module(x[:, :3], mask=first, positions=RESTARTS[:3], cache=cache)
    call = {"mask": hl.Exactly(hl.Dense(mask[:, 3:])), "positions": RESTARTS[3:], "cache": cache}
    assert_close(module(x[:, 3:], **call, update_cache=False).detach(), want[:, 3:], "after a cache", 1e-10)
    held = cache.layers[0]
    hidden = torch.tensor([[-1, 0, 0]]).expand(2, -1)
    cache.layers[0] = type(held)(held.slots, held.positions_BS, hidden, held.tokens)
    assert_close(module(x[:, 3:], **call).detach(), want[:, 3:], "after remembered padding", 1e-10)


def test_what_is_stated_beside_it_still_holds(spec):
    """Padding and documents that the caller gives in the same call restrict it further."""
    module, x = module_of(spec), draw(2, 5, spec[1].hidden_size)
    mask = hl.Exactly(hl.Dense(torch.ones(1, 5, 5, dtype=torch.bool).tril()))
    plain = hl.Exactly(hl.Causal())
    real = torch.tensor([[False, True, True, True, True], [True] * 5])
    documents = torch.tensor([[0, 0, 1, 1, 1]]).expand(2, -1)
    for side in ({"padding": real}, {"documents": documents}):
        want = module(x, mask=plain, **side).detach()
        assert_close(module(x, mask=mask, **side).detach(), want, "an argument", 1e-11)
        joined = hl.Padding(real) if "padding" in side else hl.Documents(documents)
        assert_close(module(x, mask=mask & joined).detach(), want, "joined by &", 1e-11)
        assert (want - module(x, mask=mask).detach()).abs().max() > 1e-6


@pytest.mark.parametrize("name", sorted(LOOKS_BACK))
def test_a_mechanism_that_looks_back_refuses_a_later_token(name):
    module = hl.attention(name, hidden_size=8, num_heads=2)
    x, one = torch.randn(1, 4, 8), torch.eye(4, dtype=torch.bool)[None].clone()
    module(x, mask=hl.Exactly(hl.Dense(one)))
    one[0, 1, 2] = True
    for mask in (hl.Dense(one), hl.Window(2), hl.Documents(torch.tensor([[0, 0, 1, 1]]))):
        with pytest.raises(HeadloomError, match=f"{name} cannot serve a mask in which a token sees a later one"):
            module(x, mask=hl.Exactly(mask))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="a token sees a later one"):
        compiled(x, mask=hl.Exactly(hl.Dense(one)))


@pytest.mark.parametrize("name", sorted(STATE))
def test_a_state_cannot_be_masked(name):
    module, cache = hl.attention(name, hidden_size=8, num_heads=2), hl.Cache()
    x = torch.randn(1, 4, 8)
    module(x, cache=cache)
    with pytest.raises(HeadloomError, match="cannot reach the tokens in it"):
        module(x[:, :1], cache=cache, mask=hl.Exactly(hl.Dense(torch.ones(1, 1, 5, dtype=torch.bool))))


def test_every_list_names_a_mechanism():
    found = {name for name, info in hl.mechanisms().items() if info.cls.remember is not Attention.remember}
    assert found == LOOKS_BACK | STATE
