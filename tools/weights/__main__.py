import sys

from tools.weights.commands import main

sys.exit(main(sys.argv[1:]))
