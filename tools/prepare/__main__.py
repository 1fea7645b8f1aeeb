import sys

from flux_ref.cli import leave
from tools.prepare.commands import main

leave(main(sys.argv[1:]))
