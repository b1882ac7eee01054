"""Only one process writes to a folder at a time. The operating system releases a process's locks when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from headloom.core.errors import HeadloomError

LOCK = ".headloom-lock"  # a killed process leaves this empty file behind; a folder is in use only while one holds it


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder while writing into it. A missing folder is created, and removed again if it stays empty.

    A second process gets a HeadloomError, or waits if `wait` is true. The thread that has locked a folder may lock it
    again. Raises HeadloomError when another process has locked it, and when nothing can be written there.
    """
    if folder.exists() and not folder.is_dir():
        raise HeadloomError(f"'{folder}' is a file, not a folder: give a folder of its own")
    with _made(folder), held(folder / LOCK, what=folder, wait=wait):
        yield


@contextmanager
def claimed(place: Path) -> Iterator[None]:
    """Lock a path at which a file or folder will be written, by a lock file next to it. Raises as `locked`."""
    with _made(place.parent), held(place.with_name(f".{place.name}{LOCK}"), what=place):
        yield


@contextmanager
def held(file: Path, *, what: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `file`, which is created if missing, while writing `what`. Waits and raises as `locked`."""
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
            with contextlib.suppress(OSError):  # Windows does not remove an open file
                file.unlink()  # a process that has opened it in the meantime notices, and creates a new one
        lock.release()


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; those created here that are empty at the end are removed again."""
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
    """Whether a process has locked the folder."""
    if not (folder / LOCK).is_file():
        return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder of somebody else, in which this process may not open the lock file
        return False


def _not_writable(place: Path, error: OSError) -> HeadloomError:
    return HeadloomError(f"'{place}' cannot be written ({error.strerror}): choose another --out")
