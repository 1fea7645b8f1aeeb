"""The benchmark's constants.

Sources: MLCommons training_policies (training_rules.adoc) and mlcommons/training, folder text_to_image.
"""

TRAIN_SAMPLES = 1_099_776  # of CC12M, as preprocessed by MLCommons
VAL_SAMPLES = 29_696  # of COCO 2014, each with a stored timestep
TARGET = 0.586  # validation loss at which a run has converged
EVAL_EVERY_SAMPLES = 262_144  # training samples from one evaluation to the next
