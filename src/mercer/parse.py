"""Kernels, positions and filters from text, such as `RBF(2.0) * Exponential(on="position")`.

The grammar is calls of known names with literal arguments, joined by + and * (kernels) or & and |
(filters). Text is parsed to a syntax tree and never evaluated. Errors name the part that is not in
the grammar. A class of your own is named with its file or module, `my_kernels.py:ARD(32)`, which
must be in `trust` (`own.py`). `write` is the inverse of `kernel`.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from . import filters, kernels, nn, own
from .filters import Filter
from .kernels import Kernel, Product, Sum
from .names import suggest
from .nn.positions import POSITIONS, Position
from .own import Trust

T = TypeVar("T")
Names = Mapping[str, Callable[..., Any]]

KERNELS: Names = {k.__name__: k for k in kernels.KERNELS if k.entry and k.entry.text}
# Made of tensors or other objects, and so in Python alone; and what takes their place in a text.
BY_PYTHON = {k.__name__ for k in kernels.KERNELS if k.entry and not k.entry.text}
BY_PYTHON |= {f.__name__ for f in filters.FILTERS if f.entry and not f.entry.text}
INSTEAD = {
    "Lookup": "the position LookupTable(16) makes one",
    "RelativeSinusoid": "the position of this name makes one",
}
EMBEDDINGS: Names = {"Sinusoid": nn.Sinusoid, "Learned": nn.Learned}
POSITION_NAMES: Names = {
    name: getattr(nn, name)
    for name in (
        "NoPosition", "DirectSum", "LookupTable", "RelativeSinusoid", "ProductKernel", "Rotary",
        "ALiBi", "Grid2D",
    )
}  # fmt: skip
FILTERS: Names = {f.__name__: f for f in filters.FILTERS if f.entry and f.entry.text}
# Bounds on a text: characters, levels of its syntax tree, and the size of a whole number.
LONGEST, DEEPEST, LARGEST = 2000, 100, 2**24
OPERATORS: Mapping[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Mult: ("*", operator.mul),
    ast.Pow: ("**", operator.pow),
    ast.BitAnd: ("&", operator.and_),
    ast.BitOr: ("|", operator.or_),
}


def kernel(text: str, trust: Trust = None) -> Kernel:
    """The kernel of a formula such as `0.5 * RBF(2.0) * Exponential(on="position") + ARD(64)`."""
    return _read(text, "kernel", Kernel, KERNELS, KERNELS, ("+", "*", "**"), trust)


def position(text: str, trust: Trust = None) -> Position:
    """A position such as `rotary` or `DirectSum(Learned(1024))`."""
    if isinstance(text, str) and text.strip() in POSITIONS:
        return POSITIONS[text.strip()]()
    inner = {**EMBEDDINGS, **KERNELS}
    return _read(text, "position", Position, POSITION_NAMES, inner, (), trust)


def filter(text: str, trust: Trust = None) -> Filter:
    """A filter such as `Causal() & Window(128, 0)`."""
    return _read(text, "filter", Filter, FILTERS, {}, ("&", "|"), trust)


def token_kernels(text: str) -> dict[str, Any]:
    """The arguments of `TokenKernels.like`, of a text such as `TokenKernels(size=3, on="v")`."""
    names: Names = {"TokenKernels": _token_kernels}
    return _read(text, "token kernels", dict, names, {}, (), None)


def _token_kernels(size: int = 3, **options: Any) -> dict[str, Any]:
    options = {"size": size, "temperature": None, **options}
    # Wrong arguments are found here, before there is a model with a vocabulary.
    nn.TokenKernels(1, **options)
    return options


def write(kernel: Kernel) -> tuple[str, tuple[str, ...]]:
    """The text of a kernel, and the files or modules that it needs; ValueError if it has none."""
    if type(kernel) is Sum or type(kernel) is Product:
        texts, trusts = zip(*map(write, kernel), strict=True)
        if isinstance(kernel, Product):
            texts = tuple(
                f"({t})" if isinstance(k, Sum) else t for k, t in zip(kernel, texts, strict=True)
            )
        sign = " + " if isinstance(kernel, Sum) else " * "
        return sign.join(texts), tuple(dict.fromkeys(name for each in trusts for name in each))
    cls: type[Kernel] = type(kernel)
    try:
        if kernel.arguments is None:
            raise ValueError(
                f"{cls.__name__} has no text form, since its arguments are not all numbers, text "
                "or lists of these"
            )
        if isinstance(kernel, kernels.CHANGED):
            changed = kernel.kernel
            assert isinstance(changed, Kernel)
            inner, trust = write(changed)
            rest = f", {kernel.arguments}" if kernel.arguments else ""
            return f"{cls.__name__}({inner}{rest})", trust
        if cls in kernels.KERNELS and cls.__name__ in KERNELS:
            return f"{cls.__name__}({kernel.arguments})", ()
        if cls in kernels.KERNELS:
            raise ValueError(f"{cls.__name__} has no text form, since it is made of tensors")
        name, source = own.name_of(cls)
    except ValueError as error:
        raise ValueError(
            f"{error}: put a class whose arguments are numbers at the top level of a file, and "
            "name it as in kernel='my_kernels.py:Name(2.0)'"
        ) from None
    return f"{name}({kernel.arguments})", (source,)


def spell(value: Any) -> tuple[Any, tuple[str, ...]]:
    """A value with each kernel in it as text, and the files or modules that these need."""
    if isinstance(value, Kernel):
        return write(value)
    if isinstance(value, Mapping):
        each = {name: spell(x) for name, x in value.items()}
        found = {name: text for name, (text, _) in each.items()}
        return found, tuple(dict.fromkeys(n for _, names in each.values() for n in names))
    if isinstance(value, list | tuple):
        pairs = [spell(x) for x in value]
        listed = type(value)(text for text, _ in pairs)
        return listed, tuple(dict.fromkeys(n for _, names in pairs for n in names))
    return value, ()


def _read(
    text: str,
    what: str,
    kind: type[T],
    names: Names,
    inner: Names,
    operators: Sequence[str],
    trust: Trust,
) -> T:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"{what} must be text such as {_example(what)}, got "
            f"{text!r}"
        )  # fmt: skip
    if len(text) > LONGEST:
        raise ValueError(
            f"{what} must be at most {LONGEST} characters, got {len(text)}"
        )  # fmt: skip
    plain, mine = own.split(text.strip())
    try:
        with warnings.catch_warnings():
            # Such as "invalid decimal literal" for 0or: the text is refused or fine without it.
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(plain, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(
            f"{what} must be a formula, but {_short(text)!r} is not one: {reason}"
        ) from None
    if (depth := _depth(tree)) > DEEPEST:
        raise ValueError(
            f"{what} {_short(text)!r} must be nested at most {DEEPEST} levels deep, got {depth}: "
            "a sum or product has a level for each member"
        )
    classes = _Own(mine, trust)
    return cast(T, _Reader(plain, what, kind, names, inner, operators, classes).build(tree))


@dataclass(frozen=True)
class _Own:
    """The classes of one's own in a text, by the names that stand for them."""

    names: Mapping[str, tuple[str, str]]
    trust: Trust

    def find(self, stand_in: str, kind: type) -> Callable[..., Any]:
        return own.find(*self.names[stand_in], kind, self.trust)

    def restore(self, text: str) -> str:
        """The text as it was given."""
        for stand_in, (source, name) in self.names.items():
            text = text.replace(stand_in, f"{source}:{name}")
        return text


