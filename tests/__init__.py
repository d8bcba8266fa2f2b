"""The tests; laid out like src/, with what starts real processes under distributed/."""
