import sys

from tools.plan.commands import main

sys.exit(main(sys.argv[1:]))
