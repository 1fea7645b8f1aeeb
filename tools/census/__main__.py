import sys

from tools.census.commands import main

sys.exit(main(sys.argv[1:]))
