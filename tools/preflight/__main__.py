import sys

from tools.preflight.commands import main

sys.exit(main(sys.argv[1:]))
