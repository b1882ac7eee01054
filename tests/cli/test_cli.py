import io
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from headloom.cli.app import app
from headloom.core.errors import HeadloomError, RunError

SMALL = ["--tokens", "16", "--batch-size", "2", "--steps", "2", "--seeds", "2", "--threads", "1"]


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(f"the {i} brown foxes jump over {i * i % 97} dogs" for i in range(1500)))
    return str(path)


@pytest.fixture(scope="module")
def compared(text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "study"
    done = call("compare", "--variants", "mha,sas:kernel_size=1", "--data", text_file, "--out", str(folder), *SMALL)
    return done, folder


def test_compare_writes_the_study_and_prints_the_table(compared):
    done, folder = compared
    assert done.exit_code == 0, done.output
    for name in ("study.json", "results.json", "results.csv", "report.html", "figures/quality-time.svg"):
        assert (folder / name).is_file()
    results = json.loads((folder / "results.json").read_text())
    for variant in results["variants"]:
        assert f"{variant['parameters']:,}" in done.stdout
        assert f"{variant['cache_bytes_per_token']:,}" in done.stdout
    for headline in results["headlines"]:
        assert headline in done.stdout
    assert f"The page: {folder}/report.html" in done.stdout
    assert all(done.output.count(note) == 1 for note in results["notes"]), "on stderr before the runs, or at the end"
    assert "4/4 sas seed 1:" in done.stderr
    assert "4/4 sas seed 1:" not in done.stdout


@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_of_the_table_is_cut_off_in_a_narrow_terminal(compared, width):
    from rich.console import Console

    from headloom.cli.compare import WIDE, _table
    from headloom.records.reading import read_study
    from headloom.report import tables

    study = read_study(compared[1])
    rows = tables.rows(study)
    out = Console(width=width, record=True, file=io.StringIO())
    out.print(_table(tables.columns("mha"), rows, wide=width >= WIDE))
    text = out.export_text()
    assert "…" not in text
    letters = "".join(text.split())
    for row in rows:
        for cell in row.cells:
            for word in cell.split():
                assert word in letters or len(word) > 12, word


def test_compare_again_as_json_keeps_the_runs(compared, text_file):
    _, folder = compared
    variants = ["--variants", "mha,sas:kernel_size=1"]
    again = call("compare", *variants, "--data", text_file, "--out", str(folder), "--json", *SMALL)
    assert again.exit_code == 0, again.output
    found = json.loads(again.stdout)
    assert found["folder"] == str(folder)
    assert {name: found[name] for name in ("hash", "runs")} == {
        name: json.loads((folder / "results.json").read_text())[name] for name in ("hash", "runs")
    }
    assert "4 of 4 runs are finished already" in again.stderr


def test_what_a_library_prints_does_not_reach_the_json(compared, text_file, monkeypatch):
    import headloom.lab.study as lab

    real = lab.make_plan
    monkeypatch.setattr(lab, "make_plan", lambda *given: print("a library's chatter") or real(*given))
    variants = ["--variants", "mha,sas:kernel_size=1", "--data", text_file, "--out", str(compared[1]), *SMALL]
    again = call("compare", *variants, "--json")
    assert "chatter" in again.stderr
    assert json.loads(again.stdout)["status"] == "complete"


def test_compare_into_another_study(compared, text_file):
    _, folder = compared
    given = ["--variants", "mha,sas:kernel_size=1", "--data", text_file, "--out", str(folder), *SMALL]
    done = call("compare", *given, "--batch-size", "3")
    assert done.exit_code == 2
    assert "holds another study (batch_size 2 there, 3 here" in done.stderr.splitlines()[-1]


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs without processes of their own, which import for seconds."""
    from headloom.lab.run.engines.inline import Inline

    monkeypatch.setattr("headloom.lab.run.engines.local.Local", lambda bundle, **options: Inline(bundle))


def test_a_run_that_fails_gives_status_one_and_the_table_says_why(text_file, tmp_path, in_this_process):
    arguments = ["--variants", "mha,gqa", "--data", text_file, "--out", str(tmp_path / "s"), *SMALL]
    done = call("compare", *arguments, "--learning-rate", "1e30")
    assert done.exit_code == 1
    assert "failed" in done.stdout
    assert "stopped at step" in done.stdout
    assert "Traceback" not in done.output
    assert "runs failed" in (tmp_path / "s" / "report.html").read_text()


def test_control_c_says_how_to_go_on(text_file, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("headloom.lab.run.engines.local.Local.run", interrupt)
    done = call("compare", "--variants", "mha,gqa", "--data", text_file, "--out", str(tmp_path / "s"), *SMALL)
    assert done.exit_code == 130
    line = done.stderr.splitlines()[-1]
    assert line.startswith("stopped: 0 of 4 runs are finished and kept; to go on: headloom compare --variants mha,gqa")
    assert line.endswith(f"--out {tmp_path / 's'}")
    assert (tmp_path / "s" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--variants", "mha,ihaa"], ["unknown mechanism 'ihaa'. Did you mean 'iha'?"]),
        (["--variants", "mha,iha:pseudo_head=2"], ["Did you mean 'pseudo_heads'?"]),
        (["--set", "iha.ordr=token"], ["Did you mean 'order'?"]),
        (["--size", "tinny"], ["unknown size 'tinny'. Did you mean 'tiny'?"]),
        (["--steps", "0"], ["steps:", "not 0"]),
        (["--seeds", "0"], ["seeds must be"]),
        (["--threads", "0"], ["threads:"]),
        (["--data", "nowhere/text.txt"], ["'nowhere/text.txt' does not exist"]),
        (["--tokenizer", "byte"], ["unknown tokenizer 'byte'. Did you mean 'bytes'?"]),
        (["--tokens", "999999999"], ["too little text"]),
        (["--variants", "mha,iha:window=0"], ["window must be at least 1, not 0"]),
        (["--variants", "mha,mha"], ["given twice"]),
    ],
)
def test_wrong_calls_of_compare(arguments, parts, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("compare", *([] if "--data" in arguments else ["--data", text_file]), *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    for part in parts:
        assert part in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["compare", "--step", "many"], ["cmpare"], ["compare", "--steps", "many"]])
def test_usage_errors(arguments):
    assert call(*arguments).exit_code == 2


def test_the_status_follows_the_error(monkeypatch):
    for error, status in ((HeadloomError("a\nb"), 2), (RunError("c"), 1)):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr("headloom.costs.catalogue.mechanisms", fail)
        done = call("list", "--costs")
        assert done.exit_code == status
        assert done.stderr == f"error: {' '.join(str(error).split())}\n"


def test_list():
    done = call("list")
    assert done.exit_code == 0
    for part in ("iha", "arXiv:2602.21371", "sas", "arXiv:2507.07694", "Grouped-query attention"):
        assert part in done.stdout
    found = json.loads(call("list", "--costs", "--json").stdout)
    assert {entry["name"] for entry in found} >= {"mha", "gqa", "mqa", "iha", "sas"}
    assert all(entry[key] for entry in found for key in ("name", "title", "paper", "summary", "cache", "flops"))


PUBLISHED = ["hidden_size=768", "num_heads=12", "simulated_heads=36", "simulated_width=96", "kernel_size=1"]


@pytest.mark.parametrize(("order", "count"), [("head_first", 663_552), ("feature_first", 350_208)])
def test_cost_prints_the_published_counts(order, count):
    settings = [word for setting in (*PUBLISHED, f"order={order}") for word in ("--set", setting)]
    done = call("cost", "sas", *settings)
    assert done.exit_code == 0, done.output
    assert f"{count:,} multiply-adds per token" in done.stdout
    layer = json.loads(call("cost", "sas", *settings, "--json").stdout)["attention"]
    assert layer["simulation_multiply_adds"] == count
    assert layer["parameters"] == 4 * 768 * 768 + 36_504


def test_cost_at_ten_billion():
    done = call("cost", "iha", "--size", "10.6B", "--set", "pseudo_heads=2", "--tokens", "4096", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    layer, model = found["attention"], found["model"]
    D, H, K, P = 5120, 40, 128, 2
    assert layer["parameters"] == 4 * D * D + P * H * 3 * H + P * H * H
    # 32 layers, two untied embeddings, gated feed-forward, two norms a layer and one at the end
    F = model["intermediate_size"]
    assert model["parameters"] == 32 * (layer["parameters"] + 3 * D * F + 2 * D) + 2 * 50_304 * D + D
    assert model["nominal_parameters"] == 10_581_442_560
    assert layer["cache_bytes_per_token"] == 2 * H * K * 4
    assert model["cache_bytes_per_token"] == 32 * layer["cache_bytes_per_token"]
    score = {part["step"]: part for part in layer["parts"]}["score"]
    pseudo = P * 4096
    assert score["flops_full"] == 4 * H * K * pseudo * pseudo
    assert score["flops_exact"] == 4 * H * K * pseudo * (pseudo + 1) // 2


def test_cost_takes_options_either_way_and_settings_win():
    a = json.loads(call("cost", "iha:pseudo_heads=4", "--json").stdout)
    b = json.loads(call("cost", "iha:pseudo_heads=2", "--set", "iha.pseudo_heads=4", "--json").stdout)
    assert a == b
    half = json.loads(call("cost", "iha:pseudo_heads=4", "--dtype", "bfloat16", "--json").stdout)
    assert half["attention"]["cache_bytes_per_token"] * 2 == a["attention"]["cache_bytes_per_token"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["ihaa"], "Did you mean 'iha'?"),
        (["iha", "--set", "pseudo_heads"], "must look like name=value"),
        (["iha", "--set", "mha.pseudo_heads=2"], "unknown variant in --set 'mha'"),
        (["mha", "--set", "num_heads=7"], "num_heads 7"),
        (["mha", "--tokens", "0"], "tokens must be at least 1, not 0"),
        (["mha", "--dtype", "int3"], "dtype must be float32"),
        (["sas", "--set", "kernel_size=2"], "kernel_size"),
        (["gqa", "--set", "num_kv_heads=3"], "num_kv_heads must divide num_heads"),
    ],
)
def test_wrong_calls_of_cost(arguments, part):
    done = call("cost", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_and_version_start_without_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['altair'] = None\n"
        "from typer.testing import CliRunner\n"
        "from headloom.cli.app import app\n"
        "for arguments in (['--help'], ['compare', '--help'], ['cost', '--help'], ['--version']):\n"
        "    assert CliRunner().invoke(app, arguments).exit_code == 0, arguments\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)


def test_python_m_headloom():
    done = subprocess.run([sys.executable, "-m", "headloom", "--help"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0
    for command in ("compare", "list", "cost"):
        assert command in done.stdout


def test_what_a_study_calls_otherwise_is_said_as_the_option(tmp_path):
    done = call("compare", "--learning-rate", "-1", "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == "error: --learning-rate: input should be greater than 0, not -1.0"
    done = call("compare", "--batch-size", "0", "--out", str(tmp_path / "out"))
    assert done.stderr.splitlines()[-1] == "error: --batch-size: input should be greater than or equal to 1, not 0"
