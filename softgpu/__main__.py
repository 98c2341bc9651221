"""``python -m softgpu``: coverage of PTX forms, and a first run of a compiled variant."""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

from .coverage import coverage


def _ptx_files(names: list[str]) -> list[pathlib.Path]:
    """Files as given; directories stand for the .ptx files in them."""
    out: list[pathlib.Path] = []
    for name in names:
        path = pathlib.Path(name)
        out += sorted(path.glob("*.ptx")) if path.is_dir() else [path]
    return out


def _coverage(args: argparse.Namespace) -> int:
    files = _ptx_files(args.ptx)
    if not files:
        print(f"no .ptx file in {', '.join(args.ptx)}", file=sys.stderr)
        return 2
    result = coverage(files)
    for opcode, count in sorted(result.forms.items()):
        mark = "MISSING" if opcode in result.missing else ""
        if args.all or mark:
            print(f"{count:8d}  {opcode}  {mark}".rstrip())
    for places in result.missing.values():
        for place in places[:3]:
            print(f"  {place}")
    print(
        f"{len(files)} files, {sum(result.forms.values())} instructions, "
        f"{len(result.forms)} forms, {len(result.missing)} not modelled"
    )
    return 1 if result.missing else 0


def _run(args: argparse.Namespace) -> int:
    """Runs a built variant through the host package's own check."""
    from dsl_kernels.spec import VariantSpec
    from snapmla import env, selfcheck

    directory = pathlib.Path(args.dir) if args.dir else env.variant_dirs()[0]
    started = time.perf_counter()
    result = selfcheck.check(VariantSpec.from_name(args.variant), directory)
    took = time.perf_counter() - started
    print(f"{args.variant}: {'ok' if result.passed else 'FAILED'} {result.summary} ({took:.1f} s)")
    return 0 if result.passed else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="softgpu", description=__doc__)
    sub = parser.add_subparsers(dest="command", required=True)
    c = sub.add_parser("coverage", help="list PTX opcode forms and those not modelled")
    c.add_argument("ptx", nargs="+", help=".ptx files, or directories of them")
    c.add_argument("--all", action="store_true", help="list modelled forms too")
    c.set_defaults(run=_coverage)
    r = sub.add_parser("run", help="run one variant on small inputs and check its result")
    r.add_argument("variant")
    r.add_argument("--dir", help="directory of built variants")
    r.set_defaults(run=_run)
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
