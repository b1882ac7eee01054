"""`headloom finetune`: two arms that differ in the graft alone, kept runs, and wrong calls."""

import json

import pytest
from transformers import AutoModelForCausalLM, BertConfig, BertModel

import headloom as hl
from headloom.core.locks import LOCK
from headloom.data.corpus import load_corpus
from headloom.data.packing import prepare
from headloom.data.tokenizer import make_tokenizer
from headloom.evaluate.bits import bits_per_byte

SMALL = ["--tokens", "16", "--batch-size", "2", "--steps", "4", "--threads", "1", "--validation-bytes", "600",
         "--learning-rate", "1e-2"]  # fmt: skip


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(f"the {i} brown foxes jump over {i * i % 97} dogs" for i in range(400)))
    return path


@pytest.fixture
def tune(call, llama_folder, text_file):
    def run(out, *arguments, model=llama_folder, data=text_file):
        return call("finetune", model, "--data", data, "--out", out, *SMALL, *arguments)

    return run


IHA = ["--to", "iha", "--set", "pseudo_heads=2"]


@pytest.fixture(scope="module")
def tuned(llama_folder, text_file, tmp_path_factory):
    from typer.testing import CliRunner

    from headloom.cli.app import app

    out = tmp_path_factory.mktemp("finetune") / "study"
    arguments = ["finetune", str(llama_folder), "--data", str(text_file), "--out", str(out), "--seeds", "2"]
    return CliRunner().invoke(app, [*arguments, *SMALL, *IHA, "--layers", "0"]), out


def measured(model, text_file):
    data = prepare(load_corpus(text_file), make_tokenizer("bytes"), context=16, validation_bytes=600)
    return bits_per_byte(model.eval(), data.validation, context=16).bits_per_byte


def test_both_arms_before_and_after(tuned, llama_folder, text_file):
    done, out = tuned
    assert done.exit_code == 0, done.output
    found = json.loads((out / "result.json").read_text())
    assert found["complete"] and list(found["arms"]) == ["grafted", "ungrafted"]
    grafted, plain = found["arms"].values()
    start = measured(AutoModelForCausalLM.from_pretrained(llama_folder), text_file)
    assert plain["before"]["bits_per_byte"] == pytest.approx(start, rel=1e-6)
    assert grafted["before"]["bits_per_byte"] == pytest.approx(start, rel=1e-4), "a graft starts as its original"
    assert grafted["before"]["parameters"] - plain["before"]["parameters"] == 96  # P H (H + 2 G) + H^2 P
    assert grafted["graft"]["layers"] == "0" and plain["graft"] is None
    for name, arm in found["arms"].items():
        assert [run["seed"] for run in arm["runs"]] == [0, 1]
        for run in arm["runs"]:
            assert run["bits_per_byte"] < start - 0.1
            model = AutoModelForCausalLM.from_pretrained(out / name / f"seed-{run['seed']}" / "model")
            assert measured(model, text_file) == pytest.approx(run["bits_per_byte"], rel=1e-5)
    assert "iha in 1 of 2 layers; 96 parameters added" in done.stdout
    after = [[run["bits_per_byte"] for run in arm["runs"]] for arm in (grafted, plain)]
    difference = sum(a - b for a, b in zip(*after, strict=True)) / 2
    assert f"grafted minus ungrafted: {difference:+.4f} bits per byte (95 % interval" in done.stdout
    assert f"{start:.4f}" in done.stdout and "token-weighted; context 16" in done.stdout
    assert "2/4 ungrafted seed 0:" in done.stderr
    assert all(done.output.count(note) == 1 for note in found["notes"])


def test_both_arms_see_the_same_rows_at_the_same_rates(tuned):
    _, out = tuned
    lines = {
        name: [json.loads(line) for line in (out / name / "seed-0" / "metrics.jsonl").read_text().splitlines()]
        for name in ("grafted", "ungrafted")
    }
    rates = {name: [line["learning_rate"] for line in found[:-1]] for name, found in lines.items()}
    assert len(rates["grafted"]) == 4 and rates["grafted"] == rates["ungrafted"]
    first = [found[0]["loss"] for found in lines.values()]
    assert first[0] == pytest.approx(first[1], rel=1e-4), "the same rows, and still the same function"
    configs = [json.loads((out / name / "seed-1" / "config.json").read_text()) for name in lines]
    assert {key for key in configs[0] if configs[0][key] != configs[1][key]} == {"name", "graft"}


