"""`verl-ext submit`: a run as a Ray job, with a folder of its own from which it can be resumed."""
