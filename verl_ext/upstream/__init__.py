"""Changes to verl's, vLLM's and SGLang's code, one file per thing changed; base/changes.py lists them."""
