import sys

from flux_ref.census.commands import main

sys.exit(main(sys.argv[1:]))
