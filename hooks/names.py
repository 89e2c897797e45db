"""What a project and its package may be called."""

import keyword
import re
import sys
import unicodedata
from pathlib import Path

TEMPLATE = Path(__file__).parents[1]
# Import and distribution names of all that an installation of this project brings along.
TAKEN = {*(TEMPLATE / "hooks/taken.txt").read_text().split()}
LONGEST = 30  # with more, imports grow over the length that ruff allows a line


def objection(folder: str, project: str, package: str) -> str | None:
    """Why no project can have these names, with a suggestion; None if one can.

    Args:
        folder: made from the project's name.
    """
    if not folder:
        return f"project_name={project!r} holds no letter or digit. Try project_name=My-Project."
    if reason := unfit(package):
        return f"package_name={package!r} {reason}. Try package_name={suggestion(package)}."
    return None


def unfit(name: str) -> str | None:
    """Why a package cannot have this name; None if it can."""
    own = {path.stem for path in [*TEMPLATE.glob("*.py"), *TEMPLATE.glob("tests/*.py")]}
    reasons = {
        "is empty": not name,
        "begins with a digit": name[:1].isdigit(),
        "may hold a-z, 0-9 and _ alone, and begins with a letter": not re.fullmatch(
            r"[a-z][a-z0-9_]*", name
        ),
        f"is longer than {LONGEST} characters": len(name) > LONGEST,
        "is a keyword of Python": keyword.iskeyword(name) or keyword.issoftkeyword(name),
        "is the name of a module of Python's": name in sys.stdlib_module_names,
        "is the name of a package that this project needs": name in TAKEN,
        "is the name of a module beside the package": name in own,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def suggestion(name: str) -> str:
    """The nearest name that a package can have."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "_", plain).strip("_") or "project"
    if unfit(words[:LONGEST]):
        words = f"my_{words}"
    return words[:LONGEST].rstrip("_")
