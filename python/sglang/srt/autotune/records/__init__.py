"""Records on disk: what a start reads so that it need not tune, and writes so that the next one need not."""
