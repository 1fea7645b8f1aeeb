import sys

from flux_ref.run.cli import leave
from tools.preflight.commands import main

leave(main(sys.argv[1:]))  # threads that wait for other nodes may not delay or break the end
