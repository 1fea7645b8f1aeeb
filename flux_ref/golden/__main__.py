import sys

from flux_ref.golden.commands import main

sys.exit(main(sys.argv[1:]))
