import sys

from flux_ref.plan.commands import main

sys.exit(main(sys.argv[1:]))
