"""mlperf-logging's own compliance checker."""

import subprocess
import sys

RULESETS = ("5.1.0", "6.0.0", "6.1.0")
DIVISIONS = ("closed", "open")


def check(path, ruleset):
    """The official verdict on a result file."""
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", ruleset]
    done = subprocess.run([*command, str(path)], cwd=path.parent, capture_output=True, text=True, timeout=120)
    return "SUCCESS" in done.stdout + done.stderr, done.stdout + done.stderr
