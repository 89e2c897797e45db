"""Refuses a folder that holds something, before a file is written. Rendered by cookiecutter."""

import sys
from pathlib import Path

if others := sorted(path.name for path in Path.cwd().iterdir() if path.name != ".git"):
    sys.exit(
        f"{Path.cwd()} is not empty ({others[0]}), nothing was written there. Choose another "
        "project_name; a project that cruft made is brought up to date by cruft update."
    )
