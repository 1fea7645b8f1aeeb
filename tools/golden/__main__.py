import sys

from tools.golden.commands import main

sys.exit(main(sys.argv[1:]))
