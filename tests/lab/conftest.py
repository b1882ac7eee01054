import pytest

collect_ignore = ["deadly_worker.py"]  # a program, which importing would let loose

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A text of 60 kB that is not the same line over and over."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    lines = (" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 9)) + f" {i}" for i in range(1200))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def small(text_file):
    """Arguments of a comparison that takes seconds."""
    return {
        "data": text_file,
        "tokens": 16,
        "batch_size": 2,
        "steps": 3,
        "seeds": 2,
        "threads": 1,
        "report": False,
        "engine": "inline",
    }
