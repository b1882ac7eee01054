"""`headloom cost` of schedules, of packed weights, of caches behind windows."""

import json

import pytest
from typer.testing import CliRunner

from headloom.cli.app import app


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(("P", "window", "average"), [(2, 1024, "0.95"), (4, 256, "0.99"), (8, 64, "1.00")])
def test_the_papers_hybrid(P, window, average):
    """26 layers are five periods and one local layer; the average is over a period, as the paper counts."""
    done = call("cost", f"hybrid:pseudo_heads={P}", "--size", "2.4B")
    assert done.exit_code == 0, done.output
    assert f"average over 5 layers: 0.60 as full rectangles (the papers' count), {average} by visible" in done.stdout
    assert f"window: {window:,} tokens" in done.stdout
    assert "iha in layers 0-3,5-8,10-13,15-18,20-23,25" in done.stdout and "mha in layers 4,9,14,19,24" in done.stdout


def test_a_schedule_as_json():
    found = json.loads(call("cost", "hybrid:local=1", "--set", "pseudo_heads=4", "--json").stdout)
    assert "attention" not in found
    local, whole = found["layers"]
    assert (local["mechanism"], local["layers"], local["config"]["window"]) == ("iha", "0", 128 // 32)
    assert (whole["mechanism"], whole["layers"]) == ("mha", "1")
    model, D = found["model"], 128
    assert model["cache_bytes_per_token"] == 2 * 2 * D * 4
    assert model["cache_bytes"] == 2 * D * 4 * (4 + 128)
    assert found["relative"]["rectangle"] == pytest.approx((16 * 4 / 128 + 1) / 2)
    plain = json.loads(call("cost", "mha", "--json").stdout)
    assert plain["relative"] == {"reference": "mha", "pattern": 1, "rectangle": 1.0, "causal": 1.0, "exact": 1.0}
    assert model["parameters"] - plain["model"]["parameters"] == 4 * 8 * 8 * 4


def test_packed_weights_in_bytes():
    """Four 128 x 128 matrices in base 3: 3277 bytes each and a scale; the mixes of iha stay 32-bit floats."""
    done = call("cost", "iha:pseudo_heads=2:projection=bit")
    matrices, mixes = 4 * 128 * 128, 4 * 8 * 8 * 2
    packed = 4 * (-(-128 * 128 // 5) + 4) + 4 * mixes
    assert f"weights: {4 * (matrices + mixes):,} bytes in float32; {packed:,} bytes packed for inference" in done.stdout
    half = json.loads(call("cost", "iha:pseudo_heads=2:projection=bit", "--dtype", "bfloat16", "--json").stdout)
    layer = half["attention"]
    assert layer["parameters"] == matrices + mixes
    assert layer["parameter_bytes"] == 2 * matrices + 4 * mixes
    assert layer["parameter_bytes_packed"] == packed - 4 * 2
    assert half["model"]["parameter_bytes"] - half["model"]["parameter_bytes_packed"] == 2 * (2 * matrices - 4 * 3279)
    done = json.loads(call("cost", "mha:projection=packed", "--json").stdout)["attention"]
    assert done["parameters"] == matrices and done["parameter_bytes"] == done["parameter_bytes_packed"] == 4 * 3281
    assert "packed" not in call("cost", "mha").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hybird"], "unknown mechanism 'hybird'. Did you mean 'hybrid'?"),
        (["hybrid:local=4"], "a pattern of 5 layers does not fit a model of 2"),
        (["hybrid:pseudo_heads=16"], "below 1 for a context of 128 and pseudo_heads 16"),
        (["mha", "--dtype", "int8"], "dtype must be float32"),
    ],
)
def test_wrong_calls(arguments, message):
    done = call("cost", *arguments)
    assert done.exit_code == 2 and message in done.stderr


def test_several_side_by_side():
    """D = 128, H = 8, T = 128: numbers of each are those it has alone, and one default P holds everywhere."""
    done = call("cost", "mha,iha,iha:pseudo_heads=4,linear", "--set", "iha.order=token")
    assert done.exit_code == 0, done.output
    assert (
        "iha:order=token runs with pseudo_heads=2: the comparison's default, used where none is given." in done.stdout
    )
    rows = {
        cells[0]: cells[1:] for line in done.stdout.splitlines() if (cells := [c.strip() for c in line.split("│")][1:])
    }
    D, H = 128, 8
    assert rows["mha"][0] == f"{4 * D * D:,}" and rows["mha"][2] == "1" and rows["mha"][3] == f"{2 * D * 4:,}"
    assert rows["iha:order=token"][0] == f"{4 * D * D + 4 * H * H * 2:,}"
    found = json.loads(call("cost", "mha,iha,iha:pseudo_heads=4", "--set", "iha.order=token", "--json").stdout)
    labels = ["mha", "iha:order=token", "iha:order=token:pseudo_heads=4"]
    assert [row["variant"] for row in found] == labels
    alone = json.loads(call("cost", "iha:order=token", "--json").stdout)
    assert found[1] == alone
    assert alone["attention"]["config"]["pseudo_heads"] == 2 and alone["notes"] != []
    assert found[2]["attention"]["config"]["order"] == "token" and found[2]["notes"] == []
    # every query meets P keys of every token it sees, and its own token's later ones: near P^2 mha's
    assert alone["relative"]["exact"] == pytest.approx(4, rel=0.05)


def test_a_size_is_set_for_all_of_them():
    found = json.loads(call("cost", "mha,sas", "--set", "hidden_size=64", "--set", "num_heads=4", "--json").stdout)
    assert [row["attention"]["config"]["hidden_size"] for row in found] == [64, 64]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mha,iha", "--set", "sas.kernel_size=3"], "unknown variant in --set 'sas'"),
        (["mha,iha", "--set", "pseudo_heads=2"], "unknown option 'pseudo_heads' of mha"),
        (["mha,", "--set", "pseudo_heads"], "--set must look like name=value"),
        ([","], "unknown mechanism ','"),
    ],
)
def test_wrong_calls_of_several(arguments, message):
    done = call("cost", *arguments)
    assert done.exit_code == 2 and message in done.stderr
