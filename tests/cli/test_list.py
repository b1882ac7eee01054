"""`headloom list` and docs/mechanisms.md: what is said of a mechanism is derived, measured and tried."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headloom
from headloom.cli.app import app
from headloom.costs.catalogue import SIZES, entries, grafts_exactly
from headloom.costs.formula import SymbolicSize, cache_formula
from headloom.lab.spec.names import LINES, _texts, described
from headloom.lab.spec.variants import defaults
from headloom.mechanism import mechanisms
from headloom.mechanism.schedules import schedules

PAGE = Path(headloom.__file__).parent.parent / "docs" / "mechanisms.md"


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def found():
    return {entry.name: entry for entry in entries(defaults().reference, defaults().options)}


def test_the_committed_page_is_what_the_command_prints():
    done = call("list", "--markdown")
    assert done.exit_code == 0
    assert PAGE.read_text(encoding="utf-8") == done.stdout, "headloom list --markdown > docs/mechanisms.md"


def test_forms_and_numbers(found):
    """D = 768, H = 12, K = 64; gqa takes G = 3; sas E = 36, J = 80; iha P = 2 in a comparison."""
    assert set(found) == set(mechanisms())
    cells = {name: (entry.cache, entry.flops, entry.grafts) for name, entry in found.items()}
    assert cells["mha"] == ("2 H K = 1,536", "T^2, 1 x", True)
    assert cells["gqa"] == ("2 G K = 384", "T^2, 1 x", True)
    assert cells["mqa"] == ("2 K = 128", "T^2, 1 x", True)
    assert cells["iha"] == ("2 G K = 1,536", "P^2 T^2, 4 x", True)
    assert cells["sas"][0] == f"E J + E K = {36 * (80 + 64):,}" and cells["sas"][2]
    assert found["iha"].options == {"pseudo_heads": 2}
    assert found["mha"].parameters == 4 * SIZES["hidden_size"] ** 2


def test_every_form_gives_the_measured_number_elsewhere():
    for name, info in mechanisms().items():
        tiny = info.config_cls.tiny()
        assert any(cache_formula(info, tiny)), name


def test_sizes_remember_their_letters():
    G, K = SymbolicSize.named(6, "G"), SymbolicSize.named(10, "K")
    assert str(G // 2 * (2 * K) + K * G) == "2 G K" and G // 2 * (2 * K) + K * G == 120
    assert str(1 * (G + K) + 3) == "3 + G + K"
    assert type(G // 4) is int and type(G // K) is int
    assert (K * K * G).at({"K": 2, "G": 5}) == 20


@pytest.mark.parametrize("name", list(mechanisms()))
def test_what_is_said_of_grafts_is_what_a_graft_finds(name):
    """A tiny Llama with as many kv heads as heads, half, and one: at least one of them is kept by a graft, or none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    kept = []
    for kv_heads in (4, 2, 1):
        config = LlamaConfig(
            vocab_size=37, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=kv_heads,
            head_dim=6, intermediate_size=29, max_position_embeddings=32,
        )  # fmt: skip
        try:
            kept.append(headloom.graft(LlamaForCausalLM(config).double(), name).graft_report.exact)
        except headloom.HeadloomError:
            kept.append(False)
    assert grafts_exactly(name) == any(kept)


def test_the_light_list_is_the_registrys():
    """Names and titles are read from source; the registry, which runs it, says the same."""
    mechanisms_found, schedules_found = described()
    for found, known in ((mechanisms_found, mechanisms()), (schedules_found, schedules())):
        assert found == [{key: getattr(item, key) for key in LINES} for item in known.values()]
    assert json.loads(call("list", "--json").stdout) == mechanisms_found
    done = call("list")
    for part in (mechanisms()["iha"].summary, "arXiv:2507.07694", "schedule hybrid: "):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('name, title, paper = "a", "b", "c"\n    summary = "d"', dict(zip(LINES, "abcd", strict=True))),
        ('name = "a"\n    title = "b" + str(1)', {"name": "a"}),
        ("other = 3", {}),
    ],
)
def test_lines_of_a_class(source, expected):
    assert _texts(ast.parse(f"class A:\n    {source}").body[0]) == expected


def test_a_class_that_computes_its_lines_is_asked(monkeypatch):
    monkeypatch.setattr("headloom.lab.spec.names._texts", lambda node: {"name": "x"})
    assert [lines["name"] for lines in described()[0]] == list(mechanisms())


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["bench", "--help"]])
def test_starting_is_light(arguments):
    """What makes a start slow is what it imports: counted, not timed."""
    code = (
        "import sys\nfrom headloom.cli.app import app\n"
        f"try: app({arguments})\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'pandas', 'altair', 'numpy', 'scipy'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_import_adds_four_modules():
    """`import headloom` beside torch costs four small files of its own and nothing else."""
    code = "import sys, torch; a = set(sys.modules); import headloom; print(sorted(set(sys.modules) - a))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['headloom', 'headloom._hook', 'headloom.core', 'headloom.core.lazy']"


def test_table_json_and_wrong_calls():
    done = call("list", "--costs")
    assert done.exit_code == 0
    for part in (
        "graft keeps",
        "2 H K = 1,536",
        "schedule hybrid: ",
        "arXiv:2602.21371",
        "iha is measured with pseudo_heads=2",
    ):
        assert part in done.stdout
    rows = {row["name"]: row for row in json.loads(call("list", "--costs", "--json").stdout)}
    assert rows["mha"]["cache"] == "2 H K = 1,536" and rows["mha"]["grafts"] is True
    assert rows["mha"]["cache_elements"] == 1536 and rows["mha"]["scores"] == 1.0
    both = call("list", "--json", "--markdown")
    assert both.exit_code == 2 and "cannot go together" in both.stderr


def test_the_options_of_one():
    done = call("list", "iha")
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    assert "pseudo_heads an int or None; default none; in comparisons 2 P: pseudo-heads of each head." in text
    assert "4: FLOPs x" in text and "scores x 4" in text and "paired: FLOPs x" in text
    assert text.index("init_std") < text.index("Options of all mechanisms") < text.index("hidden_size")
    found = {row["name"]: row for row in json.loads(call("list", "bilinear", "--json").stdout)}
    assert found["channels"]["own"] and found["channels"]["costs"]["4"]["parameters"] == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["list", "ihaa"], "Did you mean 'iha'?"), (["list", "iha", "--costs"], "--markdown and --costs show all")],
)
def test_wrong_calls_of_list(arguments, message):
    done = call(*arguments)
    assert done.exit_code == 2 and message in done.stderr
