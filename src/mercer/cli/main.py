"""The command `mercer`."""

from __future__ import annotations

import sys
from typing import NoReturn

# Exit codes of what the commands do not handle themselves.
NO_MEMORY, UNEXPECTED, INTERRUPTED, PIPE_CLOSED = 1, 4, 130, 141


def main() -> None:
    """Run the command, or say what to install; no error ends in a traceback."""
    try:
        try:
            from .commands import app
        except ModuleNotFoundError as error:
            if error.name not in ("typer", "rich", "click"):
                raise
            sys.exit(f"the command needs {error.name}: pip install 'mercer[cli]'")
        app(prog_name="mercer")
    except SystemExit as error:
        # typer ends in silence after Ctrl-C.
        if isinstance(getattr(error.__context__, "__cause__", None), KeyboardInterrupt):
            _end("stopped", INTERRUPTED)
        # typer and rich end with 1 where the reader of the output closed it.
        if error.code == 1 and _broken_pipe(error):
            sys.exit(PIPE_CLOSED)
        raise
    except KeyboardInterrupt:
        _end("stopped", INTERRUPTED)
    except MemoryError:
        _end("error: the memory is full", NO_MEMORY)
    except Exception as error:
        # torch has no class of its own for a full memory of the CPU.
        if "can't allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError":
            _end("error: the memory is full", NO_MEMORY)
        _report(error)


def _broken_pipe(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, BrokenPipeError):
        error = error.__context__
    return error is not None


def _report(error: Exception) -> NoReturn:
    from .failure import describe, write_details

    path = write_details(error)
    where = "could not be written" if path is None else f"are in {path}"
    _end(f"error: this was not expected ({describe(error)}); the details {where}", UNEXPECTED)


def _end(message: str, code: int) -> NoReturn:
    # The message may have characters that the terminal's encoding lacks.
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    sys.stderr.write(message.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
