"""The package under another name: where the word means the package, and nowhere else."""

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator, Set

PACKAGE = "project"
SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def renamed_path(path: str, name: str) -> str:
    """The same path, of the package if it was of the package."""
    return re.sub(rf"^src/{PACKAGE}/", f"src/{name}/", path)


def renamed(path: str, text: str, modules: Set[str], name: str) -> str:
    """A file's text with the package called `name`.

    In Python what an import names or has named; elsewhere, and in strings and comments, the word
    that begins a dotted path (`project.model`, `project.mine.Net`, `project.Net`), in the name of
    its folder (`src/project`), and in imports that are quoted. Every other is a word.

    Args:
        modules: of the package, whose paths may have one dot.

    Raises:
        ValueError: Python that cannot be parsed.
    """
    is_ours = re.compile(
        rf"""(?:(?<![\w./{{-])(?<!^\[)|(?<=\\n)){PACKAGE}
            (?=\.(?:(?:{"|".join(sorted(modules))})(?![\w-])|\w+\.\w|[A-Z]))
        |(?<=\bsrc/){PACKAGE}\b
        |(?:(?<=\bfrom[ ])|(?<=\\nfrom[ ])){PACKAGE}(?=[ ]import\b)
        |(?:(?<=\bimport[ ])|(?<=\\nimport[ ])){PACKAGE}(?=\s*(?:$|[;,"'`\\#)]|as\b))""",
        re.VERBOSE | re.MULTILINE,
    )
    try:
        spans = _texts(text) if path.endswith(".py") else [(0, len(text))]
        places = {m.start() for begin, end in spans for m in is_ours.finditer(text, begin, end)}
        places |= _names(text) if path.endswith(".py") else set()
    except (SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"{path}: {error}") from error
    for place in sorted(places, reverse=True):
        text = text[:place] + name + text[place + len(PACKAGE) :]
    return text


def _texts(code: str) -> Iterator[tuple[int, int]]:
    """Where strings and comments begin and end; an f-string is one, as before Python 3.12."""
    starts, opened = _line_starts(code), []
    for token in tokenize.generate_tokens(io.StringIO(code, newline="").readline):
        kind = tokenize.tok_name[token.type]
        ends = kind.endswith("STRING_END")
        if kind.endswith("STRING_START"):
            opened.append(token.start)
        elif ends or kind in ("STRING", "COMMENT"):
            (row, column), (last, last_column) = opened.pop() if ends else token.start, token.end
            if not opened:
                yield starts[row - 1] + column, starts[last - 1] + last_column


def _names(code: str) -> set[int]:
    """Where the package is imported, and where a name that is bound by that is used."""
    tree = ast.parse(code)
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and _is_ours(n.module)]
    nodes: list[ast.expr | ast.stmt | ast.alias] = [n for n in imports if n.level == 0]
    names = [a for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    ours = [alias for alias in names if _is_ours(alias.name)]
    if any(alias.asname is None for alias in ours):
        nodes += _uses(tree)
    lines, starts = list(io.StringIO(code, newline="")), _line_starts(code)
    return {
        _place(code, lines[node.lineno - 1], starts[node.lineno - 1], node.col_offset)
        for node in [*nodes, *ours]
    }


def _is_ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == PACKAGE


def _uses(node: ast.AST) -> Iterator[ast.Name | ast.Global]:
    """The names in a scope that mean what it has imported, or what is around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name) and child.id == PACKAGE:
            yield child
        if isinstance(child, ast.Global) and PACKAGE in child.names:
            yield child
        if isinstance(child, ast.ClassDef) and _binds(child):
            for method in child.body:  # which do not see what the class binds
                yield from _uses(method) if isinstance(method, SCOPES) else ()
        elif not (isinstance(child, SCOPES) and _binds(child)):
            yield from _uses(child)


def _binds(scope: ast.AST) -> bool:
    """Whether the word is an argument or a variable of a function or class."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.Global) and PACKAGE in child.names:
            return False
        if isinstance(child, ast.arg) and child.arg == PACKAGE:
            return True
        if isinstance(child, ast.Name) and child.id == PACKAGE:
            if not isinstance(child.ctx, ast.Load):
                return True
        elif not isinstance(child, (*SCOPES, ast.ClassDef)) and _binds(child):
            return True
    return False


def _place(code: str, line: str, start: int, column: int) -> int:
    """Of the word in a node, whose column counts bytes."""
    place = start + len(line.encode()[:column].decode())
    word = re.compile(rf"(?:from[\s\\]+|global\b.*?\b)?({PACKAGE})\b").match(code, place)
    if word is None:
        raise ValueError(f"no {PACKAGE} where the parser sees it: {line.strip()}")
    return word.start(1)


def _line_starts(code: str) -> list[int]:
    lengths = map(len, io.StringIO(code, newline=""))
    return list(itertools.accumulate(lengths, initial=0))
