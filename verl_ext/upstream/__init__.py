"""Changes to the code of verl, vLLM and SGLang, one file per part that is changed; base/changes.py lists them."""
