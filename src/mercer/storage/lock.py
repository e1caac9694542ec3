"""A lock on a file. The system releases it when the process that holds it ends, also by a kill.

Requirements: a process that was refused changes nothing; only the holder may remove the file; a
child of the holder, such as a worker that loads data, does not keep the lock when the holder ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import weakref
from pathlib import Path

# The answers of a disk that has no locks.
NONE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class NoLocks(OSError):
    """The disk has no locks."""


class Lock:
    """A lock on a file of its own, which is created and stays empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    @property
    def held(self) -> bool:
        return self._handle is not None

    def take(self, *, wait: bool = False) -> bool:
        """Take the lock, and make its folder; False if another process or object holds it."""
        assert self._handle is None
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:
                if self.path.parent.is_dir():
                    raise
                # The holder has just removed the folder.
                continue
            try:
                taken = _lock(handle, wait)
                # The holder may have removed the file after it was opened here.
                if taken and self._is_file_of(handle):
                    self._handle, handle = handle, -1
                    _held.add(self)
                    return True
                if not taken and not wait:
                    return False
            except OSError as error:
                if error.errno in NONE:
                    said = "this disk has no file locks; use a folder on another disk"
                    raise NoLocks(error.errno, said, str(self.path)) from None
                raise
            finally:
                if handle >= 0:
                    os.close(handle)
            if not taken:
                time.sleep(0.1)

    def release(self, *, remove: bool = False) -> None:
        """Release the lock if this object holds it; `remove` deletes the file, too."""
        if self._handle is None:
            return
        if remove and sys.platform != "win32":
            # Before the release: afterwards the file may be another process's lock.
            self.path.unlink(missing_ok=True)
        # For a child as well that was forked a moment ago.
        _unlock(self._handle)
        self.drop()
        if remove and sys.platform == "win32":
            # Windows deletes no open file, so another process's lock stays.
            with contextlib.suppress(OSError):
                self.path.unlink()

    def drop(self) -> None:
        """Close the file. The lock stays if this is a forked child of the holder."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            _held.discard(self)

    def __del__(self) -> None:
        self.drop()

    def _is_file_of(self, handle: int) -> bool:
        if sys.platform == "win32":
            # It deletes no open file.
            return True
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except FileNotFoundError:
            return False


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int, wait: bool) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def _unlock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _lock(handle: int, wait: bool) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def _unlock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_UN)


# The locks of this process. A forked child shares the open files, and with them the locks.
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget() -> None:
    for lock in list(_held):
        lock.drop()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)
