"""One writer a folder: a lock that the operating system holds for a process and takes back when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from headloom.core.errors import HeadloomError

LOCK = ".headloom-lock"  # a kill leaves this empty file behind; what counts is whether a process holds it


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder while writing into it; one that does not exist is made, and is gone again if it stays empty.

    A second process is refused, or with `wait` waits, instead of mixing its files in. The thread that holds a folder
    may hold it once more. Raises HeadloomError when another process holds it, or nothing can be written there.
    """
    if folder.exists() and not folder.is_dir():
        raise HeadloomError(f"'{folder}' is a file, not a folder: give a folder of its own")
    with _made(folder), held(folder / LOCK, what=folder, wait=wait):
        yield


@contextmanager
def claimed(place: Path) -> Iterator[None]:
    """Hold a place where a file or folder will be, by a lock beside it. Raises as `locked`."""
    with _made(place.parent), held(place.with_name(f".{place.name}{LOCK}"), what=place):
        yield


@contextmanager
def held(file: Path, *, what: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock `file`, which is made if absent, while writing `what`. As `locked`."""
    lock = FileLock(file, is_singleton=True)
    try:
        lock.acquire(timeout=None if wait else 0)
    except Timeout:
        raise HeadloomError(f"another process is writing '{what}': wait for it, or choose another --out") from None
    except OSError as error:
        raise _not_writable(what, error) from None
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            with contextlib.suppress(OSError):  # Windows removes no open file
                file.unlink()  # whoever opened it meanwhile sees that it is gone, and asks for a new one
        lock.release()


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder, with those above it; the ones made here that are empty at the end are gone again."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_writable(folder, error) from None
        yield
    finally:
        for place in made:
            with contextlib.suppress(OSError):  # it is not empty
                place.rmdir()


def is_locked(folder: Path) -> bool:
    """Whether a process is writing the folder."""
    if not (folder / LOCK).is_file():
        return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # somebody else's folder, in which a lock cannot be tried
        return False


def _not_writable(place: Path, error: OSError) -> HeadloomError:
    return HeadloomError(f"'{place}' cannot be written ({error.strerror}): choose another --out")