def test_finished_runs_are_kept(tuned, tune, monkeypatch):
    _, out = tuned
    before = json.loads((out / "result.json").read_text())
    (out / "grafted" / "seed-1" / "result.json").unlink()
    started, asked = [], []
    monkeypatch.setattr("headloom.cli.finetune.keep_freed", lambda: asked.append("keeps freed memory"))
    import headloom.train.finetune as module

    real = module.train
    monkeypatch.setattr(
        module, "train", lambda config, *a, **k: started.append((config.name, config.seed)) or real(config, *a, **k)
    )
    done = tune(out, *IHA, "--layers", "0", "--seeds", "2", "--json")
    assert asked == ["keeps freed memory"]
    assert done.exit_code == 0, done.output
    assert started == [("grafted", 1)]
    again = json.loads(done.stdout)
    for name, arm in before["arms"].items():
        for one, other in zip(arm["runs"], again["arms"][name]["runs"], strict=True):
            assert one["bits_per_byte"] == other["bits_per_byte"], "a run made again gives the same numbers"
    other = tune(out, *IHA, "--layers", "0", "--seeds", "2", "--learning-rate", "1e-3")
    assert other.exit_code == 2 and "holds another fine-tuning" in other.stderr


def test_an_interrupted_run_goes_on_from_its_checkpoint(tuned, tune, tmp_path, monkeypatch):
    """Stopped in its third step and started again: bit-equal to the run that nobody disturbed."""
    import headloom.train.finetune as module

    real, seen = module.train, []

    def stopping(config, data, tokenizer, folder, on_progress, **more):
        def watch(step, steps, loss):
            seen.append((config.name, step))
            if seen == [("grafted", 1), ("grafted", 2), ("grafted", 3)]:
                raise KeyboardInterrupt

        return real(config, data, tokenizer, folder, watch, **{**more, "checkpoint_seconds": 0})

    monkeypatch.setattr(module, "train", stopping)
    out = tmp_path / "out"
    assert tune(out, *IHA, "--layers", "0").exit_code == 130
    assert (out / "grafted" / "seed-0" / "checkpoints" / "step-2").is_dir()
    done = tune(out, *IHA, "--layers", "0", "--json")
    assert done.exit_code == 0, done.output
    assert seen[3:] == [("grafted", 3), ("grafted", 4), *(("ungrafted", step) for step in (1, 2, 3, 4))]
    undisturbed = json.loads((tuned[1] / "result.json").read_text())
    for name, arm in json.loads(done.stdout)["arms"].items():
        one, other = arm["runs"][0], undisturbed["arms"][name]["runs"][0]
        assert all(one[key] == other[key] for key in ("bits_per_byte", "train_loss", "weights", "tokens"))
    assert not (out / "grafted" / "seed-0" / "checkpoints").exists()


def test_mixes_may_have_a_rate_of_their_own(tuned, tune, tmp_path):
    done = tune(tmp_path / "out", *IHA, "--layers", "0", "--mix-learning-rate", "0.5", "--json")
    assert done.exit_code == 0, done.output
    found, usual = json.loads(done.stdout), json.loads((tuned[1] / "result.json").read_text())
    grafted, plain = (
        [study["arms"][name]["runs"][0]["bits_per_byte"] for study in (found, usual)]
        for name in ("grafted", "ungrafted")
    )
    assert plain[0] == plain[1] and abs(grafted[0] - grafted[1]) > 1e-3
    mixes = [
        AutoModelForCausalLM.from_pretrained(folder / "grafted" / "seed-0" / "model")
        for folder in (tmp_path / "out", tuned[1])
    ]
    one, other = (model.model.layers[0].self_attn.q_mix.weight for model in mixes)
    start = other.round()  # zeros and ones
    assert (one - start).abs().max() > 5 * (other - start).abs().max()


def test_a_model_that_is_a_graft_already(tune, llama_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    model = hl.graft(model, "iha", pseudo_heads=2)
    model.save_pretrained(tmp_path / "graft")
    make_tokenizer("bytes").save_pretrained(tmp_path / "graft")

    def line(*arguments):
        done = tune(tmp_path / "out", *arguments, model=tmp_path / "graft")
        assert done.exit_code == 2 and not (tmp_path / "out").exists()
        return done.stderr

    assert "give --original MODEL to compare with, or --only-grafted" in line()
    assert "leave --to out" in line(*IHA)
    assert "is a graft itself" in line("--original", tmp_path / "graft")
    assert "cannot go together" in line("--original", llama_folder, "--only-grafted")
    done = tune(tmp_path / "out", "--original", llama_folder, "--json", model=tmp_path / "graft")
    assert done.exit_code == 0, done.output
    arms = json.loads(done.stdout)["arms"]
    assert arms["ungrafted"]["model"] == str(llama_folder)
    assert arms["grafted"]["before"]["parameters"] > arms["ungrafted"]["before"]["parameters"]
    alone = tune(tmp_path / "alone", "--only-grafted", model=tmp_path / "graft")
    assert alone.exit_code == 0 and "ungrafted" not in alone.stdout


def test_two_at_once_are_refused_and_a_killed_one_blocks_nobody(tune, held_elsewhere, tmp_path):
    held_elsewhere(tmp_path / "out")
    done = tune(tmp_path / "out", *IHA)
    assert done.exit_code == 2 and "another process is writing" in done.stderr and "Traceback" not in done.output
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == [LOCK]
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / LOCK).touch()
    done = tune(tmp_path / "killed", *IHA, "--only-grafted")
    assert done.exit_code == 0, done.output


