import sys

from tools.report.commands import main

sys.exit(main(sys.argv[1:]))
