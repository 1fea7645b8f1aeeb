import sys

from flux_ref import errors
from tools.plan.commands import main

sys.exit(errors.run("plan", main, sys.argv[1:]))
