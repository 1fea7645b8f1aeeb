"""Are the nodes fit for a run? Names the missing, broken, slow and odd ones, before the clock starts.

    python -m flux_ref.preflight                                                            this node alone
    srun --ntasks-per-node 1 python -m flux_ref.preflight --nodes n1,n2 --address n1:29500  all nodes, one process each

nodes.py says how nodes are measured, verdict.py what makes a node unfit. launch/slurm.sbatch requeues the job without
unfit nodes, launch/one_node.sh stops.

Prints a line per node, then a line per complaint: which node, what is wrong, what to do.
Exit codes: 0 all nodes are fit, 3 some are not (the last line lists them), 2 the arguments make no sense.
"""

import argparse
import os
import re
import socket
import tempfile
from pathlib import Path

import torch

from flux_ref.errors import Fault, Refusal
from flux_ref.preflight.nodes import Leader, Node
from flux_ref.preflight.verdict import Verdict, judge
from flux_ref.run.attempt import attempt
from flux_ref.run.options import Options, between, listed


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments. Raises: Refusal."""
    host = socket.gethostname().partition(".")[0]
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    parser = Options("python -m flux_ref.preflight", __doc__)
    add = parser.add_argument
    add("--nodes", type=listed(), default=[host], help="names of all nodes, by commas (this one)")
    add("--address", default="127.0.0.1:0", metavar="HOST:PORT", help="an address of the first that all others reach")
    add("--node", type=int, help="place of this one among them ($SLURM_NODEID, else where its hostname stands)")
    add("--gpus", type=between(1, 1024), default=devices, help="devices per node of the run (all; 1 on the CPU)")
    add("--disk", type=Path, action="append", help="folder that must be writable; may be given again (the temporary)")
    for option, least, most, default, metavar, words in (
        ("--free", 0, 10**6, 1.0, "GB", "space that every --disk must have"),
        ("--wait", 1, 86400, 120.0, "S", "for a node to come, and for a measurement"),
        ("--slow", 0, 1, 0.8, "SHARE", "of the median, below which a node is slow"),
        ("--clock", 0, 86400, 1.0, "S", "by which clocks may differ"),
    ):
        kind = between(least, most, float)
        add(option, type=kind, default=default, metavar=metavar, help=f"{words} ({default:g})")
    args = parser.parse_args(argv)
    args.disk = args.disk or [Path(tempfile.gettempdir())]
    args.node = place(args.nodes, host) if args.node is None else args.node
    if not 0 <= args.node < len(args.nodes):
        last = len(args.nodes) - 1
        raise Refusal(f"which of --nodes={','.join(args.nodes)} is this, {host}? give --node=0 to {last}")
    least = 1 if len(args.nodes) > 1 else 0
    if not re.fullmatch(r".+:[0-9]{1,5}", args.address) or not least <= int(args.address.rpartition(":")[2]) <= 65535:
        raise Refusal(f"--address={args.address}: give HOST:PORT of the first node, with a port from {least} to 65535")
    return args


def place(names: list[str], host: str) -> int:
    """This node's place among the names; -1 if neither Slurm nor its hostname tells. Raises: Refusal."""
    number = os.environ.get("SLURM_NODEID")
    if number is None:
        return names.index(host) if host in names else -1
    if not re.fullmatch("[0-9]+", number):
        raise Refusal(f"SLURM_NODEID={number}: give a whole number, or --node")
    return int(number)


def check(args: argparse.Namespace) -> int:
    """This node's part. Raises: Refusal, Fault."""
    node = Node(args)
    if args.node:
        return 0 if node.serve() else Fault.exit_code
    leader, verdict = Leader(node, len(args.nodes), args.slow), Verdict(args.nodes)
    devices = leader.roll()
    for absent in set(leader.everyone) - devices.keys():
        verdict.add(absent, f"has not come within {args.wait:g} s", f"is it up, and does it reach {args.address}?")
    if not verdict.complaints:
        verdict.same("runs with --gpus", devices, "look for the missing device")
    if verdict.complaints:
        leader.dismiss()
    else:
        reports = leader.survey()
        for number, report in reports.items():
            print(f"{args.nodes[number]}: {report.row()}")
        judge(verdict, reports, args)
    if verdict.complaints:
        print("\n".join(f"preflight: {line}" for line in verdict.lines()), flush=True)
        return Fault.exit_code
    print(f"preflight: {len(args.nodes)} nodes are fit")
    return 0


def main(argv: list[str]) -> int:
    return attempt("preflight", lambda: check(parse(argv)))
