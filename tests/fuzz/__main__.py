"""Fuzzing by hand, with as much as there is time for; `test_fuzz` plays a small share of the same.

    python -m tests.fuzz frames --count 1000000 --seed 1
    python -m tests.fuzz http --count 100000
    python -m tests.fuzz files --count 10000
    python -m tests.fuzz snapshots --count 20000
    python -m tests.fuzz frames --guided --count 1000000      where atheris is installed: guided by coverage

Exit status 1, and the input that did it, when something fails.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Run what the command line says and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("frames", "http", "files", "snapshots"))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--guided", action="store_true", help="by atheris, which must be installed")
    parser.add_argument("--corpus", type=Path, help="with --guided: a folder whose inputs are kept and added to")
    args = parser.parse_args(argv)
    if args.guided and args.what == "snapshots":
        parser.error("--guided has no snapshots")
    logging.disable(logging.CRITICAL)
    if args.guided:
        from tests.fuzz.guided import run_guided

        run_guided(args.what, args.count, args.seed, args.corpus)
        return 0
    if args.what == "frames":
        from tests.fuzz import frames

        print(frames.run(args.count, args.seed))
    elif args.what == "http":
        from tests.fuzz import http

        print(asyncio.run(http.run(args.count, args.seed)))
    elif args.what == "snapshots":
        from tests.fuzz import snapshots

        print(dict(asyncio.run(snapshots.run(args.count, args.seed))))
    else:
        from tests.fuzz import files

        with tempfile.TemporaryDirectory(prefix="pdserve-fuzz-") as folder:
            report = files.run(Path(folder), args.count, args.seed)
        print(report, *report.failures, sep="\n")
        return int(bool(report.failures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
