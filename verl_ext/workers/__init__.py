"""The code inside the training workers: their classes, the loss, the policy losses, the gate."""
