"""`spec` runs a test on every registered mechanism and every option it admits, `lean` on fewer common options."""

from oracles.variations import configs

import headloom as hl


def pytest_generate_tests(metafunc):
    if "spec" in metafunc.fixturenames:
        metafunc.parametrize("spec", configs(hl.mechanisms()))
    if "lean" in metafunc.fixturenames:
        metafunc.parametrize("lean", configs(hl.mechanisms(), lean=True))
