"""mlperf-logging's own compliance checker."""

from mlperf_logging.compliance_checker import mlp_compliance

RULESETS = ("5.1.0", "6.0.0", "6.1.0")
DIVISIONS = ("closed", "open")


def check(path, ruleset):
    """The official verdict on a result file, and the complaints."""
    checker = mlp_compliance.make_checker("training", ruleset, quiet=True, werror=False)
    accepted = checker.check_file(str(path), f"training_{ruleset}/common.yaml")
    return accepted, "\n".join([*checker.overwritable.values(), *checker.not_overwritable])
