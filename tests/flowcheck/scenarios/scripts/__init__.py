"""The scripts, by what they change. Importing this fills the table."""

from . import gradients, mixtures, models, optimizers, plain, resumes, scalers, schedules, weights

__all__ = ["gradients", "mixtures", "models", "optimizers", "plain", "resumes", "scalers", "schedules", "weights"]
