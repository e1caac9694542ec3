"""Install a wheel as a user does, and run the first minute of the README.

    PYTHONPATH=tests python -m release.check WHEEL

Three new virtual environments, for torch alone, for [cli] and for [train]. pip takes the packages
from where it is configured to, which needs a network and minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from release.environment import Environment, first_minute

IMPORT = """
import mercer, torch
x = torch.randn(1, 2, 8, 4)
mercer.smooth(mercer.RBF(), x, x, x)
print(mercer.__version__, torch.__version__)
"""


def main(wheel: Path) -> None:
    for extra in ("", "cli", "train"):
        with tempfile.TemporaryDirectory() as folder:
            environment = Environment(Path(folder))
            name = f"{wheel}[{extra}]" if extra else str(wheel)
            print(f"pip install {name}", flush=True)
            environment.pip("install", name)
            environment.pip("check")
            print(environment.run("python", "-c", IMPORT), end="", flush=True)
            snippets, commands = first_minute()
            if extra == "cli":
                print(environment.run("mercer", "systems", "--plain"), end="", flush=True)
            if extra == "train":
                for snippet in snippets:
                    environment.run("python", "-c", snippet)
                for command in commands:
                    print(*command, flush=True)
                    environment.run(*command, timeout=1200)
    print("the wheel installs and runs")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
