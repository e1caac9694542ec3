"""`python -m mercer` is the command `mercer`."""

from .cli.main import main

if __name__ == "__main__":
    main()
