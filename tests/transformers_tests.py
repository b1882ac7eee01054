"""Fetches transformers' own test of every model, `tests/test_modeling_common.py`, from the installed version's sdist.

    python tests/transformers_tests.py

It is downloaded by pip into .cache/ once for each version and never committed. The two files that it imports beside it
are stubs: generation and export have tests of their own here.
"""

import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "transformers_tests_of_the_sdist"
STUBS = {"generation/test_utils.py": "GenerationTesterMixin", "exporters/test_export.py": "ExportTesterMixin"}


def folder() -> Path:
    """Where the installed version's file is, or would be."""
    version = importlib.metadata.version("transformers")
    return Path(__file__).resolve().parents[1] / ".cache" / f"transformers-{version}"


def fetch() -> Path:
    """Make `folder()`, whole or not at all."""
    found, version = folder(), importlib.metadata.version("transformers")
    if found.is_dir():
        return found
    found.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=found.parent) as partial:
        call = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", "transformers"]
        subprocess.run([sys.executable, "-m", "pip", *call, "--dest", partial, f"transformers=={version}"], check=True)
        with tarfile.open(next(Path(partial).glob("*.tar.gz"))) as sdist:
            source = sdist.extractfile(f"transformers-{version}/tests/test_modeling_common.py")
            assert source is not None, "transformers' sdist holds its common tests"
            text = source.read()
        whole = Path(partial) / "whole"
        package = whole / PACKAGE
        for file, name in STUBS.items():
            (package / file).parent.mkdir(parents=True)
            (package / file).with_name("__init__.py").touch()
            (package / file).write_text(f"class {name}:\n    pass\n", encoding="utf-8")
        (package / "__init__.py").touch()
        (package / "test_modeling_common.py").write_bytes(text)
        whole.replace(found)
    return found


if __name__ == "__main__":
    print(fetch())
