"""Files that are there whole or not at all."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Calls `write` on a temporary file beside `path`, flushes it to disk and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}-"
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=prefix, delete=False) as part:
        try:
            write(part)
            part.flush()
            os.fsync(part.fileno())
            os.fchmod(part.fileno(), 0o644)  # temporary files are born private
            Path(part.name).replace(path)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a dictionary as indented JSON, atomically; NaN, which JSON lacks, as null."""
    content = {k: None if isinstance(v, float) and v != v else v for k, v in content.items()}
    write_atomically(path, lambda file: file.write(f"{json.dumps(content, indent=2)}\n".encode()))
