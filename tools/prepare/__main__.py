import sys

from tools.prepare.commands import main

sys.exit(main(sys.argv[1:]))
