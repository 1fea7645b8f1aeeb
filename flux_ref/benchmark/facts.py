"""The benchmark's constants."""

TRAIN_SAMPLES = 1_099_776  # in the training set
VAL_SAMPLES = 29_696  # in the validation set
TARGET = 0.586  # validation loss at which a run has converged
EVAL_EVERY_SAMPLES = 262_144  # training samples between two evaluations
