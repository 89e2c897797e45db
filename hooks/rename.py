"""The package under another name: where the word means the package, and nowhere else."""

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator, Set

PACKAGE = "project"


def renamed_path(path: str, name: str) -> str:
    """The same path, of the package if it was of the package."""
    return re.sub(rf"^src/{PACKAGE}/", f"src/{name}/", path)


def renamed(path: str, text: str, modules: Set[str], name: str) -> str:
    """A file's text with the package called `name`.

    In Python what an import names or has named; elsewhere, and in strings and comments, the word
    that begins a dotted path (`project.model`, `project.mine.Net`), in the name of its folder
    (`src/project`), and in commands and imports that are quoted. Every other is a word.

    Args:
        modules: of the package, whose paths may have one dot.

    Raises:
        ValueError: Python that cannot be parsed.
    """
    is_ours = re.compile(
        rf"""(?<![\w./{{-])(?<!\n\[){PACKAGE}(?=\.(?:(?:{"|".join(sorted(modules))})\b|\w+\.\w))
        |(?<=\bsrc/){PACKAGE}\b
        |(?<=\bfrom[ ]){PACKAGE}(?=[ ]import\b)
        |(?<=-m[ ]){PACKAGE}\b""",
        re.VERBOSE,
    )
    spans = _texts(text) if path.endswith(".py") else [(0, len(text))]
    places = {m.start() for begin, end in spans for m in is_ours.finditer(text, begin, end)}
    if path.endswith(".py"):
        places |= _names(text)
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
    imports, uses = [], []
    is_bound = False
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module):
            imports.append(node)
        elif isinstance(node, ast.Import):
            ours = [alias for alias in node.names if _is_ours(alias.name)]
            is_bound |= any(alias.asname is None for alias in ours)
            imports += ours
        elif isinstance(node, ast.Name) and node.id == PACKAGE and isinstance(node.ctx, ast.Load):
            uses.append(node)
    lines, starts = list(io.StringIO(code, newline="")), _line_starts(code)
    return {
        _place(code, lines[node.lineno - 1], starts[node.lineno - 1], node.col_offset)
        for node in [*imports, *(uses if is_bound else [])]
    }


def _is_ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == PACKAGE


def _place(code: str, line: str, start: int, column: int) -> int:
    """Of the word in a node, whose column counts bytes."""
    place = start + len(line.encode()[:column].decode())
    word = re.compile(rf"(?:from\s+)?({PACKAGE})\b").match(code, place)
    if word is None:
        raise ValueError(f"no {PACKAGE} where the parser sees it: {line.strip()}")
    return word.start(1)


def _line_starts(code: str) -> list[int]:
    lengths = map(len, io.StringIO(code, newline=""))
    return list(itertools.accumulate(lengths, initial=0))
