import sys

from flux_ref.report.commands import main

sys.exit(main(sys.argv[1:]))
