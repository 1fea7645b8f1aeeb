import flux_ref  # noqa: F401  before torch, as in train.py: it says how threads wait
