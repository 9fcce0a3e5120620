"""What the rollout engine (vLLM) needs from this package, in each of its processes."""
