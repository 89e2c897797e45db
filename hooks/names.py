"""What a project and its package may be called."""

import keyword
import re
import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path

TEMPLATE = Path(__file__).parents[1]
# Import and distribution names of all that an installation of this project brings along.
TAKEN = {*(TEMPLATE / "hooks/taken.txt").read_text().split()}
SOFT = {"case", "match", "type"}  # keywords in some places, of some versions of Python
LONGEST = 30  # with more, imports grow over the length that ruff allows a line


def objection(folder: str, answers: Mapping[str, str]) -> str | None:
    """Why no project can come of these answers, with a suggestion; None if one can.

    Args:
        folder: made from the project's name.
        answers: to the questions that ask for words.
    """
    for key, text in answers.items():
        if strange := re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]|\{[{%#]", text):
            return f"{key} holds {strange[0]!r}, which cannot be kept as it is."
    project, package = answers["project_name"], answers["package_name"]
    if not folder or len(folder) > 100:
        reason = "holds no letter or digit" if not folder else "is longer than 100 characters"
        return f"project_name={project!r} {reason}. Try project_name=My-Project."
    if reason := unfit(package):
        return f"package_name={package!r} {reason}. Try package_name={suggestion(package)}."
    return None


def unfit(name: str) -> str | None:
    """Why a package cannot have this name; None if it can."""
    own = {path.stem for path in [*TEMPLATE.glob("*.py"), *TEMPLATE.glob("tests/*.py")]}
    reasons = {
        "is empty": not name,
        "begins with a digit": name[:1].isdigit(),
        "is not made of a-z and 0-9, with single _ in between": not re.fullmatch(
            r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name
        ),
        f"is longer than {LONGEST} characters": len(name) > LONGEST,
        "is a keyword of Python": keyword.iskeyword(name) or name in SOFT,
        "is the name of a module of Python's": name in {*sys.stdlib_module_names, "test"},
        "is the name of a package that this project needs": name in TAKEN,
        "is the name of a module beside the package": name in own,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def suggestion(name: str) -> str:
    """The nearest name that a package can have."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "_", plain)[:LONGEST].strip("_") or "project"
    return f"my_{words}"[:LONGEST].rstrip("_") if unfit(words) else words
