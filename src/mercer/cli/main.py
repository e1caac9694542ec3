"""The command `mercer`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command, or say what to install."""
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"the command needs {error.name}: pip install 'mercer[cli]'")
    app()


if __name__ == "__main__":
    main()
