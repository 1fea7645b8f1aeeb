import sys

from flux_ref.run.attempt import attempt
from tools.compare.commands import main

sys.exit(attempt("compare", lambda: main(sys.argv[1:])))
