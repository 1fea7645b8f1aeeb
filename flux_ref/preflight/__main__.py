import sys

from flux_ref.preflight.commands import main

sys.exit(main(sys.argv[1:]))
