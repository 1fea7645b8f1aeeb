import sys

from flux_ref.compare.commands import main
from flux_ref.run.attempt import attempt

sys.exit(attempt("compare", lambda: main(sys.argv[1:])))
