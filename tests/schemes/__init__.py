"""Tests of the schemes: both ends, in one process and in two."""
