"""torch.export with an open batch and length: its program gives the eager outputs at sizes it was not traced at."""

import io

import pytest
import torch
from torch.export import Dim, export

from headloom.mechanism import build_from_config, mechanisms

OPEN = {0: Dim("B", min=1, max=64), 1: Dim("T", min=2, max=4096)}
NEAR = {"rtol": 0, "atol": 1e-12}


@pytest.mark.parametrize("name", mechanisms())
def test_a_program_serves_every_length(name):
    config = mechanisms()[name].config_cls.tiny()
    attention = build_from_config(config).double().eval()
    program = export(attention, (torch.randn(2, 12, config.hidden_size).double(),), dynamic_shapes=(OPEN,)).module()
    for B, T in ((3, 2), (1, 19), (2, 300)):  # 300: eager, a mechanism takes another way than at 12
        x_BTD = torch.randn(B, T, config.hidden_size).double()
        torch.testing.assert_close(program(x_BTD), attention(x_BTD), **NEAR)


def test_a_program_of_windows_is_kept_in_a_file():
    config = mechanisms()["iha"].config_cls.tiny(window=5, order="token")
    attention = build_from_config(config).double().eval()
    file = io.BytesIO()
    torch.export.save(
        export(attention, (torch.randn(2, 12, config.hidden_size).double(),), dynamic_shapes=(OPEN,)), file
    )
    file.seek(0)
    x_BTD = torch.randn(1, 23, config.hidden_size).double()
    torch.testing.assert_close(torch.export.load(file).module()(x_BTD), attention(x_BTD), **NEAR)