def test_a_run_that_fails(tune, tmp_path):
    done = tune(tmp_path / "out", *IHA, "--learning-rate", "1e30")
    assert done.exit_code == 1 and "run 'grafted' stopped at step" in done.stderr
    assert "Traceback" not in done.output and (tmp_path / "out" / "grafted" / "seed-0" / "failure.json").is_file()


def test_control_c_keeps_what_is_finished(tune, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("headloom.train.finetune.train", interrupt)
    done = tune(tmp_path / "out", *IHA)
    assert done.exit_code == 130 and "give the same command to continue" in done.stderr


def test_a_saved_data_set_by_its_column_and_its_own_validation_split(tune, tmp_path):
    import datasets

    datasets.disable_progress_bars()
    rows = [f"the {i} brown foxes jump over {i * i % 97} dogs" for i in range(60)]
    train = datasets.Dataset.from_dict({"text": ["wrong"] * 40, "body": rows[:40]})
    held = datasets.Dataset.from_dict({"text": ["wrong"] * 20, "body": rows[40:]})
    datasets.DatasetDict(train=train, validation=held).save_to_disk(tmp_path / "set")
    datasets.enable_progress_bars()
    arguments = [*IHA, "--only-grafted", "--validation-bytes", "5000", "--json"]
    done = tune(tmp_path / "out", *arguments, "--text-column", "body", data=tmp_path / "set")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert "validated on 'validation'" in found["data"]
    assert found["arms"]["grafted"]["runs"][0]["validation_bytes"] == sum(map(len, rows[40:]))
    wrong = tune(tmp_path / "other", *arguments, "--text-column", "bodi", data=tmp_path / "set")
    assert wrong.exit_code == 2 and "no 'bodi' column; it has: text, body. Did you mean 'body'" in wrong.stderr


def test_a_tokenizer_that_loses_text_is_refused(tune, llama_folder, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel(
            {w: i for i, w in enumerate(["?", "the", "brown", "fox", "jumps", "over", "dogs", "end"])}, "?"
        )
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(llama_folder).save_pretrained(model)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="end").save_pretrained(model)
    done = tune(tmp_path / "out", *IHA, model=model)
    assert done.exit_code == 2 and "the tokenizer loses text: at least" in done.stderr and "'bytes'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_calls_leave_nothing_behind(tune, llama_folder, tmp_path):
    empty, bert, out = tmp_path / "empty.txt", tmp_path / "bert", tmp_path / "out"
    empty.write_text("")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=300, **sizes)).save_pretrained(bert)
    make_tokenizer("bytes").save_pretrained(bert)
    for arguments, given, part in (
        (IHA, {"data": empty}, "no text in file 'empty.txt'"),
        (IHA, {"data": tmp_path / "none.txt"}, "does not exist"),
        (IHA, {"model": tmp_path / "none"}, "does not exist"),
        (IHA, {"model": bert}, "no causal language model"),
        (["--to", "ihaa"], {}, "Did you mean 'iha'?"),
        ([], {}, "name the attention it should get with --to"),
        ([*IHA, "--layers", "7"], {}, "layer 7 does not exist"),
        ([*IHA, "--original", llama_folder], {}, "that is already a graft, and"),
        ([*IHA, "--tokens", "99"], {}, "tokens must be at most 64"),
        ([*IHA, "--seeds", "0"], {}, "seeds must be at least 1"),
        ([*IHA, "--dtype", "float16"], {}, "dtype="),
    ):
        done = tune(out, *arguments, **given)
        assert done.exit_code == 2, done.output
        assert part in done.stderr.splitlines()[-1]
        assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    done = tune(out, *IHA)
    assert done.exit_code == 2 and "exists and is not empty" in done.stderr
    assert [entry.name for entry in out.iterdir()] == ["mine.txt"]


def test_another_tokenizer_is_refused(tune, llama_folder, plain_llama, text_file, tmp_path):
    plain_llama(vocab_size=300).save_pretrained(tmp_path / "other")
    make_tokenizer("bpe:300", [text_file.read_text()]).save_pretrained(tmp_path / "other")
    assert tune(tmp_path / "out", "--only-grafted", *IHA, "--steps", "1").exit_code == 0
    graft = tmp_path / "out" / "grafted" / "seed-0" / "model"
    done = tune(tmp_path / "two", "--original", tmp_path / "other", model=graft)
    assert done.exit_code == 2 and "has another tokenizer than" in done.stderr


def test_another_vocabulary_is_refused(tune, plain_llama, tmp_path):
    specials = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    plain_llama(vocab_size=200, **specials).save_pretrained(tmp_path / "small")
    make_tokenizer("bytes").save_pretrained(tmp_path / "small")
    done = tune(tmp_path / "out", *IHA, model=tmp_path / "small")
    assert done.exit_code == 2 and "knows 200 tokens, its tokenizer makes 258" in done.stderr
