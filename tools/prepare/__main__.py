import sys

from flux_ref.run.cli import leave
from tools.prepare.commands import main

leave(main(sys.argv[1:]))  # threads that wait for other nodes may not delay or break the end
