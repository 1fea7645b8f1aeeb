import sys

from flux_ref.run import cli
from tools.tables import commands

cli.leave(cli.run("tables", commands.__doc__, commands.main, sys.argv[1:]))
