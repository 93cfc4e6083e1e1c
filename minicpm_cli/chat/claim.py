"""One conversation at a time writes a session: a second one would write over what the first says."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import TracebackType

from minicpm_cli.disk import private_folder
from minicpm_cli.errors import UsageError


def lock_of(session: Path) -> Path:
    return session.with_name(f".{session.name}.lock")


class Claim:
    """Held until `release`, or until the process ends, however it ends.

    Raises UsageError when another one holds it for more than `patience` seconds.
    """

    def __init__(self, session: Path, patience: float = 0.0) -> None:
        from filelock import FileLock, Timeout

        path = lock_of(session)
        self._lock = FileLock(path, timeout=patience, mode=0o600)
        try:
            private_folder(path.parent)
            self._lock.acquire()
        except Timeout:
            name = session.name.removesuffix(session.suffix)
            raise UsageError(
                f"the session {name!r} is open in another minicpm chat. Leave it there, or begin another one: "
                "minicpm chat --session NAME"
            ) from None
        except (OSError, NotImplementedError):
            pass  # nothing can be written there, or locked: said when a message is to be kept

    def release(self) -> None:
        if self._lock.is_locked:
            with suppress(OSError):
                Path(self._lock.lock_file).unlink()
            self._lock.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
