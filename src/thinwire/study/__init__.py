"""Studies: plans by seeds, run, compared and told in one table."""
