"""`spec` runs a test on every registered mechanism, its own choices and variations, one at a time; `few` on less.

A test marked by `oracles.variations.only` runs where its condition holds. `mechanism` is the name of each: most tests
of it draw options from `oracles.strategies`, several at once.
"""

from oracles.variations import configs

import headloom as hl


def pytest_generate_tests(metafunc):
    if "mechanism" in metafunc.fixturenames:
        metafunc.parametrize("mechanism", sorted(hl.mechanisms()))
    admits = getattr(metafunc.function, "admits", lambda name, config: True)
    for fixture in {"spec", "few"} & set(metafunc.fixturenames):
        found = configs(hl.mechanisms(), few=fixture == "few")
        metafunc.parametrize(fixture, [p for p in found if admits(*p.values[0])])
