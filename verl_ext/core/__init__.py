"""Pure torch: mismatch, corrections, filters, losses, routing. Knows nothing of verl, Ray or vLLM."""
