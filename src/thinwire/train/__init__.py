"""``thinwire train``: configuration, text, model, loop, metrics and report of a training run."""
