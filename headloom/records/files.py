"""Files of records: each kind has a name, a schema and a format, and is written and read here alone.

A file says its format in the first field. When the form of a kind of file changes, its `format` goes up by one and
`upgrades` gets the step from the form before, so that old folders are read; or the step is left out, and they are
refused in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError

from headloom.core.errors import HeadloomError
from headloom.core.files import write_json

R = TypeVar("R")
Fields = dict[str, JsonValue]
Upgrade = Callable[[Fields], Fields]


class Record(BaseModel):
    """A base of schemas: frozen, and no field may be missing or unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_dict(self) -> dict[str, Any]:
        """JSON values, in the order of the fields; the schema reads them back as an equal record."""
        return self.model_dump(mode="json")


@dataclass(frozen=True)
class RecordFile(Generic[R]):
    """One kind of file.

    Args:
        name: of the file in its folder.
        schema: what is in it: a class of records, or another type that pydantic knows.
        format: the number of the form that is written.
        unstated: the format of files that say none (None: such a file is damaged).
        upgrades: format -> how its fields become those of the next one. Formats that lead nowhere are refused.
        missing: what to do where the file is absent, for the error: "give the folder that ... wrote".
    """

    name: str
    schema: type[R]
    format: int
    unstated: int | None = None
    upgrades: Mapping[int, Upgrade] = field(default_factory=dict)
    missing: str = ""

    def write(self, folder: Path, record: R) -> None:
        """Write the record whole or not at all. Raises DiskFull, and ValueError for NaN and infinities."""
        write_json(folder / self.name, self.fields(record))

    def fields(self, record: R) -> dict[str, Any]:
        """What is written of a record, as JSON values."""
        return {"format": self.format, **TypeAdapter(self.schema).dump_python(record, mode="json")}

    def is_in(self, folder: Path) -> bool:
        """Whether there is such a file."""
        return (folder / self.name).is_file()

    def read(self, folder: Path) -> R:
        """The record in the folder's file.

        Raises HeadloomError, one sentence that names the file and what is wrong with it: absent, damaged, of a format
        that this version cannot read, or with a field that is unknown, missing or of a wrong type.
        """
        found = self.read_if_there(folder)
        if found is None:
            raise HeadloomError(f"'{folder}' holds no {self.name}" + (f": {self.missing}" if self.missing else ""))
        return found

    def read_if_there(self, folder: Path) -> R | None:
        """The same, and None where there is no such file."""
        path = folder / self.name
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise HeadloomError(f"'{path}' cannot be read: {error}") from None
        return self.parse(text, path)

    def parse(self, text: str, path: Path) -> R:
        """The record that `text`, the content of `path`, holds. Raises as `read`."""
        return checked(self.schema, self._of_this_format(_mapping(text, path), path), path)

    def _of_this_format(self, fields: Fields, path: Path) -> Fields:
        stated = fields.pop("format", self.unstated)
        if type(stated) is not int or stated < 1:
            said = "no format" if stated is None else f"the format {stated!r}"
            raise HeadloomError(f"'{path}' says {said}, so it is no {self.name} of headloom, or damaged")
        if stated > self.format:
            raise HeadloomError(
                f"'{path}' has format {stated}, which a newer version of headloom wrote; this one reads formats up to "
                f"{self.format}: use the newer version"
            )
        for number in range(stated, self.format):
            if number not in self.upgrades:
                raise HeadloomError(
                    f"'{path}' has format {stated}, which this version of headloom no longer reads (it reads format "
                    f"{self.format}): make it again in a new folder, or use the version that wrote it"
                )
            fields = self.upgrades[number](fields)
        return fields


def checked(schema: type[R], fields: Mapping[str, Any], path: Path) -> R:
    """What the fields of a file are, by a schema. Raises HeadloomError, which names the file and the field."""
    try:
        return TypeAdapter(schema).validate_json(json.dumps(fields))
    except ValidationError as error:
        raise HeadloomError(f"'{path}' {complaint(error)}") from None


def complaint(error: ValidationError) -> str:
    """What is wrong with a file's content, after its name: the first field that is, and the way out.

    >>> try:
    ...     TypeAdapter(int).validate_python("many")
    ... except ValidationError as error:
    ...     complaint(error).partition(":")[0]
    "holds 'many', which is not what belongs there"
    """
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        what = f"has the unknown field '{where}'"
    elif first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        what = f"lacks the field '{where}'"
    else:
        held = repr(first["input"])
        shown = held if len(held) < 80 else held[:77] + "..."
        place = f"in the field '{where}'" if where else "there"
        message = first["msg"][0].lower() + first["msg"][1:]
        return f"holds {shown}, which is not what belongs {place}: {message}"
    return f"{what}: it was changed by hand, or another version of headloom wrote it"


def _mapping(text: str, path: Path) -> Fields:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise HeadloomError(f"'{path}' is damaged, no JSON: {error}. Remove it, or bring a copy back") from None
    if not isinstance(found, dict):
        raise HeadloomError(f"'{path}' is damaged: it holds a {type(found).__name__}, not fields with names")
    return found
