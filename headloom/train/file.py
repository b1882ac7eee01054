"""A run's file: YAML (or JSON) with the fields of RunConfig and the text that the model is trained on.

    name: my run
    specs: [[iha, {pseudo_heads: 2}]]
    hidden_size: 128
    ...
    data: stdlib              # as headloom.data.load_corpus takes it
    text_column: null         # of tables and data sets: the column that holds the text; null: text
    tokenizer: bytes
    validation_bytes: 65536   # null: all held-out text

`accelerate launch -m headloom.train FILE` trains it over several devices.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headloom.core.errors import HeadloomError, near
from headloom.core.files import write_text
from headloom.records.runs import RUN_YAML, RunResult
from headloom.train import tracking
from headloom.train.config import RunConfig, check_device, evaluation_bytes

if TYPE_CHECKING:
    from headloom.train.trainer import OnProgress


class Text(BaseModel):
    """The text and the tokenizer with which a run is trained and measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str = Field(default="stdlib", min_length=1)
    text_column: str | None = Field(default=None, min_length=1)
    tokenizer: str = Field(default="bytes", min_length=1)
    validation_bytes: int | None = Field(default=2**20, ge=1)


def read_run(path: str | Path) -> tuple[RunConfig, Text]:
    """Read a run from a file. Raises HeadloomError (one line) if the file does not describe a run; for an unknown key
    it suggests a similar one."""
    return parse_run(read_mapping(path), str(path))


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The keys and values in a run's file."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadloomError(
            f"'{path}' does not exist: give a run's YAML file (headloom train writes {RUN_YAML})"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise HeadloomError(f"'{path}' cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise HeadloomError(f"'{path}' must hold a run's keys and values, not {type(found).__name__}")
    return found


def parse_run(values: dict[str, Any], source: str) -> tuple[RunConfig, Text]:
    """A run from keys and values. `source`: where they come from, for error messages."""
    known = [*RunConfig.model_fields, *Text.model_fields]
    for key in values:
        if key not in known:
            raise HeadloomError(f"{source}: unknown key '{key}'.{near(str(key), known)} Known: {', '.join(known)}")
    run = RunConfig(**{key: value for key, value in values.items() if key in RunConfig.model_fields})
    return run, text_of({key: value for key, value in values.items() if key in Text.model_fields})


def text_of(values: dict[str, Any]) -> Text:
    """The text that these values describe. Raises HeadloomError for wrong values."""
    try:
        return Text(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise HeadloomError(f"{first['loc'][0]}={first['input']!r}: {first['msg'].lower()}") from None


def check_run(run: RunConfig, text: Text, folder: str | Path, *, track: str | None = None) -> None:
    """Raise HeadloomError for errors in names and paths and for a missing GPU. No text is read, and torch is imported
    only to look for a GPU."""
    from headloom.data.corpus import check_corpus
    from headloom.data.tokenizer import check_tokenizer

    tracking.check_tracker(track)
    check_corpus(text.data, text_column=text.text_column)
    check_tokenizer(text.tokenizer)
    if Path(folder).exists() and not Path(folder).is_dir():
        raise HeadloomError(f"'{folder}' is a file, not a folder: give a folder of its own")
    check_device(run.device)


def train_text(
    run: RunConfig,
    text: Text,
    folder: str | Path,
    on_progress: OnProgress | None = None,
    *,
    on_note: Callable[[str], None] | None = None,
    **options: Any,
) -> RunResult:
    """Read the text, train the run in `folder`, and write the run's file there too.

    `on_note` is called with each note on the text; `options` are those of `headloom.train.run.train`.
    """
    import yaml

    check_run(run, text, folder, track=options.get("track"))
    from headloom.data.corpus import load_corpus
    from headloom.data.packing import prepare
    from headloom.data.tokenizer import make_tokenizer
    from headloom.train.run import train, writes_records

    corpus = load_corpus(text.data, text_column=text.text_column)
    tokenizer = make_tokenizer(text.tokenizer, [document.text for document in corpus.train])
    leading = run.evaluation_bytes or evaluation_bytes(run.tokens_trained, run.evaluations)
    data = prepare(corpus, tokenizer, context=run.tokens, validation_bytes=text.validation_bytes, leading_bytes=leading)
    if on_note is not None and writes_records():
        for note in data.notes:
            on_note(note)
    result = train(run, data, tokenizer, folder, on_progress, **options)
    if writes_records():
        written = {**run.model_dump(mode="json", exclude_defaults=True), **text.model_dump()}
        write_text(Path(folder) / RUN_YAML, yaml.safe_dump(written, sort_keys=False, allow_unicode=True))
    return result
