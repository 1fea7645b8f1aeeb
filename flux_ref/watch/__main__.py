import sys

from flux_ref.watch.commands import main

sys.exit(main(sys.argv[1:]))
