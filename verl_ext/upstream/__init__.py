"""Changes to verl's and vLLM's code, one file per thing changed."""
