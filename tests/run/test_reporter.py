"""Which step and rank are blamed for a loss or norm that is not finite."""

from flux_ref.run.reporter import blame
from flux_ref.step import NEVER


def complaint(cfg, *flags):
    """What is said of (first bad loss, first bad norm) on each rank."""
    return blame(list(flags), cfg.train.global_batch)


def test_sound_ranks_are_not_blamed(micro):
    assert complaint(micro, (NEVER, NEVER), (NEVER, NEVER)) is None


def test_a_norm_that_went_first_is_not_blamed_on_the_losses_that_followed(micro):
    assert "gradient norm is not finite at step 4" in complaint(micro, (5, 4), (5, 4))


def test_a_loss_is_blamed_for_the_norm_of_its_own_step(micro):
    assert "loss is not finite at step 4 on rank 1's data (positions 54 to 59" in complaint(micro, (5, 4), (4, 4))


def test_a_loss_that_went_first_names_its_rank(micro):
    assert "at step 2 on rank 0's data" in complaint(micro, (2, 3), (3, 3))
