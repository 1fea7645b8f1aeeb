import sys

from flux_ref.errors import leave
from tools.prepare.commands import main

leave(main(sys.argv[1:]))
