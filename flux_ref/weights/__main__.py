import sys

from flux_ref.weights.commands import main

sys.exit(main(sys.argv[1:]))
