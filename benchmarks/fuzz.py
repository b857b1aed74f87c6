"""The long fuzzing of tests/fuzz_targets.py, guided by coverage: python benchmarks/fuzz.py readers --seconds 600

Needs atheris (pip install atheris; libFuzzer for Python). Every new path through the library keeps the bytes that
reached it; what raises anything but an error of the library's own leaves its bytes in the corpus folder, what takes
more than 20 s or 4 GB ends the run. Prints one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

with atheris.instrument_imports(include=["collapsediag"]):
    import fuzz_targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=fuzz_targets.TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, default=Path("fuzz-corpus"))
    args = parser.parse_args()
    corpus = args.corpus / args.target
    corpus.mkdir(parents=True, exist_ok=True)
    began, n_runs, crashes = time.time(), 0, set()
    target = fuzz_targets.TARGETS[args.target]
    fuzz_targets.quiet()

    def one(data: bytes) -> None:
        nonlocal n_runs
        n_runs += 1
        try:
            target(data)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            name = f"{args.target}-{Path(place.filename).stem}-{place.lineno}-{type(error).__name__}"
            if name not in crashes:
                crashes.add(name)
                (args.corpus / name).write_bytes(data)
                traceback.print_exc()
        # libFuzzer ends the process without a word to Python.
        if time.time() - began > args.seconds:
            report()
            os._exit(1 if crashes else 0)

    def report() -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        found = {
            "target": args.target,
            "runs": n_runs,
            "wall_s": round(time.time() - began),
            "cpu_s": round(usage.ru_utime + usage.ru_stime),
            "peak_mb": usage.ru_maxrss // 1024,
            "corpus": len(list(corpus.iterdir())),
            "crashes": sorted(crashes),
        }
        print(json.dumps(found), flush=True)

    limits = ["-timeout=20", "-rss_limit_mb=4096", "-max_len=1000", "-len_control=20"]
    prefix = f"-artifact_prefix={args.corpus}/{args.target}-"
    atheris.Setup([sys.argv[0], *limits, prefix, "-verbosity=0", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
