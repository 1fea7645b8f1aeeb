"""Are the nodes fit for a run? Names the missing, broken, slow and odd ones, before the clock starts.

    python -m tools.preflight                                                            this node alone
    srun --ntasks-per-node 1 python -m tools.preflight --nodes n1,n2 --address n1:29500  all nodes, one process each

nodes.py says how nodes are measured, verdict.py what makes a node unfit. launch/slurm.sbatch requeues the job without
unfit nodes, launch/one_node.sh stops.

Prints a line per node, then a line per complaint: which node, what is wrong, what to do.
Exit codes of node 0: 0 all nodes are fit, 3 some are not (the last line lists them), 2 the arguments make no sense.
The other nodes return 0, or 3 if they lose node 0.
"""

import argparse
import os
import re
import socket

import torch

from flux_ref import errors
from flux_ref.errors import Fault, Refusal
from flux_ref.formats.outside import printable
from flux_ref.run.options import Options, between, listed
from tools.preflight import nodes
from tools.preflight.verdict import Verdict, judge


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments. Raises: Refusal."""
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    parser = Options("python -m tools.preflight", __doc__)
    add = parser.add_argument
    seconds = between(1, 86400, float)
    add("--nodes", type=listed(), default=[socket.gethostname()], help="names of all nodes, by commas (this one)")
    add("--address", default="127.0.0.1:0", metavar="HOST:PORT", help="an address of the first that all others reach")
    number = os.environ.get("SLURM_NODEID")
    add("--node", type=between(0, 10**6), default=number, help="number of this one among them ($SLURM_NODEID)")
    add("--gpus", type=between(1, 1024), default=devices, help="devices per node of the run (all; 1 on the CPU)")
    add("--wait", type=seconds, default=120.0, metavar="S", help="for a node, and for a measurement (%(default)g)")
    words = "of the median, below which a node is slow (%(default)g)"
    add("--slow", type=between(0, 1, float), default=0.8, metavar="SHARE", help=words)
    args = parser.parse_args(argv)
    count = len(args.nodes)
    args.node = 0 if count == 1 else args.node
    if args.node not in range(count):
        raise Refusal(f"which of --nodes={','.join(args.nodes)} is this? give --node=0 to {count - 1}")
    least = 1 if count > 1 else 0
    port = re.fullmatch(r".+:([0-9]{1,5})", args.address)
    if not port or not least <= int(port[1]) <= 65535:
        raise Refusal(f"--address={args.address}: give HOST:PORT of the first node, with a port from {least} to 65535")
    return args


def check(args: argparse.Namespace) -> int:
    """This node's part. Raises: Refusal, Fault."""
    facts = nodes.facts(args.gpus)
    if args.node:
        nodes.Node(args, facts).serve()
        return 0
    leader = nodes.Leader(args, facts)
    verdict = Verdict(args.nodes)
    present = leader.gather("here/{}", range(len(args.nodes)), args.wait)
    for absent in set(range(len(args.nodes))) - present.keys():
        verdict.add(absent, f"has not come within {args.wait:g} s", f"is it up, and does it reach {args.address}?")
    gpus = {node: facts["gpus"] for node, facts in present.items()}
    verdict.same("runs with --gpus", gpus, "look for the missing device")
    if not verdict.complaints:
        reports = leader.survey(present)
        for node, report in reports.items():
            print(printable(f"{args.nodes[node]}: {report.row()}"))
        judge(verdict, reports, args.slow)
    leader.end(present)
    if verdict.complaints:
        print("\n".join(printable(f"preflight: {line}") for line in verdict.lines()), flush=True)
        return Fault.exit_code
    print("preflight: all nodes are fit")
    return 0


def main(argv: list[str]) -> int:
    return errors.run("preflight", lambda argv: check(parse(argv)), argv)
