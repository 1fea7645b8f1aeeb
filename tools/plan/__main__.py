import sys

from flux_ref import cli
from tools.plan.commands import main

sys.exit(cli.run("plan", main, sys.argv[1:]))
