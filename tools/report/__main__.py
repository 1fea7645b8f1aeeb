"""Score benchmark runs: the official checks, the time to train, a table, and a page with charts.

python -m tools.report runs/schnell_gbs512
python -m tools.report RESULTS_FOLDER_A RESULTS_FOLDER_B --ruleset=5.1.0 --out=report --json=report.json

Exit code: 0 every system is a valid result, or a rehearsal that passes the checks; 1 a system is neither (the reasons
are printed); 2 the request was refused.
"""

import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from flux_ref import cli
from flux_ref.cli import Options, printable
from flux_ref.config import KEYS, MllogConfig
from flux_ref.files import write_whole
from tools.json_option import json_option, show
from tools.report import page, result_log, score

INVALID = 1  # exit code


def main(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m tools.report", "Score and compare MLPerf Training logs of FLUX.1.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="result files, run folders, or their trees")
    parser.add_argument("--ruleset", choices=KEYS["mllog.ruleset"].choices, default=MllogConfig.ruleset)
    parser.add_argument("--points", type=Path, help="reference convergence points in place of the official ones")
    parser.add_argument("--out", type=Path, help="folder for a page with charts, report.html")
    json_option(parser)
    args = parser.parse_args(argv)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    rules = {
        "ruleset": args.ruleset,
        "mlperf_logging": version("mlperf-logging"),
        "points": str(args.points or "official"),
    }
    systems = [score.judge(name, files, args.ruleset, args.points) for name, files in result_log.find(args.paths)]
    text = ", ".join(f"{name} {value}" for name, value in rules.items()) + f"\n\n{score.describe(systems)}"
    if args.out:
        write_whole(args.out / "report.html", page.page(systems, text))
        text += f"\n\npage: {printable(args.out / 'report.html')}"
    show(text, rules | {"systems": [asdict(system) for system in systems]}, args.json)  # an unknown value is null
    return INVALID if any(system.reasons for system in systems) else 0


if __name__ == "__main__":
    sys.exit(cli.run("report", main, sys.argv[1:]))