class _Reader:
    """Builds an object from a syntax tree."""

    def __init__(
        self,
        text: str,
        what: str,
        kind: type,
        names: Names,
        inner: Names,
        operators: Sequence[str],
        own: _Own,
    ) -> None:
        self.text, self.what, self.kind = text, what, kind
        self.names, self.inner, self.operators, self.own = names, inner, operators, own

    def build(self, node: ast.expr) -> Any:
        """The object of a tree."""
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                sign, join = OPERATORS.get(type(op), ("", None))
                if join is None or not sign or sign not in self.operators:
                    allowed = " and ".join(self.operators) or "no operator"
                    raise self._wrong(node, f"has an operator that is not allowed; use {allowed}")
                return self._joined(node, join, left, right)
            case ast.Call(func=ast.Name(id=name)):
                return self._call(node, name, self.names, self.kind)
            case ast.Name(id=name) if name in self.names:
                raise self._wrong(node, f"must be called, as in {name}()")
            case ast.Name(id=name):
                raise ValueError(self._unknown(name, self.names))
            case _:
                raise self._wrong(node, f"is not a call such as {_example(self.what)}")

    def _joined(self, node: ast.BinOp, join: Callable[[Any, Any], Any], *sides: ast.expr) -> Any:
        """Both sides joined; beside a kernel there may be a number, its weight or exponent."""
        numbers = [self.kind is Kernel and _is_number(side) for side in sides]
        if all(numbers):
            raise self._wrong(node, "joins two numbers; write the result")
        pairs = zip(sides, numbers, strict=True)
        each = [self._argument(side, {}) if number else self.build(side) for side, number in pairs]
        try:
            return join(*each)
        except TypeError:
            raise self._wrong(node, "needs a kernel before ** and a number after it") from None

    def _call(self, node: ast.Call, name: str, names: Names, kind: type) -> Any:
        mine = name in self.own.names
        if not mine and name not in names:
            raise ValueError(self._unknown(name, names))
        if any(isinstance(a, ast.Starred) for a in node.args) or not all(
            k.arg for k in node.keywords
        ):
            raise self._wrong(node, "must have plain arguments, no * or **")
        # A kernel is an argument of a position, and of a kernel that changes another one.
        plain = name in KERNELS and names.get(name) not in kernels.CHANGED
        inner = {} if plain or mine else self.inner
        args = [self._argument(a, inner) for a in node.args]
        named = {str(k.arg): self._argument(k.value, inner) for k in node.keywords}
        if mine:
            build = self.own.find(name, kind)
            try:
                return build(*args, **named)
            except Exception as error:
                raise self._wrong(node, f"cannot be built: {own.describe(error)}") from error
        known = inspect.signature(names[name]).parameters
        open_ended = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in known.values())
        for argument in () if open_ended else named:
            if argument not in known:
                has = suggest(argument, known) if known else "it takes none"
                raise self._wrong(node, f"has no argument {argument!r}; {has}")
        try:
            return names[name](*args, **named)
        except (TypeError, RuntimeError, ArithmeticError) as error:
            # The method may be that of a class above.
            reason = re.sub(r"\b(\w+\.)?__init__\(\)", name, str(error))
            raise self._wrong(node, f"has wrong arguments: {reason}") from None

    def _argument(self, node: ast.expr, inner: Names) -> Any:
        match node:
            case ast.Call(func=ast.Name(id=name)) if inner:
                return self._call(node, name, inner, Kernel)
            case ast.BinOp() if inner:
                # The kernel inside a position has the grammar of kernels.
                return kernel(self.own.restore(ast.unparse(node)), self.own.trust)
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = ...
        each = value if isinstance(value, list | tuple) else [value]
        if not all(x is None or isinstance(x, bool | int | float | str) for x in each):
            raise self._wrong(node, "is not a number, a string, a list or True, False, None")
        if any(isinstance(x, int) and abs(x) > LARGEST for x in each):
            raise self._wrong(node, f"is beyond the largest whole number, {LARGEST}")
        return value

    def _unknown(self, name: str, names: Names) -> str:
        if name in BY_PYTHON:
            instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
            return f"{name} is made in Python and cannot be written as text{instead}"
        return f"there is no {self.what} {name!r}; {suggest(name, names)}"

    def _wrong(self, node: ast.AST, why: str) -> ValueError:
        whole = self.own.restore(self.text)
        part = self.own.restore(ast.get_source_segment(self.text, node) or self.text)
        where = "" if part == whole else f" in {_short(whole)!r}"
        return ValueError(f"{self.what} {_short(part)!r}{where} {why}")


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _depth(tree: ast.AST) -> int:
    """The levels of a tree, without recursion."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:80]} … {text[-30:]}"


def _example(what: str) -> str:
    return {"kernel": "RBF(2.0)", "position": "Rotary()", "filter": "Causal()",
            "token kernels": "TokenKernels(size=3)"}[what]  # fmt: skip
