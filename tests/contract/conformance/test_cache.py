"""Cached equals uncached, for every mechanism: whatever comes in whatever portions, the uncached call is the model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from oracles.compare import assert_close, draw
from oracles.modules import module_of
from oracles.strategies import STATE, configs, examples, paddings
from oracles.variations import only

import headloom as hl

STEPS, MOST = 6, 4  # portions of a run, tokens of a portion


class Told:
    """What a run has told of its tokens so far: lists of columns, one value a row."""

    def __init__(self, batch):
        self.batch = batch
        self.real, self.documents, self.positions = ([[] for _ in range(batch)] for _ in range(3))

    def extended(self, tokens, real=None, documents=None, positions=None):
        """A copy with a call's tokens. Without document ids a token goes on in the document of the last real one, and a
        stated position that does not exceed that one's opens a new document."""
        new = Told(self.batch)
        for b in range(self.batch):
            past = len(self.real[b])
            new.real[b] = [*self.real[b], *([True] * tokens if real is None else real[b].tolist())]
            stated = positions is not None
            places = positions[b].tolist() if stated else range(past, past + tokens)
            new.positions[b] = [*self.positions[b], *places]
            new.documents[b] = list(self.documents[b])
            for i in range(past, past + tokens):
                seen = [j for j in range(i) if new.real[b][j]]
                current = new.documents[b][seen[-1]] if seen else 0
                if documents is not None:
                    current = int(documents[b, i - past])
                elif seen and stated and new.real[b][i] and new.positions[b][i] <= new.positions[b][seen[-1]]:
                    current += 1
                new.documents[b].append(current)
        return new

    @property
    def call(self):
        return {
            "padding": torch.tensor(self.real, dtype=torch.bool),
            "documents": torch.tensor(self.documents),
            "positions": torch.tensor(self.positions),
        }


class Portions(RuleBasedStateMachine):
    """Tokens come in portions, which a cache remembers or only looks at; some are padding, some open documents."""

    name = ""

    @initialize(data=st.data())
    def start(self, data):
        self.config = data.draw(configs(self.name, lambda config: config.causal))
        batch = data.draw(st.integers(1, 2))
        self.module, self.cache, self.told = module_of((self.name, self.config)), hl.Cache(), Told(batch)
        self.x = draw(batch, STEPS * MOST, self.config.hidden_size)
        reach = st.none() if self.name in STATE else st.none() | st.integers(1, 5)
        window = data.draw(reach)
        self.mask = {} if window is None else {"mask": hl.Window(window)}

    @property
    def past(self):
        return self.cache.length(0)

    def portion(self, tokens, call, told, update):
        past, nbytes = self.past, self.cache.nbytes()
        part = self.x[:, past : past + tokens]
        found = self.module(part, cache=self.cache, update_cache=update, **self.mask, **call).detach()
        want = self.module(self.x[:, : past + tokens], **self.mask, **told.call).detach()[:, past:]
        assert_close(found, want, "cached", 1e-9)
        if update:
            self.told = told
        assert self.past == past + update * tokens
        assert update or self.cache.nbytes() == nbytes

    def told_of(self, tokens, kinds, data):
        """What a call says of its tokens, and the run's account of it."""
        call, batch = {}, self.told.batch
        last = [max(documents, default=0) for documents in self.told.documents]
        if "padding" in kinds:
            call["padding"] = data.draw(paddings(batch, tokens))
        if "documents" in kinds:  # going on in the last one, or opening others
            opens = data.draw(st.lists(st.sampled_from([0, 0, 1]), min_size=tokens, max_size=tokens))
            call["documents"] = torch.tensor(last)[:, None] + torch.tensor(opens).cumsum(0)
        if "positions" in kinds:  # with a gap, or from the start
            first = data.draw(st.sampled_from([0, self.past, self.past + 3]))
            call["positions"] = (first + torch.arange(tokens)).expand(batch, -1)
        told = self.told.extended(tokens, call.get("padding"), call.get("documents"), call.get("positions"))
        if "padding" in kinds and data.draw(st.booleans()):
            call["padding"] = told.call["padding"]  # over the cached tokens too
        return call, told

    @rule(
        data=st.data(),
        tokens=st.integers(1, MOST),
        kinds=st.sets(st.sampled_from(["padding", "documents", "positions"])),
        update=st.sampled_from([True, True, True, False]),
    )
    def more(self, data, tokens, kinds, update):
        self.portion(tokens, *self.told_of(tokens, kinds, data), update)

    @rule()
    def one(self):
        """A token of which nothing is said."""
        self.portion(1, {}, self.told.extended(1), True)


def test_any_portions(mechanism):
    machine = type(f"Portions of {mechanism}", (Portions,), {"name": mechanism})
    run_state_machine_as_test(machine, settings=settings(examples(2), stateful_step_count=STEPS))


@only(lambda name, config: config.causal)
@pytest.mark.parametrize("chunks", [[1] * 7, [5, 1, 1], [7]], ids=["ones", "prefill", "at once"])
def test_cached_equals_uncached(spec, chunks):
    module, x, cache = module_of(spec), draw(2, 7, spec[1].hidden_size), hl.Cache()
    found = torch.cat([module(part, cache=cache).detach() for part in x.split(chunks, 1)], 1)
    assert_close(found, module(x).detach(), "cached", 1e-10)
    assert cache.length(0) == 7


@only(lambda name, config: config.causal)
def test_reading_an_empty_cache_writes_nothing(spec):
    module, x, cache = module_of(spec), draw(2, 5, spec[1].hidden_size), hl.Cache()
    assert_close(module(x, cache=cache, update_cache=False).detach(), module(x).detach(), "empty cache", 1e-12)
    assert cache.length(0) == 0 and cache.nbytes() == 0


@given(data=st.data())
def test_the_cache_holds_what_the_slots_say(mechanism, data):
    """Elements per token are cache_slots()'s heads times width, and constant_slots() whatever the number of tokens;
    the cache's type is the model's."""
    config = data.draw(configs(mechanism, lambda config: config.causal))
    module = module_of((mechanism, config), torch.float32)
    x = draw(2, 5, config.hidden_size).float()
    sizes = []
    for tokens in (2, 5):
        cache = hl.Cache()
        module(x[:, :tokens], cache=cache)
        sizes.append(cache.nbytes())
    per_token = sum(heads * width for heads, width in module.cache_slots().values())
    constant = sum(heads * rows * width for heads, rows, width in module.constant_slots().values())
    assert sizes == [4 * 2 * (tokens * per_token + constant) for tokens in (2, 5)] and sizes[1] > 0
    held = cache.held(0)
    assert set(held.slots) == {*module.cache_slots(), *module.constant_slots()} and cache.length(0) == 5
    for slot, shape in module.constant_slots().items():
        assert held.slots[slot].shape == (2, *shape) and held.slots[slot].dtype == torch.float32
    for slot, (heads, width) in module.cache_slots().items():
        assert held.slots[slot].shape == (2, heads, 5, width) and held.slots[slot].dtype == torch.float32
