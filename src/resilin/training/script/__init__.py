"""Script: the functions and classes that a training script calls."""
