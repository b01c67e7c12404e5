"""From gradients to the next version of the model: layout, optimizers, replica slots."""
