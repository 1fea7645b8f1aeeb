import sys

from tools.watch.commands import main

sys.exit(main(sys.argv[1:]))
