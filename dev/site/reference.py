"""The pages that are made from the code: public names, the lists, and the command's options."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "mercer"

# What users import. A package says its public names in `__init__`; a file has those without `_`.
PUBLIC = (
    "nn", "systems", "parse", "models", "models.presets", "models.count", "data", "train", "use",
    "studies", "inspect", "integrations", "integrations.hf", "integrations.timm",
    "integrations.nanochat", "testing", "bench",
)  # fmt: skip
# What they reach through these: the inside, whose public names are those of `mercer` itself.
INSIDE = (
    "backends", "cli", "dispatch", "explain", "filters", "interrupt", "kernels", "memory", "names",
    "opaque", "own", "parallel", "smoother", "storage", "table", "term", "tokenwise",
)  # fmt: skip


def file_of(module: str) -> Path:
    """The file of a module below `mercer`; "" is the package."""
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def names_of(module: str) -> list[tuple[str, str]]:
    """The public names of a module, and the module below it that each comes from."""
    path = file_of(module)
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [(name, "") for name in ast.literal_eval(node.value)]
    if path.name == "__init__.py":
        return [
            (alias.asname, node.module or "")
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.level == 1
            for alias in node.names
            if alias.asname and not is_module(module, node.module, alias.name)
        ]
    made = (ast.FunctionDef, ast.ClassDef)
    return [(n.name, "") for n in tree.body if isinstance(n, made) and not n.name.startswith("_")]


def is_module(package: str, within: str | None, name: str) -> bool:
    """Whether `from . import name` in a package is a module and not a name."""
    folder = file_of(package).parent
    found = within is None and ((folder / name).is_dir() or (folder / f"{name}.py").exists())
    return found


def parts_of(module: str) -> Iterator[str]:
    """The module itself, and the files of a package without names or parts of its own."""
    yield module
    path = file_of(module)
    listed = any(m.startswith(f"{module}.") for m in PUBLIC)
    if path.name == "__init__.py" and not names_of(module) and not listed:
        for file in sorted(path.parent.glob("*.py")):
            if not file.name.startswith("_"):
                yield f"{module}.{file.stem}"


def pages() -> dict[str, str]:
    """The pages of names, by their path."""
    own = names_of("")
    groups = {
        "mercer": [name for name, source in own if source not in ("kernels", "filters")],
        "kernels": [name for name, source in own if source == "kernels"],
        "filters": [name for name, source in own if source == "filters"],
    }
    titles = {"mercer": "mercer", "kernels": "Kernels", "filters": "Filters"}
    made = {
        f"reference/{page}.md": page_of(titles[page], [("", names)])
        for page, names in groups.items()
    }
    for module in PUBLIC:
        first = module.split(".")[0]
        if module == first:
            within = [m for m in PUBLIC if m == module or m.startswith(module + ".")]
            sections = [
                (part, [name for name, _ in names_of(part)]) for m in within for part in parts_of(m)
            ]
            made[f"reference/{first}.md"] = page_of(f"mercer.{first}", sections)
    return made


def page_of(title: str, sections: list[tuple[str, list[str]]]) -> str:
    text = [f"# {title}"]
    for n, (module, names) in enumerate(sections):
        path = f"mercer.{module}" if module else "mercer"
        if n:
            text.append(f"## {path} {{: .module }}")
        if module:
            about = ast.get_docstring(ast.parse(file_of(module).read_text())) or ""
            text.append(about.partition("\n\n")[0])
        text += [directive(module, name) for name in names]
    return "\n\n".join(text) + "\n"


def directive(module: str, name: str) -> str:
    """What mkdocstrings reads. A function in a module of its own name is meant, not the module."""
    inner = f"{module}.{name}" if module else name
    within = file_of(module).name == "__init__.py" and is_module(module, None, name)
    if within and name in dict(names_of(inner)):
        return f'<a id="mercer.{inner}"></a>\n\n::: mercer.{inner}.{name}'
    return f"::: mercer.{inner}"


def table_page() -> str:
    """The table of kernels and filters, from the registry."""
    from mercer.cli import listing

    text = [
        "# Kernels and filters: the table",
        "Made from the declarations in the code, as `mercer kernels` and `mercer filters` print "
        "it. *As text* says whether a command or a config can name it. *Backends* are those that "
        "train it on a CPU, the one that runs by itself first; in brackets: with some parameters. "
        "Those of your machine, GPUs too, are what the commands print there.",
    ]
    for title, rows in (("Kernels", listing.kernels()), ("Filters", listing.filters())):
        first, *others = rows.columns
        text.append(f"## {title}")
        lines = [f"| {' | '.join((first, *others))} |", "|---" * len(rows.columns) + "|"]
        for row in rows:
            cells = [f"[`{row[first]}`][mercer.{row[first]}]"]
            cells += [f"`{row[c]}`" if c == "parameters" and row[c] else row[c] for c in others]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        text.append("\n".join(lines))
    return "\n\n".join(text) + "\n"


def command_page() -> str:
    """Every command with its options: what `--help` prints."""
    import typer
    from typer.testing import CliRunner

    from mercer.cli.commands import app

    text = [
        "# Every option of the command",
        "What `mercer COMMAND --help` prints. [The command](../commands.md) explains how the "
        "commands go together.",
    ]

    def add(words: tuple[str, ...], command: typer.core.TyperCommand) -> None:
        help = CliRunner().invoke(app, [*words, "--help"], prog_name="mercer", env=PLAIN)
        assert help.exit_code == 0, help.output
        lines = "\n".join(line.rstrip() for line in help.output.strip("\n").split("\n"))
        text.extend([f"## {' '.join(('mercer', *words))}", f"```text\n{lines}\n```"])
        for name, one in getattr(command, "commands", {}).items():
            add((*words, name), one)

    add((), typer.main.get_command(app))
    return "\n\n".join(text) + "\n"


# Help as on a terminal without colours, narrow enough for a page.
PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "86", "TERMINAL_WIDTH": "86"}
