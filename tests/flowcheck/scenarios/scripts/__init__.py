"""The scripts, by what they change. Importing this fills the table."""

from . import gradients, models, optimizers, plain, resumes, scalers, schedules, weights

__all__ = ["gradients", "models", "optimizers", "plain", "resumes", "scalers", "schedules", "weights"]
