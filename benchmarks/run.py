"""Measures what README.md claims of speed, and prints its tables.

python benchmarks/run.py                     all but `options`: a quarter of an hour on two cores
python benchmarks/run.py --only overhead     one of them; --only options: what DDP's options bring

Things that are compared alternate, A-B-A-B. Figures are medians, with the least and the most;
ratios are taken repeat by repeat.
"""

import argparse
import sys
from pathlib import Path

from pipeline import growth, loader, memory
from startup import startup
from table import show
from training import options, overhead, scaling, step

from project.errors import Preempted
from project.processes import start_fork_server

ALL = {
    "overhead": overhead,
    "step": step,
    "loader": loader,
    "memory": memory,
    "startup": startup,
    "scaling": scaling,
    "growth": growth,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add, counts = parser.add_argument, range(1, 100)
    add("--only", nargs="+", choices=[*ALL, "options"], default=[*ALL], help="all but options")
    add("--repeats", type=int, default=5, choices=counts, metavar="N", help="1 to 99, if not 5")
    add("--out", type=Path, default=Path("outputs/benchmarks"), help="folder of CSV and PNG")
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error}")
    start_fork_server()
    try:
        for name in args.only:
            show(name, (ALL | {"options": options})[name](args.repeats), args.out)
    except (KeyboardInterrupt, Preempted) as error:
        sys.exit(error.status if isinstance(error, Preempted) else 130)


if __name__ == "__main__":
    main()
