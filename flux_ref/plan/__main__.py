import sys

from flux_ref.plan import commands
from flux_ref.run import cli

cli.leave(cli.run("plan", commands.__doc__, commands.main, sys.argv[1:]))
