import sys

from tools.golden.check import main

sys.exit(main(sys.argv[1:]))
