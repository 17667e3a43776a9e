"""python -m testbed up | down | status | images | binaries"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from . import api, bed, binaries, images
from .errors import BedError, ExitCode
from .layout import ADDRESS, NODE, PROMETHEUS, SECOND_NODE, State, state
from .processes import recorded

EXIT_CODES = "exit codes: " + ", ".join(f"{code.value} {code.name.lower()}" for code in ExitCode)


def main() -> int:
    arguments = _parser().parse_args()
    try:
        code: ExitCode = arguments.run(state(), arguments)
    except BedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return error.exit_code
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="testbed", description=__doc__, epilog=EXIT_CODES)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start it, or what is missing of it")
    up.add_argument("--fake-nodes", type=int, default=0, metavar="N", help="nodes that KWOK plays: fake-000, ...")
    up.add_argument("--fake-gpus", type=int, default=0, metavar="N", help=f"nvidia.com/gpu on {NODE}")
    up.add_argument("--prometheus", action="store_true", help=f"Prometheus at {PROMETHEUS}, and a node exporter")
    up.add_argument("--second-node", action="store_true", help=f"a real node {SECOND_NODE} in namespaces of its own")
    up.add_argument("--kueue", action="store_true", help="Kueue, which queues Jobs that name a queue")
    up.set_defaults(run=_up)

    commands.add_parser("down", help="end it and put the machine back").set_defaults(run=_down)

    status = commands.add_parser("status", help="what runs, and where")
    status.add_argument("-o", "--output", choices=("table", "json"), default="table")
    status.set_defaults(run=_status)

    image = commands.add_parser("images", help="images for its pods").add_subparsers(required=True, metavar="COMMAND")
    file = image.add_parser("import", help="from docker-archive files into the node")
    file.add_argument("files", nargs="+", type=Path, metavar="FILE")
    file.set_defaults(run=_import)

    commands.add_parser("binaries", help="build the programs, print their folder").set_defaults(run=_binaries)
    return parser


def _up(found: State, arguments: argparse.Namespace) -> ExitCode:
    started = time.monotonic()
    wanted = bed.Wanted(
        arguments.fake_nodes, arguments.fake_gpus, arguments.prometheus, arguments.second_node, arguments.kueue
    )
    bed.up(found, wanted)
    print(f"up in {time.monotonic() - started:.1f} s\n  export KUBECONFIG={found.kubeconfig} PATH={found.bin}:$PATH")
    return ExitCode.DONE


def _down(found: State, _: argparse.Namespace) -> ExitCode:
    started = time.monotonic()
    ended = bed.down(found)
    print(f"down in {time.monotonic() - started:.1f} s" if ended else f"no test bed in {found.root}")
    return ExitCode.DONE


def _status(found: State, arguments: argparse.Namespace) -> ExitCode:
    """FAILED when it does not run, or not all of it."""
    processes = list(recorded(found).values())
    ready = bool(processes) and api.node_ready(found, NODE)
    if arguments.output == "json":
        rows = [
            {"name": it.name, "pid": it.pid, "alive": it.alive, "rss_bytes": it.resident_bytes, "log": it.log}
            for it in processes
        ]
        print(
            json.dumps(
                {
                    "node": NODE,
                    "ready": ready,
                    "address": ADDRESS,
                    "kubeconfig": str(found.kubeconfig),
                    "bin": str(found.bin),
                    "audit_log": str(found.audit_log),
                    "prometheus": PROMETHEUS if "prometheus" in recorded(found) else None,
                    "processes": rows,
                },
                indent=1,
            )
        )
    elif not processes:
        print(f"no test bed in {found.root}")
    else:
        print(f"{'PROCESS':<24} {'PID':>8} {'RSS MiB':>8}  LOG")
        for it in processes:
            pid = str(it.pid) if it.alive else "ended"
            print(f"{it.name:<24} {pid:>8} {it.resident_bytes / 2**20:>8.0f}  {it.log}")
        print(f"node {NODE}: {'Ready' if ready else 'not ready'}; kubeconfig {found.kubeconfig}; address {ADDRESS}")
    return ExitCode.DONE if ready and all(it.alive for it in processes) else ExitCode.FAILED


def _import(found: State, arguments: argparse.Namespace) -> ExitCode:
    for name in images.import_files(found, arguments.files):
        print(name)
    return ExitCode.DONE


def _binaries(_: State, __: argparse.Namespace) -> ExitCode:
    print(binaries.ensure())
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
