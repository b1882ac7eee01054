"""`spec` runs a test on every registered mechanism and every option it admits, `lean` on fewer common options.

`causal` is `spec` without encoders. A test marked by `oracles.variations.only` runs where its condition holds.
"""

from oracles.variations import configs

import headloom as hl


def pytest_generate_tests(metafunc):
    admits = getattr(metafunc.function, "admits", lambda name, config: True)
    for fixture in {"spec", "lean", "causal"} & set(metafunc.fixturenames):
        found = configs(hl.mechanisms(), lean=fixture == "lean")
        found = [p for p in found if admits(*p.values[0]) and (fixture != "causal" or p.values[0][1].causal)]
        metafunc.parametrize(fixture, found)
