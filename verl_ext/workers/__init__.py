"""What runs inside the training workers: the policy losses and the routing capture."""
