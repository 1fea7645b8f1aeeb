"""Which step and rank are blamed for a loss or norm that is not finite."""

from flux_ref.run.reporter import blame
from flux_ref.step import NEVER


def test_what_went_first_is_blamed(micro):
    """By (first bad loss, first bad norm) of each rank."""

    def complaint(*flags: tuple[int, int]) -> str | None:
        return blame(list(flags), micro.train.global_batch)

    assert complaint((NEVER, NEVER), (NEVER, NEVER)) is None
    assert "gradient norm is not finite at step 4" in complaint((5, 4), (5, 4))  # losses follow
    assert "loss is not finite at step 4 on rank 1's data (positions 54 to 59" in complaint((5, 4), (4, 4))
    assert "at step 2 on rank 0's data" in complaint((2, 3), (3, 3))
