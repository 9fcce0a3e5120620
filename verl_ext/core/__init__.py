"""Pure torch: mismatch, corrections, routing, the guard. Knows nothing of verl, Ray or vLLM."""
