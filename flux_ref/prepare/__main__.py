import sys

from flux_ref.prepare.commands import main

sys.exit(main(sys.argv[1:]))
